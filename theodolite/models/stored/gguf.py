"""Read a model from GGUF files: its configuration, its tokenizer, and its weights, decoded a tensor at a time.

`gguf` decodes the bytes; `transformers` knows names and layouts. What its maps leave out is set from the file. Refused
are a key that is missing, one that has no setting, and a tensor without a place.
"""

from __future__ import annotations

import functools
import math
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import numpy as np
import torch
from gguf.constants import LlamaFileType
from tokenizers import Regex, decoders, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.integrations import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.integrations.gguf.reader import _read_string, _read_tensor_table, _read_value
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from theodolite.errors import UsageError, WorkError, first_line
from theodolite.system.checkpoint_folders import gguf_files

ANEW = "download it again, or convert the model anew"

FAMILIES = {name: name for name in ("llama", "qwen2", "qwen3", "gemma2", "phi3")}
FAMILIES |= {"gemma3": "gemma3_text", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
"""Architectures that are read, and what `transformers` calls them."""

SETTINGS = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_weights_norm": "norm_topk_prob",
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "layer_types",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
"""Keys of a file, after its architecture → what configurations call them, where `transformers` doesn't map them."""

OPTIONAL = {
    *("vocab_size", "attention.head_count_kv", "attention.key_length"),
    *("rope.dimension_count", "rope.freq_base"),
}
"""Keys that `transformers` maps and a file may leave out: then a tensor has the value, or it is llama.cpp's default."""

NEEDS_NO_SETTING = OPTIONAL | {
    *("context_length", "feed_forward_length", "attention.value_length"),
    *("rope.scale_linear", "rope.freq_base_swa", "tensor_data_layout", "pooling_type"),
    *(f"rope.scaling.{name}" for name in ("type", "factor", "original_context_length", "attn_factor")),
    *(f"rope.scaling.{name}" for name in ("finetuned", "yarn_beta_fast", "yarn_beta_slow")),
}
"""Keys that are read here, that tensors show, too, or that change no logits."""

NEUTRAL = {"attention.causal": True, "expert_gating_func": 1, "expert_weights_scale": 1}
"""What a key says that has no setting and changes nothing, where that is not 0."""

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Divisors of the rotary frequencies: a setting of the configuration, no weights."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = GGUF_PRE_TOKENIZER_SPLITS["llama3"]
SPLITS = {"gpt-2": (_GPT2,), "smollm": (r"\p{N}", _GPT2)}
"""At what llama.cpp splits a text, one after the other, where `transformers` splits in one other way."""

LIKE_LLAMA3 = {name for name, split in GGUF_PRE_TOKENIZER_SPLITS.items() if split == _LLAMA3} | {"tekken"}
LIKE_LLAMA3 -= {"dbrx", "smaug-bpe"}
"""With these splits, llama.cpp begins a text with BOS unless the file says otherwise, and takes a word that is in the
vocabulary whole before it merges; `transformers` does neither."""


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: its file and first byte there; its type, and the shape of its bytes (rows first)."""

    path: Path
    start: int
    kind: gguf.GGMLQuantizationType
    bytes: tuple[int, ...]


def _read_header(path: Path) -> tuple[dict[str, Any], list[tuple[str, StoredTensor]]]:
    """Read the metadata of a file, of an array of strings its length, and where its tensors lie."""
    data: Any = np.memmap(path, np.uint8, "r")
    version, count, keys = struct.unpack_from("<IQQ", data, 4)
    if version not in (2, 3):
        raise ValueError(f"version {version} of the format is not read")
    metadata, place = dict[str, Any](), 24
    for _ in range(keys):
        key, place = _read_string(data, place)
        metadata[key], place = _read_value(data, place + 4, *struct.unpack_from("<I", data, place))
    entries, place = _read_tensor_table(data, count, place)
    place += -place % metadata.get("general.alignment", 32)
    tensors = []
    for name, shape, number, offset in entries:
        if number not in list(gguf.GGMLQuantizationType):
            raise ValueError(f"tensor {name} is of type {number}, unknown to gguf {package_version('gguf')}")
        kind = gguf.GGMLQuantizationType(number)
        tensor = StoredTensor(path, place + offset, kind, gguf.quant_shape_to_byte_shape(shape, kind))
        if tensor.start + math.prod(tensor.bytes) > data.size:
            raise ValueError(f"tensor {name}: the file is cut short")
        tensors.append((name, tensor))
    return metadata, tensors


@dataclass(frozen=True)
class GgufFile:
    """The metadata in the first of a model's GGUF files, and where the tensors of all of them lie."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, StoredTensor]

    @classmethod
    def read(cls, path: Path) -> GgufFile:
        """Read the headers, of which `path` is one; `UsageError` where a file is missing, damaged or cut short."""
        headers = {}
        for file in gguf_files(path):
            try:
                headers[file] = _read_header(file)
            except (ValueError, LookupError, ArithmeticError, OSError, TypeError, struct.error) as error:
                plain = {ValueError: first_line(error), struct.error: "the file is cut short"}
                reason = plain.get(type(error), f"its header is damaged ({first_line(error)})")
                raise UsageError(f"cannot open {file}: {reason}: {ANEW}") from error
        first, (fields, _) = next(iter(headers.items()))
        if "general.architecture" not in fields:
            raise UsageError(f"cannot open {first}: it does not say its architecture: {ANEW}")
        return cls(first, fields, {name: at for _, tensors in headers.values() for name, at in tensors})

    def refused(self, reason: str) -> UsageError:
        """Return the error for a model that is not opened."""
        return UsageError(f"cannot open {self.path}: {reason}")

    def check_size(self, key: str) -> None:
        """Raise `UsageError` where a key that the model needs is missing or no size."""
        value = self.own().get(key)
        if not isinstance(value, int | float) or value <= 0:
            state = "lack" if value is None else f"say {value!r} as"
            raise self.refused(f"its metadata {state} {self.architecture}.{key}: {ANEW}")

    @property
    def architecture(self) -> str:
        """What llama.cpp calls the architecture."""
        return str(self.fields["general.architecture"])

    def own(self) -> dict[str, Any]:
        """Return the metadata of the architecture, by their keys after its name."""
        prefix = self.architecture + "."
        return {key.removeprefix(prefix): v for key, v in self.fields.items() if key.startswith(prefix)}

    def quantisation(self) -> dict[str, Any]:
        """Say how the weights are stored: by the file's own name for it, else by the type of the largest."""
        counts = Counter(tensor.kind.name for tensor in self.tensors.values())
        try:
            name = LlamaFileType(self.fields["general.file_type"]).name
        except (KeyError, ValueError):
            name = max(self.tensors.values(), key=lambda tensor: math.prod(tensor.bytes)).kind.name
        name = name.removeprefix("MOSTLY_").removeprefix("ALL_")
        return {"gguf": name, "tensor_types": dict(counts.most_common())}

    def decoded(self, name: str) -> np.ndarray[Any, Any]:
        """Read a tensor and decode it to float32; `WorkError` where `gguf` cannot decode its type."""
        tensor = self.tensors[name]
        # Read rather than mapped: what was read of a mapped file counts as memory until it is closed.
        data = np.fromfile(tensor.path, np.uint8, math.prod(tensor.bytes), offset=tensor.start)
        try:
            return gguf.dequantize(data.reshape(tensor.bytes), tensor.kind)
        except (NotImplementedError, ValueError) as error:
            raise WorkError(f"cannot decode tensor {name} of {tensor.path}: {first_line(error)}") from error


def gguf_config(path: Path) -> Any:
    """Make the configuration as `transformers` reads it and with what that leaves out; `UsageError` where it cannot."""
    file = GgufFile.read(path)
    metadata, tensors = file.own(), file.tensors
    family = FAMILIES.get(file.architecture)
    if family is None:
        raise file.refused(
            f"GGUF files of the architecture {file.architecture} are not read: open its safetensors"
        )
    mapped: Any = GGUF_CONFIG_MAPPING[family.removesuffix("_text")]
    # Else some defaults warn of their own tokens.
    no_tokens: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    default = CONFIG_MAPPING[family](**no_tokens)
    known = default.to_dict().keys() | default.attribute_map.keys()
    places = {key: name for key, name in mapped.items() if name in known}
    # A file of experts may have no dense layers.
    optional = OPTIONAL | {"feed_forward_length"} if "expert_count" in places else OPTIONAL
    for key in sorted(places.keys() - optional):
        file.check_size(key)
    layers = metadata["block_count"]
    if layers > len(tensors):
        raise file.refused(f"its metadata say {layers} layers, its files hold {len(tensors)} tensors")
    settings: dict[str, Any] = {"model_type": family, **GGUF_CONFIG_DEFAULTS_MAPPING.get(family, {})}
    settings |= {"sliding_window": None} if "sliding_window" in known else {}
    needless = NEEDS_NO_SETTING | {key for key, name in mapped.items() if name is None}
    for key, value in metadata.items():
        name = places.get(key, SETTINGS.get(key))
        if name in known:
            settings[name] = value
        elif key not in needless and value != NEUTRAL.get(key, 0):
            raise file.refused(
                f"it says {file.architecture}.{key} = {value}, and transformers has no setting for that in "
                f"{type(default).__name__}"
            )
    settings.setdefault("num_key_value_heads", settings["num_attention_heads"])
    if "head_dim" in known and mapped.get("attention.key_length") in (None, "head_dim"):
        width = settings["hidden_size"] // settings["num_attention_heads"]
        settings["head_dim"] = metadata.get("attention.key_length", width)
    if "token_embd.weight" in tensors:
        settings["vocab_size"] = tensors["token_embd.weight"].bytes[0]
    settings["tie_word_embeddings"] = "output.weight" not in tensors
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        settings[f"{name}_token_id"] = file.fields.get(f"tokenizer.ggml.{key}_token_id")
    for name, tensor in (("attention_bias", "attn_q"), ("mlp_bias", "ffn_up")):
        if name in known:
            settings[name] = f"blk.0.{tensor}.bias" in tensors
    if family in ("gemma2", "gemma3_text"):
        # As in llama.cpp, the number of layers tells models of 27B: they divide queries by √(width / heads).
        is_27b = layers == (46 if family == "gemma2" else 62)
        of_27b = settings["hidden_size"] / settings["num_attention_heads"]
        settings["query_pre_attn_scalar"] = of_27b if is_27b else settings["head_dim"]
    pattern = metadata.get("attention.sliding_window_pattern")
    if settings.get("sliding_window") and "use_sliding_window" in known:
        settings["use_sliding_window"] = True
        pattern = pattern or [True] * layers
    if pattern and "layer_types" in known:
        if isinstance(pattern, int):
            pattern = [bool((layer + 1) % pattern) for layer in range(layers)]
        settings["layer_types"] = ["sliding_attention" if local else "full_attention" for local in pattern]
    settings["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]
    return AutoConfig.for_model(**settings | _rotary(file, settings, default))


def _rotary(file: GgufFile, settings: dict[str, Any], default: Any) -> dict[str, Any]:
    metadata = file.own()
    rotary: dict[str, Any] = {"rope_theta": metadata.get("rope.freq_base", 1e4)}
    if "rope.freq_base_swa" in metadata:
        rotary["rope_local_base_freq"] = metadata["rope.freq_base_swa"]
    head = settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]
    turned = metadata.get("rope.dimension_count", head)
    if "partial_rotary_factor" in default.rope_parameters:
        rotary["partial_rotary_factor"] = turned / head
    elif turned != head:
        raise file.refused(
            f"positions turn {turned} of {head} dimensions of its heads, and all of them in transformers' "
            f"{type(default).__name__}"
        )
    kind = metadata.get("rope.scaling.type", "none")
    factor: Any = metadata.get("rope.scaling.factor", metadata.get("rope.scale_linear"))
    context = metadata.get("rope.scaling.original_context_length", metadata.get("context_length"))
    of_attention = metadata.get("rope.scaling.attn_factor", 1.0)
    divisors = [file.decoded(name).tolist() for name in ROPE_TENSORS if name in file.tensors]
    if kind != "none" and not factor and not divisors:
        file.check_size("rope.scaling.factor")
    if divisors:  # Llama 3's are the same for all lengths; Phi-3's are short, long
        scaling = {"rope_type": "longrope", "short_factor": divisors[0], "long_factor": divisors[-1]}
        scaling |= {"factor": 1.0, "attention_factor": of_attention}
    elif kind == "yarn":
        of_attention *= 1 + 0.1 * math.log(factor)
        scaling = {"rope_type": "yarn", "factor": factor, "attention_factor": of_attention}
        betas = {name: metadata.get(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        scaling |= {name: value for name, value in betas.items() if value is not None}
    elif kind in ("linear", "none") and of_attention == 1:
        return rotary | ({"rope_scaling": {"rope_type": "linear", "factor": factor}} if factor else {})
    else:
        raise file.refused(f"its rotary positions are scaled by {kind!r} with attn_factor {of_attention}")
    original = {"original_max_position_embeddings": context}
    if hasattr(default, "original_max_position_embeddings"):  # Phi-3's own setting counts more
        rotary |= original
    return rotary | {"rope_scaling": scaling | original}


class GgufTensors:
    """A model without its weights, and the tensors of a GGUF file for it; `WorkError` where one of either is left."""

    def __init__(self, path: Path, model: PreTrainedModel) -> None:
        self.model, self.file = model, GgufFile.read(path)
        architecture, stored = self.file.architecture, self.file.tensors
        # Undoes what llama.cpp does to the layout of tensors.
        self._processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
        # It would make the table of names anew for every module of the model, which takes seconds.
        with patch.object(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)):
            self._names: dict[str, str] = get_gguf_hf_weights_map(model, self._processor, architecture)
        self._parts: dict[str, list[str]] = {}  # the model's name of each tensor → the file's
        for tensor in [name for name in stored if name not in ROPE_TENSORS]:
            # Of experts, which lie in one tensor here and in one there, the map has the name without its ending.
            name = self._names.get(tensor) or self._names.get(tensor.removesuffix(".weight"))
            if name is None:
                raise WorkError(f"tensor {tensor} of {path} has no place in {type(model).__name__}")
            self._parts.setdefault(name, []).append(tensor)
        own = {name: tensor for tensor, name in self._names.items()}
        without = model.state_dict().keys() - self._parts.keys() - model.all_tied_weights_keys.keys()
        lacking = {own.get(name, name) for name in without}
        # Where several make one, a processor would leave zeros for what is not there.
        lacking |= {name for name in self._names if name.endswith("_exps") and f"{name}.weight" not in stored}
        if lacking:
            raise WorkError(
                f"{path} lacks {len(lacking)} of the model's tensors (first: {min(lacking)}): {ANEW}"
            )

    def load(self, wanted: Callable[[str], bool], what: str, device: torch.device | str = "cpu") -> None:
        """Load the tensors whose names in the model are wanted; `WorkError` where one is of another shape."""
        for name in filter(wanted, self._parts):
            module, _, own = name.rpartition(".")
            holder = self.model.get_submodule(module)
            skeleton = getattr(holder, own)
            tensor = self._decoded(name, skeleton.shape).to(device, skeleton.dtype)
            setattr(holder, own, nn.Parameter(tensor, requires_grad=False))

    def _decoded(self, name: str, shape: torch.Size) -> Tensor:
        parsed: dict[str, Any] = {"tensors": {}}  # where processors put what several tensors make up
        for part in sorted(self._parts[name]):
            array = self.file.decoded(part)
            stored = tuple(array.shape)
            try:
                result = self._processor.process(
                    weights=array, name=part, tensor_key_mapping=self._names, parsed_parameters=parsed
                )
            except ValueError:
                result = None
            if result is not None and result.name is not None:
                parsed["tensors"][name] = torch.from_numpy(np.ascontiguousarray(result.weights))
        tensor = parsed["tensors"].get(name)
        if tensor is None or tensor.shape != shape:
            raise WorkError(
                f"tensor {part} of {self.file.path} is {' × '.join(map(str, stored))}, which does not make {name} of "
                f"{' × '.join(map(str, shape))}: its metadata ask for another model"
            )
        return tensor


def gguf_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Make the tokenizer with its chat template; `UsageError` where it is not known how it splits a text."""
    architecture, vocabulary, options = get_gguf_tokenizer(str(path))
    kind, split = vocabulary.get("tokenizer_type"), vocabulary.get("pre_tokenizer_type")
    if split in LIKE_LLAMA3:
        options.setdefault("add_bos_token", True)
    backend, _ = convert_gguf_tokenizer(architecture, vocabulary)
    if split in LIKE_LLAMA3:
        backend.model.ignore_merges = True
    if kind == "gpt2" and split in SPLITS:
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[split]]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    elif kind == "gpt2" and split not in (None, "default", *GGUF_PRE_TOKENIZER_SPLITS):
        raise UsageError(
            f"{path} splits a text in a way that is not known here ({split}): save a tokenizer beside it"
        )
    by_words = isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace)
    if by_words and vocabulary.get("add_prefix_space") is False:
        backend.pre_tokenizer.prepend_scheme = "never"
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **options)
