"""Tiny checkpoints of real architectures, written to disk as their owners would write them.

Weights are random but not small, and biases, norms and sinks are random too: at the usual initialisation
(0.02, zero, one) attention is nearly uniform and half of the mistakes one can make would not show.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate.utils.other
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tools import small_models

# `save_pretrained` would import DeepSpeed to ask whether the model is one of its engines, which takes six seconds.
accelerate.utils.other.is_deepspeed_available = lambda: False

VOCABULARY = 300
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
_NO_SPECIAL = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}

_SMALL = {**_SIZES, **_NO_SPECIAL}
_GROUPED = {**_SMALL, "num_key_value_heads": 2}
_WIDER_HEADS = {**_GROUPED, "head_dim": 12}


def _rope(kind: str, theta: float, factor: float, positions: int, **more: Any) -> dict[str, Any]:
    rope = {"rope_type": kind, "rope_theta": theta, "factor": factor}
    return {"rope_parameters": rope | {"original_max_position_embeddings": positions} | more}


LLAMA_3 = _rope("llama3", 5e5, 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0)
YARN = _rope("yarn", 1.5e5, 32.0, 4, beta_fast=32.0, beta_slow=1.0, truncate=False)
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128, **_NO_SPECIAL}
_BLOOM = {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 3, "n_head": 4, **_NO_SPECIAL}
_OPT = {**_SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32, "pad_token_id": 1}
_GEMMA_2 = {"query_pre_attn_scalar": 20, "sliding_window": 9, "attn_logit_softcapping": 3.0}
_GPT_OSS = {"sliding_window": 6, "num_local_experts": 2, "num_experts_per_tok": 1, **YARN}
_VIT = {name: _SIZES[name] for name in _SIZES if "vocab" not in name and "position" not in name}

# name → (model class, config class, options)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "bert": ("BertForMaskedLM", "BertConfig", _SIZES),
    "bloom": ("BloomForCausalLM", "BloomConfig", _BLOOM),
    "llama2": ("LlamaForCausalLM", "LlamaConfig", _SMALL),
    "llama3": ("LlamaForCausalLM", "LlamaConfig", {**_GROUPED, "attention_bias": True, **LLAMA_3}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", _GROUPED),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _SMALL),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_GROUPED, "sliding_window": 7}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _WIDER_HEADS),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**_WIDER_HEADS, **_GEMMA_2}),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {**_WIDER_HEADS, **_GPT_OSS}),
    "opt": ("OPTForCausalLM", "OPTConfig", _OPT),
    "cohere": ("CohereForCausalLM", "CohereConfig", _GROUPED),
    "vit": ("ViTForImageClassification", "ViTConfig", {**_VIT, "image_size": 16, "patch_size": 4}),
}
TEXT_FAMILIES = tuple(name for name in FAMILIES if name != "vit")
WITH_EXPERTS = (*TEXT_FAMILIES, "mixtral")
"""Those that are pruned: GPT-OSS has few experts, and Mixtral's names change on loading."""


def build(family: str, seed: int = 0, **changes: Any) -> transformers.PreTrainedModel:
    """A random model of the family, evaluation mode, float32; changes are of its config.

    Families that are not here are those of `tools/small_models.py`.
    """
    if family not in FAMILIES:
        case = next(case for case in small_models.cases() if case.name == family)
        return small_models.build(case, seed, **changes)
    model_class, config_class, options = FAMILIES[family]
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**options | changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1 and "norm" in name.lower() and "weight" in name:
                parameter.add_(0.2 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(noise * min(0.25, 1.4 / parameter.shape[-1] ** 0.5))
    return model.eval()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and an end-of-text token; fits every checkpoint here."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


def write(
    family: str, folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> Path:
    """Write model and tokenizer to `folder` and return it."""
    build(family, seed, **changes).to(dtype).save_pretrained(folder)
    if family != "vit":
        byte_tokenizer().save_pretrained(folder)
    return folder


def sharp_gpt2(folder: Path, **sizes: Any) -> Path:
    """A GPT-2 whose queries look far more sharply than random ones, so that it has sinks; without a tokenizer."""
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, **sizes))
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_attn.weight.mul_(40)
    model.save_pretrained(folder)
    return folder


def edited(folder: Path, **changes: object) -> Path:
    """The folder, whose config says something else."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def with_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """The folder, whose tensors are changed in place by a function of their dictionary."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
