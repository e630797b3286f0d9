"""GGUF files of tiny models, written with the `gguf` package as llama.cpp's converter would write them.

What that does to the layout of tensors (`convert_hf_to_gguf.py`) is written out here: nothing of theodolite is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from tokenizers import pre_tokenizers
from transformers import PreTrainedModel

ARCHITECTURES = {"gemma3_text": "gemma3", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}
"""What llama.cpp calls those families that it calls otherwise than `transformers`."""

_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "head_count": "num_attention_heads",
    "head_count_kv": "num_key_value_heads",
    "layer_norm_rms_eps": "rms_norm_eps",
    "sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""A method of the writer, after `add_` → the field of the configuration."""


def stored_layout(name: str, tensor: np.ndarray, config: Any, architecture: str) -> np.ndarray:
    """A tensor as the converter lays it out; `name` is that in the file."""
    if architecture == "llama" and (".attn_q." in name or ".attn_k." in name):
        heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
        halves = tensor.reshape(heads, 2, len(tensor) // heads // 2, *tensor.shape[1:])
        return halves.swapaxes(1, 2).reshape(tensor.shape)
    if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
        return tensor + 1
    if name.endswith("ffn_gate_inp_shexp.weight"):
        return tensor[0]
    return tensor


def rope_divisors(config: Any) -> np.ndarray:
    """By what the converter has Llama 3's rotary frequencies divided."""
    rope, width = config.rope_parameters, config.hidden_size // config.num_attention_heads
    frequencies = 1 / rope["rope_theta"] ** (np.arange(0, width, 2, dtype=np.float64) / width)
    wavelengths, context = 2 * np.pi / frequencies, rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((context / wavelengths - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


def tensors_of(model: PreTrainedModel, architecture: str) -> dict[str, np.ndarray]:
    """The tensors of a model by their names and in their layout in a GGUF file."""
    config, tied = model.config.get_text_config(), model.all_tied_weights_keys
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names, tensors = gguf.get_tensor_name_map(arch, config.num_hidden_layers), {}
    for name, tensor in model.state_dict().items():
        if name in tied:
            continue
        array = tensor.float().numpy()
        if name.endswith("experts.gate_up_proj"):
            layer, half = name.split(".")[2], array.shape[1] // 2
            tensors[f"blk.{layer}.ffn_gate_exps.weight"] = array[:, :half]
            tensors[f"blk.{layer}.ffn_up_exps.weight"] = array[:, half:]
            continue
        stem, _, ending = name.rpartition(".")
        stored = names.get_name(name) or names.get_name(stem) or names.get_name(stem.partition(".")[2])
        assert stored is not None, name
        ending = f".{ending}" if ending in ("weight", "bias") else ".weight"
        tensors[stored + ending] = stored_layout(stored + ending, array, config, architecture)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = rope_divisors(config)
    return tensors


def add_tokenizer(writer: gguf.GGUFWriter, size: int, pre: bool) -> None:
    """Write a vocabulary of bytes and two words; `pre`: how it splits a text, too."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, "he", "hello", "<|endoftext|>"]  # no merges make "hello"
    writer.add_tokenizer_model("gpt2")
    if pre:
        writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words + [f"[unused{n}]" for n in range(size - len(words))])
    writer.add_token_types([1] * (len(words) - 1) + [3] + [5] * (size - len(words)))
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(len(words) - 1)
    writer.add_bos_token_id(len(words) - 1)
    writer.add_chat_template("{{ messages[0]['content'] }}")


def write(
    model: PreTrainedModel,
    path: Path,
    types: Type | Callable[[str], Type] = Type.F32,
    change: Callable[[dict[str, np.ndarray]], object] = lambda tensors: None,
    without: Iterable[str] = (),
    more: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, np.ndarray]:
    """Write a model to a GGUF file; returns the data of its tensors as stored.

    Args:
        types: of matrices; vectors are float32.
        change: changes the tensors in place before they are written.
        without: metadata, as of the writer's methods, that are left out; "tokenizer": all of its.
        more: others, booleans, whole numbers, floats, strings or lists of these, by their keys.
        options: of the writer; `split_max_tensors` cuts the model into files.
    """
    config = model.config.get_text_config()
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    architecture = "llama" if architecture == "mistral" else architecture
    writer = gguf.GGUFWriter(path, architecture, **options)
    settings = {name: getattr(config, field, None) for name, field in _SIZES.items()}
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    heads, head = config.num_attention_heads, getattr(config, "head_dim", None)
    if head and head != config.hidden_size // heads:
        settings |= {"key_length": head, "value_length": head}
    head = head or config.hidden_size // heads
    if rope:
        settings["rope_freq_base"] = rope["rope_theta"]
        settings["rope_dimension_count"] = int(head * rope.get("partial_rotary_factor", 1))
        if architecture == "gemma2" or architecture.startswith("qwen"):
            del settings["rope_dimension_count"]
    for name, value in settings.items():
        if value is not None and name not in without:
            getattr(writer, f"add_{name}")(value)
    for key, value in (more or {}).items():
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        add[type(value)](key, value)
    if "tokenizer" not in without:
        add_tokenizer(writer, config.vocab_size, "tokenizer_pre" not in without)
    tensors, stored = tensors_of(model, architecture), {}
    change(tensors)
    for name, tensor in tensors.items():
        kind = types if isinstance(types, Type) else types(name)
        kind = kind if tensor.ndim > 1 and tensor.shape[-1] % 32 == 0 else Type.F32
        stored[name] = gguf.quantize(np.ascontiguousarray(tensor), kind)
        writer.add_tensor(name, stored[name], raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored
