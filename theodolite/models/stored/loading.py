"""Weights and tokenizer from a folder, a GGUF file or the hub: no pickle and no code of a checkpoint is run."""

from __future__ import annotations

import copy
import functools
import hashlib
import math
import os
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, cached_file, is_peft_available
from transformers.utils.hub import extract_commit_hash

from theodolite.errors import UsageError, WorkError, first_line
from theodolite.models.guard import MAKING
from theodolite.models.stored.dequantised import FLOATS, SCALE, WHAT_TO_DO, has_own_class
from theodolite.models.stored.factored import is_factored, load_factored
from theodolite.models.training.adapters import with_adapter_merged
from theodolite.system import checkpoint_folders, embedded
from theodolite.system.checkpoint_folders import is_gguf, weight_files
from theodolite.system.wording import with_extra

RUNNING_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
"""What models raise on inputs that they do not take."""

LOADING_ERRORS = (
    *RUNNING_ERRORS,
    OSError,
    ImportError,
    ArithmeticError,
    SafetensorError,
    StrictDataclassError,
)
"""What the loaders of transformers raise on broken or unknown checkpoints."""

Tower = Literal["text", "vision"]
"""Of a checkpoint with two encoders beside each other, of text and of images (CLIP, SigLIP)."""


def hide_progress_bars() -> None:
    """Hide the progress bars of `transformers` for the rest of the process: a command has its own."""
    transformers.utils.logging.disable_progress_bar()


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Hide the progress bars of `transformers` while open."""
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's place: its folder, its GGUF file (the first of several) or its name on the hub.

    `local` is None for one on the hub; `revision` is its commit there, or what was asked for until that is known.
    """

    place: str | Path
    local: Path | None
    id: str
    revision: str | None

    @classmethod
    def at(cls, path_or_id: str | Path | None, revision: str | None) -> Checkpoint:
        """Find the checkpoint of a path, a name or the address of a page; None: the embedded model."""
        if page := checkpoint_folders.of_page(str(path_or_id)):
            path_or_id, revision = page[0], revision or page[1]
        place = embedded.FOLDER if path_or_id is None else path_or_id
        # The libraries that load models do not replace ~ by the home folder.
        place = place.expanduser() if isinstance(place, Path) else os.path.expanduser(place)
        local = checkpoint_folders.local_checkpoint(place)
        return cls(local or place, local, embedded.NAME if path_or_id is None else str(place), revision)

    def of_one_commit(self) -> Checkpoint:
        """Fix the revision to the commit that it is now, so that all that is read of a hub model is of one.

        `UsageError` where the hub, or what was kept of it, does not have the model.
        """
        if self.local:
            return self
        try:
            config = cached_file(str(self.place), CONFIG_NAME, revision=self.revision)
        except OSError as error:
            raise UsageError(
                f"there is no folder {self.place}, and it cannot be opened from the hub: {reason_of(error)} (with "
                "HF_HUB_OFFLINE=1 no network is waited for)"
            ) from error
        commit = extract_commit_hash(config, None)
        options: dict[str, Any] = {"_raise_exceptions_for_connection_errors": False}
        if index := file_of(self.place, SAFE_WEIGHTS_INDEX_NAME, commit, **options):
            checkpoint_folders.refuse_index(Path(index).parent)
        return replace(self, revision=commit)

    def identity(
        self, show_progress: Callable[[int, int], None] = lambda done, total: None
    ) -> dict[str, Any]:
        """Return its id, its commit or the hash of its files, and how a GGUF file stores its weights."""
        if self.local is None:
            return {"id": self.id, "revision": self.revision, "sha256": None}
        stored = gguf_module().GgufFile.read(self.local).quantisation() if is_gguf(self.local) else {}
        digest = hash_checkpoint(self.local, show_progress)
        return {"id": self.id, "revision": None, "sha256": digest, "stored": stored}


def gguf_module() -> Any:
    """Import what reads GGUF files; `UsageError` where the extra is not installed."""
    try:
        from theodolite.models.stored import gguf
    except ImportError as error:
        raise UsageError(f"cannot read GGUF files ({first_line(error)}): {with_extra('gguf')}") from error
    return gguf


def file_of(source: str | Path, name: str, revision: str | None, **options: Any) -> str | None:
    """Find a file of a checkpoint on this machine, fetched if need be; None where it has none of that name."""
    return cached_file(
        source, name, revision=revision, _raise_exceptions_for_missing_entries=False, **options
    )


def architecture_of(source: str | Path, config: Any) -> Any:
    """Return the model class that a config names, or None; `UsageError` for an unknown one."""
    names = getattr(config, "architectures", None) or []
    architecture = getattr(transformers, str(names[0]), None) if names else None
    if names and not (isinstance(architecture, type) and issubclass(architecture, PreTrainedModel)):
        raise UsageError(
            f"cannot open {source}: transformers {transformers.__version__} has no architecture {names[0]} "
            "(theodolite runs no code that a checkpoint brings along)"
        )
    return architecture


def config_of(source: str | Path, revision: str | None) -> Any:
    """Read the config of a checkpoint, without the name of an attention kernel, which may be a download."""
    if is_gguf(source):
        return gguf_module().gguf_config(Path(source))
    config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    config._attn_implementation = None
    return config


def tower_of(config: Any, tower: Tower | None, say: Callable[[str], None]) -> Any:
    """Return the config of one tower of a checkpoint that has two, and `say` so; any other config as it is."""
    if tower is not None and tower not in ("text", "vision"):
        raise UsageError(f"tower is {tower!r}: give 'text' or 'vision'")
    name = str((getattr(config, "architectures", None) or [""])[0])
    family, chosen = name.removesuffix("Model"), tower or "text"
    of_tower = f"{family}{chosen.capitalize()}Model"
    whole = getattr(transformers, name, None)
    both = all(hasattr(whole, method) for method in ("get_text_features", "get_image_features"))
    if not (both and hasattr(transformers, of_tower)):
        return config
    part = getattr(config, f"{chosen}_config")
    part.architectures = [of_tower]
    part._attn_implementation = None
    say(f"{name} has two towers: this is the one of {'text' if chosen == 'text' else 'images'} ({of_tower})")
    return part


def on_meta(
    source: str | Path, architecture: Any, config: Any, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """Make the model of a config without its numbers; `UsageError` where these are more than the files have bits."""
    with MAKING, without_progress_bars(), torch.device("meta"):
        make = AutoModel.from_config if architecture is None else architecture._from_config
        model: PreTrainedModel = make(copy.deepcopy(config), dtype=dtype)
    folder = Path(source)
    if folder.exists():
        held = sum(path.stat().st_size for path in weight_files(folder))
        wanted = sum(parameter.numel() for parameter in model.parameters())
        if wanted > 8 * held:
            raise UsageError(
                f"cannot open {source}: its configuration asks for {wanted:,} weights, its files have {held:,} bytes"
            )
    return model


def build_skeleton(model: PreTrainedModel) -> PreTrainedModel:
    """Make a model on the meta device as `from_pretrained` has it before it loads a tensor; it is changed."""
    model.config._experts_implementation = "eager"  # the others take no matrices with rows repeated
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # so that buffers only are computed
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device="cpu")
    with MAKING:
        model.initialize_weights()
    return model.eval().requires_grad_(False)


def load(
    source: str | Path, config: Any, dtype: Any, device_map: Any, revision: str | None
) -> PreTrainedModel:
    """Load the model of a checkpoint's own architecture, complete and with nothing left over."""
    architecture = architecture_of(source, config)
    folder = Path(source)
    kind = "a GGUF file" if is_gguf(source) else "factored" if is_factored(folder) else None
    if kind is not None and device_map is not None:
        raise UsageError(f"{source} is {kind}, and goes to one device: leave out --device-map")
    if is_gguf(source):
        tensors = gguf_tensors(folder, architecture, config, dtype)
        tensors.load(lambda name: True, "the model")
        tensors.model.tie_weights()
        return tensors.model
    adapter = checkpoint_folders.adapter_in(folder)
    # Where an adapter is beside the weights, `transformers` loads both, if it finds PEFT.
    if (adapter or file_of(source, "adapter_config.json", revision)) and not is_peft_available():
        raise UsageError(
            f"{source} has an adapter beside its weights, which PEFT reads: pip install peft, or merge it"
        )
    on_meta(source, architecture, config)  # refuses what is larger than its files, before it is read
    model: Any
    if is_factored(folder):
        model, lacking = load_factored(architecture, config, folder)
        if dtype != "auto":
            model = model.to(dtype_named(dtype, model.dtype))
    else:
        # What is offloaded in another form than the checkpoint's (most experts) goes to a folder.
        offload = None if device_map is None else TemporaryDirectory(prefix="theodolite-offload-")
        with MAKING:
            model, info = (architecture or AutoModel).from_pretrained(
                source,
                config=config,
                dtype=dtype,
                device_map=device_map,
                offload_folder=offload and offload.name,
                revision=revision,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        if offload is not None:
            weakref.finalize(model, offload.cleanup)
        refuse_left_over(source, model, sorted(info["unexpected_keys"]))
        lacking = info["missing_keys"]
    if lacking:
        raise WorkError(
            f"{source} lacks {len(lacking)} of the model's tensors (first: {min(lacking)}): the weights belong "
            "to another architecture or are incomplete"
        )
    return model if adapter is None else with_adapter_merged(model, adapter)


def gguf_tensors(path: Path, architecture: Any, config: Any, dtype: Any) -> Any:
    """Make the skeleton of a GGUF model, with the places of its tensors; of dtype "auto" they become float32."""
    skeleton = build_skeleton(on_meta(path, architecture, config, dtype_named(dtype, torch.float32)))
    return gguf_module().GgufTensors(path, skeleton)


def dtype_named(dtype: str | torch.dtype, auto: torch.dtype) -> torch.dtype:
    """Return the dtype of a name, with or without `torch.` before it; of "auto" the other one."""
    return auto if dtype == "auto" else getattr(torch, str(dtype).removeprefix("torch."))


def refuse_left_over(source: str | Path, model: nn.Module, unexpected: list[str]) -> None:
    """Raise `WorkError` for tensors of more layers, or scales whose quantiser is not named; old buffers may be left."""

    def kind_of_name(name: str) -> str:
        return re.sub(r"\.\d+(?=\.)", ".#", name)

    known = {kind_of_name(name) for name, _ in model.named_parameters()}
    quantised = getattr(model.config, "quantization_config", None)
    for name in unexpected:
        weight = SCALE.sub("", name)
        is_scale = weight != name and {kind_of_name(weight), kind_of_name(f"{weight}.weight")} & known
        if is_scale and not quantised:
            raise WorkError(
                f"{source}: tensor {name} scales {weight}, and config.json has no quantization_config: {WHAT_TO_DO}"
            )
    extra = [name for name in unexpected if kind_of_name(name) in known]
    if extra:
        raise WorkError(
            f"{source} has {len(extra)} tensors of layers that its config.json does not have (first: {extra[0]}): "
            "config and weights do not belong together"
        )


HANDED_ON: dict[tuple[str | Path, str | None], PreTrainedTokenizerBase | None] = {}
"""The tokenizer that was read before weights, for who opens the same checkpoint next."""


def load_tokenizer(source: str | Path, revision: str | None) -> PreTrainedTokenizerBase | None:
    """Load the checkpoint's tokenizer: of a GGUF file its own, else the one beside it; None where there is none."""
    if handed_on := HANDED_ON.pop((source, revision), None):
        return handed_on
    refused = None
    for place in (source, Path(source).parent) if is_gguf(source) else (source,):
        try:
            if is_gguf(place):
                tokenizer = gguf_module().gguf_tokenizer(Path(place))
            else:
                tokenizer = AutoTokenizer.from_pretrained(place, revision=revision, trust_remote_code=False)
        except UsageError as error:
            refused = error
        except BaseException as error:
            # A panic of Rust is no `Exception`.
            if not isinstance(error, LOADING_ERRORS) and type(error).__name__ != "PanicException":
                raise
        else:
            # Without any files, transformers makes up a tokenizer of special tokens only.
            if set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
                return tokenizer
    if refused is not None:
        raise refused
    return None


def refuse_nonfinite_weights(model: nn.Module, prefix: str = "") -> None:
    """Raise `WorkError` where a weight is NaN or infinite; `prefix` leads to the module, where it is a part."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta or parameter.dtype not in FLOATS.values() or has_own_class(parameter):
            continue
        if parameter.numel() and not all(map(math.isfinite, ends := parameter.detach().aminmax())):
            kind = "NaN" if math.isnan(ends.min) else "infinite"
            why = ": the checkpoint is broken, nothing to measure"
            if kind == "infinite" and parameter.dtype == torch.float16:
                why = " in float16: try --dtype float32"
            raise WorkError(f"tensor {prefix}{name} holds {kind} values{why}")


def hash_checkpoint(
    folder: Path, show_progress: Callable[[int, int], None] = lambda done, total: None
) -> str:
    """Hash config and weights, of GGUF files all bytes."""
    digest, done = hashlib.sha256(), 0
    paths = weight_files(folder) if is_gguf(folder) else [folder / "config.json", *weight_files(folder)]
    if adapter := checkpoint_folders.adapter_in(folder):
        paths += [adapter / name for name in checkpoint_folders.ADAPTER_FILES]
    total = sum(path.stat().st_size for path in paths)
    for path in paths:
        with path.open("rb") as file:
            for piece in iter(functools.partial(file.read, 1 << 20), b""):
                show_progress(done, total)
                digest.update(piece)
                done += len(piece)
    show_progress(total, total)
    return digest.hexdigest()


def reason_of(error: BaseException) -> str:
    """Say in a line why a checkpoint or a pass failed; the kind of error where it has no message."""
    if isinstance(error, StrictDataclassError):
        return " ".join(str(error).split())  # the field, and what is wrong with it
    if "ignore_mismatched_sizes" in str(error):  # whose advice is for callers of transformers
        return "the shapes of its tensors are not those that its config.json asks for"
    if isinstance(error, SafetensorError):
        return f"{first_line(error)}: a file is cut short or damaged, download it again"
    return first_line(error) or type(error).__name__


def usable_device(device: str | torch.device | None) -> torch.device:
    """Return the device (None: a CUDA device if there is one, else the CPU); `UsageError` where it cannot be used."""
    try:
        usable = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if usable.type == "mps":
            raise UsageError("cannot use device mps: sums are taken in float64, which it lacks; use the CPU")
        torch.empty(0, device=usable, dtype=torch.float64)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise UsageError(f"cannot use device {device}: {reason_of(error)}") from error
    if usable.type == "meta":
        raise UsageError("cannot use device meta, which holds no numbers: use --device cpu")
    return usable
