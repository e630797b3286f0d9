"""Read a model from GGUF files: its configuration, its tokenizer, and its weights, decoded a tensor at a time.

`gguf` decodes the bytes; `transformers` knows how names and layouts become its own. What that leaves out of the
configuration is set from the file; a key that changes the model and has no setting is refused, and so is a tensor
without a place.
"""

from __future__ import annotations

import functools
import math
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import numpy as np
import torch
from gguf.constants import GGUFValueType, LlamaFileType
from tokenizers import Regex, decoders, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.modeling_gguf_pytorch_utils import (
    GGUF_CONFIG_MAPPING,
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
    load_gguf_checkpoint,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from theodolite.errors import UsageError, WorkError, first_line
from theodolite.system.checkpoint_folders import gguf_files

BROKEN_FILE_ERRORS = (ValueError, LookupError, OverflowError, OSError, TypeError, struct.error)
"""What reading a damaged header raises."""

LONG_ARRAY = 1000
"""Entries of a metadata array from which it is a vocabulary, passed over here: the tokenizer reads it by itself."""

SETTINGS = {
    "context_length": ("max_position_embeddings",),
    "feed_forward_length": ("n_inner", "ffn_hidden_size"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_weights_norm": ("norm_topk_prob",),
    "attention.head_count_kv": ("num_key_value_heads", "num_kv_heads"),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps"),
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "logit_scale": ("logit_scale",),
}
"""Keys of a file, after its architecture → what configurations call them, where `transformers` doesn't map them."""

NEEDS_A_SETTING = {
    "attention.sliding_window",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "attention.scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "embedding_scale",
    "residual_scale",
}
"""Keys that change what the model computes, unless they are 0."""

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Divisors of the rotary frequencies: a setting of the configuration, no weights."""

LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""Of Gemma's models, those of 27B divide queries by √(width / heads) and the others by √(width of a head). No key says
so: llama.cpp goes by the number of layers, too."""

_GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",)
_LLAMA3 = GGUF_PRE_TOKENIZER_SPLITS["llama3"]
SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "mellum"), _GPT2),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (r"\p{N}", *_GPT2)
    ),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), (r" ?[^(\s|[.,!?…。，、।۔،])]+",)),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", *_GPT2, "[0-9][0-9][0-9]"),
    "stablelm2": (GGUF_PRE_TOKENIZER_SPLITS["qwen2"],),
}
"""At what llama.cpp splits a text, one after the other, where `transformers` splits as GPT-2 does."""

LIKE_LLAMA3 = {name for name, split in GGUF_PRE_TOKENIZER_SPLITS.items() if split == _LLAMA3}
LIKE_LLAMA3 = LIKE_LLAMA3 - {"dbrx", "smaug-bpe"} | {"tekken"}
"""With these splits, llama.cpp begins a text with BOS unless the file says otherwise, and takes a word that is in the
vocabulary whole before it merges; `transformers` does neither."""


class _Reader(gguf.GGUFReader):
    """`gguf`'s reader, quick with vocabularies and strict with files that are too short."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        if offset + np.dtype(dtype).itemsize * int(count) > len(self.data):
            raise ValueError("the file is cut short")
        return super()._get(offset, dtype, count, override_order)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type == GGUFValueType.ARRAY:
            kind = GGUFValueType(self._get(orig_offs, np.uint32)[0])
            count = int(self._get(orig_offs + 4, np.uint64)[0])
            if count >= LONG_ARRAY and kind != GGUFValueType.ARRAY:
                end = orig_offs + 12
                if kind == GGUFValueType.STRING:
                    for _ in range(count):
                        end += 8 + struct.unpack_from("<Q", self.data.data, end)[0]
                else:
                    end += count * np.dtype(self.gguf_scalar_to_np[kind]).itemsize
                return end - orig_offs, [], [], [GGUFValueType.ARRAY, kind]
        return super()._get_field_parts(orig_offs, raw_type)

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        tensors: dict[str, Any] = {}
        for field in fields:
            name, kind = bytes(field.parts[1]).decode(), int(field.parts[4][0])
            if kind not in list(gguf.GGMLQuantizationType):
                raise ValueError(f"tensor {name} is of type {kind}, unknown to gguf {version('gguf')}")
            if name in tensors:
                raise ValueError(f"tensor {name} is there twice")
            try:
                super()._build_tensors(start_offs, [field])
            except BROKEN_FILE_ERRORS as error:
                raise ValueError(f"tensor {name}: {first_line(error)}") from error
            tensors[name] = self.tensors[0]
        self.tensors = list(tensors.values())


@dataclass(frozen=True)
class GgufFile:
    """The header of a model's GGUF files.

    Attributes:
        path: the first of them, whose metadata (`reader`, `fields`; of vocabularies nothing) are the model's.
        tensors: each tensor's file and place there, of all files.
    """

    path: Path
    reader: _Reader
    fields: dict[str, Any]
    tensors: dict[str, tuple[Path, Any]]

    @classmethod
    def read(cls, path: Path) -> GgufFile:
        """Read the headers, of which `path` is one; `UsageError` where a file is missing, damaged or cut short."""
        readers = {}
        for file in gguf_files(path):
            try:
                readers[file] = _Reader(file)
                if readers[file].byte_order != "I":
                    raise ValueError("its numbers are big-endian")
            except BROKEN_FILE_ERRORS as error:
                raise UsageError(f"cannot open {file}: {first_line(error)}") from error
        first = next(iter(readers))
        fields = {name: field.contents() for name, field in readers[first].fields.items()}
        if not isinstance(fields.get("general.architecture"), str):
            raise UsageError(f"cannot open {first}: it does not say its architecture")
        placed = [
            (tensor.name, (file, tensor)) for file, reader in readers.items() for tensor in reader.tensors
        ]
        tensors = dict(placed)
        if len(tensors) < len(placed):
            raise UsageError(f"cannot open {first}: two of its files hold the same tensor")
        return cls(first, readers[first], fields, tensors)

    @property
    def architecture(self) -> str:
        """What llama.cpp calls the architecture."""
        return str(self.fields["general.architecture"])

    def own(self) -> dict[str, Any]:
        """Return the metadata of the architecture, by their keys after its name."""
        prefix = self.architecture + "."
        return {key.removeprefix(prefix): v for key, v in self.fields.items() if key.startswith(prefix)}

    def quantisation(self) -> dict[str, Any]:
        """Say how the weights are stored: by the file's own name for it, else by the type of most of them."""
        tensors = [tensor for _, tensor in self.tensors.values()]
        elements: Counter[str] = Counter()
        for tensor in tensors:
            elements[tensor.tensor_type.name] += tensor.n_elements
        try:
            name = LlamaFileType(self.fields["general.file_type"]).name
        except (KeyError, ValueError):
            name = elements.most_common(1)[0][0]
        types = Counter(tensor.tensor_type.name for tensor in tensors)
        return {
            "gguf": name.removeprefix("MOSTLY_").removeprefix("ALL_"),
            "tensor_types": dict(types.most_common()),
        }

    def decoded(self, name: str) -> np.ndarray[Any, Any]:
        """Read a tensor and decode it to float32; `WorkError` where `gguf` cannot decode its type."""
        path, tensor = self.tensors[name]
        # Read rather than mapped: what was read of a mapped file counts as memory until it is closed.
        data = np.fromfile(path, tensor.data.dtype, tensor.data.size, offset=int(tensor.data_offset))
        try:
            return gguf.dequantize(data.reshape(tensor.data.shape), tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise WorkError(f"cannot decode tensor {name} of {path}: {first_line(error)}") from error


def gguf_config(path: Path) -> Any:
    """Make the configuration as `transformers` reads it and with what that leaves out; `UsageError` where it cannot."""
    return AutoConfig.for_model(**_settings(GgufFile.read(path)))


def _mapped_settings(file: GgufFile) -> dict[str, Any]:
    """Return what `transformers` makes of the metadata."""
    # Of Gemma 4's widths, rotary positions and shared keys the map leaves most to the defaults of one model.
    if file.architecture == "gemma4":
        raise UsageError(f"cannot open {file.path}: GGUF model with architecture gemma4 is not supported")
    try:
        # It would read the header anew, and take seconds for the vocabulary.
        with patch.object(gguf, "GGUFReader", lambda path: file.reader):
            settings: dict[str, Any] = load_gguf_checkpoint(str(file.path))["config"]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(f"cannot open {file.path}: {first_line(error)}") from error
    layers = file.own().get("block_count", 0)
    if layers > len(file.tensors):
        raise UsageError(
            f"cannot open {file.path}: its metadata say {layers} layers, its files hold {len(file.tensors)} tensors"
        )
    return settings


def _settings(file: GgufFile) -> dict[str, Any]:
    """Return what the configuration is made of."""
    settings = _mapped_settings(file)
    default, own, family = CONFIG_MAPPING[settings["model_type"]](), file.own(), settings["model_type"]
    known = default.to_dict().keys() | default.attribute_map.keys()
    mapping: Any = GGUF_CONFIG_MAPPING
    mapped = mapping.get(family.removesuffix("_text"), {})
    for key, names in SETTINGS.items():
        if key in own and mapped.get(key) not in known:
            settings |= {name: own[key] for name in names if name in known}
    for key in NEEDS_A_SETTING & own.keys():
        if own[key] and not known.intersection(SETTINGS.get(key, ())):
            raise UsageError(
                f"cannot open {file.path}: it says {file.architecture}.{key} = {own[key]}, and transformers has no "
                f"setting for that in {type(default).__name__}"
            )
    if "num_key_value_heads" in known:
        settings.setdefault("num_key_value_heads", settings.get("num_attention_heads"))
    if "head_dim" in known and mapped.get("attention.key_length") in (None, "head_dim"):
        width = settings["hidden_size"] // settings["num_attention_heads"]
        settings["head_dim"] = own.get("attention.key_length", width)
    if "token_embd.weight" in file.tensors:
        settings["vocab_size"] = int(file.tensors["token_embd.weight"][1].shape[1])
    settings["tie_word_embeddings"] = "output.weight" not in file.tensors
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        settings[f"{name}_token_id"] = file.fields.get(f"tokenizer.ggml.{key}_token_id")
    for name, tensor in (("attention_bias", "blk.0.attn_q.bias"), ("mlp_bias", "blk.0.ffn_up.bias")):
        if tensor in file.tensors and name in known:
            settings[name] = True
    if family in ("gemma2", "gemma3_text"):
        is_27b = own["block_count"] == LAYERS_OF_27B[file.architecture]
        of_27b = settings["hidden_size"] / settings["num_attention_heads"]
        settings["query_pre_attn_scalar"] = of_27b if is_27b else settings["head_dim"]
    if (pattern := own.get("attention.sliding_window_pattern")) and "layer_types" in known:
        if isinstance(pattern, int):
            pattern = [bool((layer + 1) % pattern) for layer in range(own["block_count"])]
        settings["layer_types"] = ["sliding_attention" if local else "full_attention" for local in pattern]
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(family)
    settings.setdefault("architectures", [architecture] if isinstance(architecture, str) else None)
    return settings | _rotary(file, own, settings, default)


def _rotary(file: GgufFile, own: dict[str, Any], settings: dict[str, Any], default: Any) -> dict[str, Any]:
    """Return the settings of rotary positions."""
    if getattr(default, "rope_parameters", None) is None:
        return {}
    rotary: dict[str, Any] = {}
    for key, name in (("rope.freq_base", "rope_theta"), ("rope.freq_base_swa", "rope_local_base_freq")):
        if key in own:
            rotary[name] = own[key]
    head = settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]
    turned = own.get("rope.dimension_count", head)
    if "partial_rotary_factor" in default.rope_parameters:
        rotary["partial_rotary_factor"] = turned / head
    elif turned != head:
        raise UsageError(
            f"cannot open {file.path}: positions turn {turned} of {head} dimensions of its heads, and all of them in "
            f"transformers' {type(default).__name__}"
        )
    kind = own.get("rope.scaling.type", "none")
    factor: Any = own.get("rope.scaling.factor", own.get("rope.scale_linear"))
    context = own.get("rope.scaling.original_context_length", own.get("context_length"))
    of_attention = own.get("rope.scaling.attn_factor", 1.0)
    divisors = [file.decoded(name).tolist() for name in ROPE_TENSORS if name in file.tensors]
    if divisors:  # Llama 3's are the same for all lengths; Phi-3's are short, long
        scaling = {"rope_type": "longrope", "short_factor": divisors[0], "long_factor": divisors[-1]}
        scaling |= {"factor": 1.0, "attention_factor": of_attention}
    elif kind == "yarn":
        of_attention *= 1 + 0.1 * math.log(factor)
        scaling = {"rope_type": "yarn", "factor": factor, "attention_factor": of_attention}
        betas = {name: own.get(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        scaling |= {name: value for name, value in betas.items() if value is not None}
    elif kind == "linear" or (kind == "none" and factor):
        return rotary | {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    elif kind == "none":
        return rotary
    else:
        raise UsageError(
            f"cannot open {file.path}: its rotary positions are scaled by {kind!r}, which is not known"
        )
    original = {"original_max_position_embeddings": context}
    if hasattr(default, "original_max_position_embeddings"):  # Phi-3's own setting counts more
        rotary |= original
    return rotary | {"rope_scaling": scaling | original}


@dataclass(frozen=True)
class GgufTensors:
    """A model without its weights, and the tensors of a GGUF file that are put into it.

    Attributes:
        names: the file's name of each tensor → the model's.
        parts: the model's name of each tensor → the file's that it is decoded from.
        processor: undoes what llama.cpp does to the layout of tensors.
    """

    model: PreTrainedModel
    file: GgufFile
    names: dict[str, str]
    parts: dict[str, list[str]]
    processor: Any

    @classmethod
    def of(cls, path: Path, model: PreTrainedModel) -> GgufTensors:
        """Find the tensors of a skeleton; `UsageError` of an unknown architecture, `WorkError` where one is missing."""
        file = GgufFile.read(path)
        processor = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)(config=_settings(file))
        try:
            # It would make the table of names anew for every module of the model, which takes seconds.
            with patch.object(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)):
                names = get_gguf_hf_weights_map(model, processor)
        except NotImplementedError as error:
            raise UsageError(f"cannot open {path}: {first_line(error)}") from error
        parts: dict[str, list[str]] = {}
        for tensor in [name for name in file.tensors if name not in ROPE_TENSORS]:
            # Of experts, which lie in one tensor here and in one there, the map has the name without its ending.
            name = names.get(tensor) or names.get(tensor.removesuffix(".weight"))
            if name is None:
                raise WorkError(f"tensor {tensor} of {path} has no place in {type(model).__name__}")
            parts.setdefault(name, []).append(tensor)
        own = {name: tensor for tensor, name in names.items()}
        without = model.state_dict().keys() - parts.keys() - model.all_tied_weights_keys.keys()
        lacking = {own.get(name, name) for name in without}
        # Where several make one, a processor would leave zeros for what is not there.
        lacking |= {name for name in names if name.endswith("_exps") and f"{name}.weight" not in file.tensors}
        if lacking:
            raise WorkError(f"{path} lacks {len(lacking)} of the model's tensors (first: {min(lacking)})")
        return cls(model, file, names, parts, processor)

    def load(self, wanted: Callable[[str], bool], what: str, device: torch.device | str = "cpu") -> None:
        """Load the tensors whose names in the model are wanted; `WorkError` where one is of another shape."""
        for name in filter(wanted, self.parts):
            module, _, own = name.rpartition(".")
            holder = self.model.get_submodule(module)
            stored: Any = holder._parameters if own in holder._parameters else holder._buffers
            skeleton = stored[own]
            tensor = self._decoded(name, skeleton.shape).to(device, skeleton.dtype)
            is_parameter = stored is holder._parameters
            stored[own] = nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor

    def _decoded(self, name: str, shape: torch.Size) -> Tensor:
        parsed: dict[str, Any] = {"tensors": {}}  # where processors put what several tensors make up
        for part in sorted(self.parts[name]):
            array = self.file.decoded(part)
            stored = tuple(array.shape)
            try:
                result = self.processor.process(
                    weights=array, name=part, tensor_key_mapping=self.names, parsed_parameters=parsed
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
            f"{path} splits a text in a way that is not known here ({split}): give open_model a tokenizer"
        )
    by_words = isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace)
    if by_words and vocabulary.get("add_prefix_space") is False:
        backend.pre_tokenizer.prepend_scheme = "never"
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **options)
