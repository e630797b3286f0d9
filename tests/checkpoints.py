"""Tiny checkpoints of real architectures, written to disk as their owners would write them.

Weights are random but not small, and biases, norms and sinks are random too: at the usual initialisation
(0.02, zero, one) attention is nearly uniform and half of the mistakes one can make would not show.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate.utils.other
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

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

# name → (model class, config class, options)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 32,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 128,
            **_NO_SPECIAL,
        },
    ),
    "bert": ("BertForMaskedLM", "BertConfig", _SIZES),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 3, "n_head": 4, **_NO_SPECIAL},
    ),
    "llama2": ("LlamaForCausalLM", "LlamaConfig", {**_SIZES, **_NO_SPECIAL}),
    "llama3": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {
            **_SIZES,
            **_NO_SPECIAL,
            "num_key_value_heads": 2,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**_SIZES, **_NO_SPECIAL, "num_key_value_heads": 2}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**_SIZES, **_NO_SPECIAL}),
    "mistral": (
        "MistralForCausalLM",
        "MistralConfig",
        {**_SIZES, **_NO_SPECIAL, "num_key_value_heads": 2, "sliding_window": 7},
    ),
    "qwen3": (
        "Qwen3ForCausalLM",
        "Qwen3Config",
        {**_SIZES, **_NO_SPECIAL, "num_key_value_heads": 2, "head_dim": 12},
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {
            **_SIZES,
            **_NO_SPECIAL,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "query_pre_attn_scalar": 20,
            "sliding_window": 9,
            "attn_logit_softcapping": 3.0,
        },
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **_SIZES,
            **_NO_SPECIAL,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "sliding_window": 6,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4,
            },
        },
    ),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {**_SIZES, **_NO_SPECIAL, "ffn_dim": 48, "word_embed_proj_dim": 32, "pad_token_id": 1},
    ),
    "cohere": ("CohereForCausalLM", "CohereConfig", {**_SIZES, **_NO_SPECIAL, "num_key_value_heads": 2}),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "image_size": 16,
            "patch_size": 4,
        },
    ),
}
TEXT_FAMILIES = tuple(name for name in FAMILIES if name != "vit")


def build(family: str, seed: int = 0) -> transformers.PreTrainedModel:
    """A random model of the family, evaluation mode, float32."""
    model_class, config_class, options = FAMILIES[family]
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**options))
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


def write(family: str, folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Write model and tokenizer to `folder` and return it."""
    build(family, seed).to(dtype).save_pretrained(folder)
    if family != "vit":
        byte_tokenizer().save_pretrained(folder)
    return folder
