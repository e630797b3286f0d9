"""Open a checkpoint, check it, and know where its heads are. The way in to every measurement.

Weights come from safetensors only, and no code of a checkpoint is ever run.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from jaxtyping import Float64
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from theodolite.errors import TheodoliteError, UsageError, WorkError
from theodolite.models.outputs import read_output_weights, state_of
from theodolite.models.probe import Call, HeadWeights, capture_calls, probe_layer
from theodolite.models.structure import Structure, backbone, find_structure, first_tensor
from theodolite.models.tap import tapped
from theodolite.theory.attention import AttentionInputs, attend

EMBEDDED = Path(__file__).parent.parent / "assets" / "topics"
"""The model that the package carries."""

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")

VERIFIED_LENGTH = 16
"""Tokens of the sequence on which an opened model is verified."""

# What the loaders of transformers raise on broken or unknown checkpoints.
_LOADING_ERRORS = (
    OSError,
    ValueError,
    ImportError,
    RuntimeError,
    KeyError,
    AttributeError,
    TypeError,
    SafetensorError,
)


@dataclass(frozen=True)
class OpenModel:
    """A checkpoint that has been opened and verified.

    Attributes:
        hf: the model as `transformers` has it, in evaluation mode; its attention implementation is its own
            except while a survey, a probe or an intervention is under way.
        tokenizer: its tokenizer, or None where the checkpoint has none.
        layers: number of blocks L.
        heads: query heads a layer H.
        head_width: width of a query d_h.
        width: width of the residual stream d.
        causal: whether a query is kept from later keys.
        id: the path or hub name it was opened by; `revision` its hub commit, if any; `sha256` the hash of its
            config and weights on disk, if they were local.
    """

    hf: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    structure: Structure
    width: int
    causal: bool
    positions: str
    id: str
    revision: str | None
    sha256: str | None
    _calls: list[Call] = field(repr=False)
    _output_weights: dict[int, tuple[Any, Tensor]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def layers(self) -> int:
        """Number of blocks L."""
        return len(self.structure.attention)

    @property
    def heads(self) -> int:
        """Query heads a layer H."""
        return self.structure.heads

    @property
    def head_width(self) -> int:
        """Width of a query d_h."""
        return self.structure.head_width

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        return self.hf.device

    @property
    def vocabulary(self) -> int | None:
        """Rows of the token embedding, or None for a model that reads no tokens."""
        if self.hf.main_input_name != "input_ids":
            return None
        return int(self.hf.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]

    @functools.cached_property
    def longest(self) -> int | None:
        """Tokens that the model has positions for, or None where it sets no limit (ALiBi)."""
        for name, module in self.hf.named_modules():
            if isinstance(module, nn.Embedding) and "position" in name and module.padding_idx is not None:
                return module.num_embeddings - module.padding_idx - 1  # RoBERTa counts from its padding index
        limit = getattr(self.hf.config, "max_position_embeddings", None)
        return int(limit) if isinstance(limit, int) and limit > 0 else None

    def head_weights(self, layer: int) -> HeadWeights:
        """The weights of one layer's heads: `w_q, w_k, w_v, b_q, b_k, b_v, scaling`, leading with heads.

        Raises:
            UsageError: there is no such layer.
            WorkError: the layer's queries and keys are no affine function of its input.
        """
        self._check_layer(layer)
        return probe_layer(self.hf, self.structure, layer, self._calls[layer])

    def output_weights(self, layer: int) -> Float64[Tensor, "heads value_width width"]:
        """W_O of one layer's heads: its attention adds Σ_h o_h W_O[h] to the stream (before a norm of the sum).

        The last one asked for is kept until the block's parameters change (writes to `.data` are not seen).

        Raises:
            UsageError: there is no such layer.
            WorkError: what leaves the attention is no fixed affine function of its heads' outputs.
        """
        self._check_layer(layer)
        state = state_of(self.structure.blocks[layer])
        known = self._output_weights.get(layer)
        if known is None or known[0] != state:
            self._output_weights.clear()
            sample = small_input(self.hf, 1)
            read = read_output_weights(self.hf, self.structure, layer, self._calls[layer], sample)
            known = self._output_weights[layer] = (state, read)
        return known[1]

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.layers:
            raise UsageError(f"layer {layer} does not exist: this model has layers 0 to {self.layers - 1}")


def open_model(
    path_or_id: str | Path | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    device_map: str | dict[str, Any] | None = None,
    revision: str | None = None,
) -> OpenModel:
    """Open and verify a checkpoint from a folder or the hub; the embedded model where no path is given.

    Args:
        path_or_id: a folder with `config.json` and safetensors weights, or a name on the hub.
        dtype: "auto" keeps the checkpoint's own; else "float32", "bfloat16" and so on.
        device: where the model goes; a CUDA device if there is one, else the CPU.
        device_map: spread the model over devices instead (needs `pip install theodolite[accelerate]`).
        revision: a branch, tag or commit on the hub.

    Raises:
        UsageError: no such checkpoint, pickled weights, an unknown or unsupported family.
        WorkError: weights missing, NaN or infinite, or the tapped attention is not the model's own.
    """
    if str(dtype).removeprefix("torch.") not in DTYPES:
        raise UsageError(f"unknown dtype {dtype}: use one of {', '.join(DTYPES)}")
    target = _device(device)
    source = EMBEDDED if path_or_id is None else path_or_id
    local = _local_folder(source)
    try:
        with _quiet():
            config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
            model = _load(source, config, dtype, device_map, revision)
    except TheodoliteError:
        raise
    except _LOADING_ERRORS as error:
        where = "" if local else " (and there is no folder of that name)"
        raise UsageError(f"cannot open {source}: {_first_line(error)}{where}") from error
    if device_map is None:
        model = model.to(target)  # type: ignore[arg-type]
    model = model.eval().requires_grad_(False)
    _refuse_bad_numbers(model)
    structure = find_structure(model, small_input(model, 1))
    calls = capture_calls(model, structure, small_input(model, 1))
    causal, bias = _verify(model, structure)
    return OpenModel(
        hf=model,
        tokenizer=_tokenizer(source, revision),
        structure=structure,
        width=first_tensor(*calls[0]).shape[-1],
        causal=causal,
        positions=_positions(model, calls[0], bias),
        id="theodolite/topics" if path_or_id is None else str(path_or_id),
        revision=getattr(model.config, "_commit_hash", None),
        sha256=_hash_checkpoint(local) if local else None,
        _calls=calls,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Loading takes less time than its progress bars take lines."""
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()


def _device(device: str | torch.device | None) -> torch.device:
    try:
        found = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=found, dtype=torch.float64)  # statistics are summed in it; Apple's MPS lacks it
    except (RuntimeError, AssertionError, TypeError) as error:
        raise UsageError(f"cannot use device {device}: {_first_line(error)}") from error
    return found


def _local_folder(source: str | Path) -> Path | None:
    folder = Path(source).expanduser()
    if not folder.exists():
        if isinstance(source, Path) or str(source).startswith((".", "/", "~")) or str(source).count("/") > 1:
            raise UsageError(f"no checkpoint at {source}: give a folder with config.json, or a hub name")
        return None
    if not folder.is_dir() or not (folder / "config.json").is_file():
        raise UsageError(f"{source} is no checkpoint: theodolite needs a folder with config.json in it")
    if not any(folder.glob("*.safetensors")):
        pickled = sorted(p.name for p in folder.iterdir() if p.suffix in {".bin", ".pt", ".pth", ".ckpt"})
        if pickled:
            raise UsageError(
                f"{source} holds pickled weights ({pickled[0]}), which can run code when read; convert them "
                "where you trust them: AutoModel.from_pretrained(PATH).save_pretrained(NEW_PATH)"
            )
        raise UsageError(f"{source} holds no weights: theodolite needs .safetensors files beside config.json")
    return folder


def _load(
    source: str | Path, config: Any, dtype: Any, device_map: Any, revision: str | None
) -> PreTrainedModel:
    names = getattr(config, "architectures", None) or []
    architecture = getattr(transformers, names[0], None) if names else None
    if names and architecture is None:
        raise UsageError(
            f"cannot open {source}: transformers {transformers.__version__} has no architecture {names[0]} "
            "(theodolite runs no code that a checkpoint brings along)"
        )
    model, info = (architecture or AutoModel).from_pretrained(
        source,
        config=config,
        dtype=dtype,
        device_map=device_map,
        revision=revision,
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    _refuse_more_layers(source, model, sorted(info["unexpected_keys"]))
    missing = sorted(info["missing_keys"])
    if missing:
        raise WorkError(
            f"{source} lacks {len(missing)} of the model's tensors (first: {missing[0]}): the weights belong "
            "to another architecture or are incomplete"
        )
    return model


def _refuse_more_layers(source: str | Path, model: nn.Module, unexpected: list[str]) -> None:
    """Other tensors (old buffers, another head) may be left over, but not those of layers like the model's own."""

    def kind(name: str) -> str:
        return re.sub(r"\.\d+\.", ".#.", name)

    known = {kind(name) for name, _ in model.named_parameters()}
    extra = [name for name in unexpected if kind(name) in known]
    if extra:
        raise WorkError(
            f"{source} has {len(extra)} tensors of layers that its config.json does not have (first: {extra[0]}): "
            "config and weights do not belong together"
        )


def _tokenizer(source: str | Path, revision: str | None) -> PreTrainedTokenizerBase | None:
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
    except _LOADING_ERRORS:
        return None  # random tokens and weights need none; a text without one is refused where it is read
    # Without any files, transformers makes up a tokenizer of special tokens only.
    return tokenizer if set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens) else None


def _refuse_bad_numbers(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.is_meta and parameter.is_floating_point() and not torch.isfinite(parameter).all():
            kind = "NaN" if torch.isnan(parameter).any() else "infinite"
            raise WorkError(
                f"tensor {name} holds {kind} values: the checkpoint is broken, nothing to measure"
            )


def small_input(model: PreTrainedModel, length: int) -> dict[str, Any]:
    """A small valid input: the first `length` token ids, or an image of noise."""
    generator = torch.Generator().manual_seed(0)
    if model.main_input_name == "pixel_values":
        size, channels = model.config.image_size, model.config.num_channels
        height, width = (size, size) if isinstance(size, int) else size
        return {
            "pixel_values": torch.randn(1, channels, height, width, generator=generator).to(
                model.device, model.dtype
            )
        }
    if model.main_input_name != "input_ids":
        raise UsageError(
            f"{type(model).__name__} reads {model.main_input_name}, which theodolite cannot make"
        )
    vocabulary = int(model.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]
    ids = torch.randint(vocabulary, (1, length), generator=generator)
    return {"input_ids": ids.to(model.device), "use_cache": False}


def _verify(model: PreTrainedModel, structure: Structure) -> tuple[bool, str]:
    """Compare each attention module's output with the model's own; tell whether it is causal, and its bias."""
    seen: list[AttentionInputs] = []

    def listener(_: nn.Module, inputs: AttentionInputs) -> Tensor:
        seen.append(inputs)
        return attend(inputs)

    sample = small_input(model, VERIFIED_LENGTH)
    own = _attention_outputs(model, structure, sample)
    with tapped(model, listener):
        ours = _attention_outputs(model, structure, sample)
    for layer, (expected, got) in enumerate(zip(own, ours, strict=True)):
        scale = expected.abs().max().clamp_min(1e-30)
        error = float((got - expected).abs().max() / scale)
        # The error of earlier layers travels on: allow for it, and for the dtype's own rounding. Some families
        # (BLOOM, Gemma 2) take their softmax in float32 whatever their dtype.
        eps = max(torch.finfo(expected.dtype).eps, torch.finfo(torch.float32).eps)
        if not error <= 100 * eps * (1 + layer / 4):
            raise WorkError(
                f"layer {layer} ({structure.names[layer]}): the attention output recomputed from its queries, "
                f"keys and values differs from the model's own by {error:.1e}; this family is not supported"
            )
    causal = all(s.causal if s.mask is None else not bool(s.mask.triu(1).any()) for s in seen)
    # ALiBi is one number a key (its differences are the slopes); other biases differ from query to query.
    bias = seen[0].bias
    return causal, "none" if bias is None else "alibi" if bias.shape[2] == 1 else "relative bias"


def _attention_outputs(model: PreTrainedModel, structure: Structure, sample: dict[str, Any]) -> list[Tensor]:
    outputs: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        outputs.append((output[0] if isinstance(output, tuple) else output).detach().clone())

    hooks = [module.register_forward_hook(keep) for module in structure.attention]
    try:
        with torch.inference_mode():
            backbone(model)(**sample)
    finally:
        for hook in hooks:
            hook.remove()
    return outputs


def _positions(model: nn.Module, call: Call, bias: str) -> str:
    if call[1].get("position_embeddings") is not None:
        return "rotary"
    if bias != "none":
        return bias
    learned = any(
        "pos" in name.rsplit(".", 1)[-1] or name.endswith("wpe") for name, _ in model.named_modules()
    )
    return (
        "learned" if learned or any("position_embed" in n for n, _ in model.named_parameters()) else "other"
    )


def _hash_checkpoint(folder: Path) -> str:
    """Of config and weights: both decide what the model computes. (The tokenizer shows in the corpus' hash.)"""
    digest = hashlib.sha256()
    for path in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        with path.open("rb") as file:
            for piece in iter(functools.partial(file.read, 1 << 20), b""):
                digest.update(piece)
    return digest.hexdigest()


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
