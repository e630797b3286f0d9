"""Weights and tokenizer from a folder or the hub: safetensors only, whole, finite, and no code of a checkpoint.

What is opened is verified in `open.py`; nothing here knows of heads.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from theodolite.errors import UsageError, WorkError
from theodolite.models.factored import is_factored, load_factored

# What the loaders of transformers raise on broken or unknown checkpoints.
LOADING_ERRORS = (
    OSError,
    ValueError,
    ImportError,
    RuntimeError,
    KeyError,
    AttributeError,
    TypeError,
    SafetensorError,
)


@contextmanager
def quiet() -> Iterator[None]:
    """Loading takes less time than its progress bars take lines."""
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()


def local_folder(source: str | Path) -> Path | None:
    """The folder that `source` is, or None where it is a name on the hub; refuses what holds no safetensors."""
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


def load(
    source: str | Path, config: Any, dtype: Any, device_map: Any, revision: str | None
) -> PreTrainedModel:
    """The model of a checkpoint's own architecture, all of whose tensors are there."""
    names = getattr(config, "architectures", None) or []
    architecture = getattr(transformers, names[0], None) if names else None
    if names and architecture is None:
        raise UsageError(
            f"cannot open {source}: transformers {transformers.__version__} has no architecture {names[0]} "
            "(theodolite runs no code that a checkpoint brings along)"
        )
    folder = Path(source).expanduser()
    if is_factored(folder):
        if device_map is not None:
            raise UsageError(f"{source} is factored, and goes to one device: leave out --device-map")
        factored = load_factored(architecture, config, folder)
        return factored if dtype == "auto" else factored.to(getattr(torch, str(dtype).removeprefix("torch.")))
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


def load_tokenizer(source: str | Path, revision: str | None) -> PreTrainedTokenizerBase | None:
    """The checkpoint's tokenizer, or None where it has none."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
    except LOADING_ERRORS:
        return None  # random tokens and weights need none; a text without one is refused where it is read
    # Without any files, transformers makes up a tokenizer of special tokens only.
    return tokenizer if set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens) else None


def refuse_bad_numbers(model: nn.Module) -> None:
    """Raise `WorkError` where a weight is NaN or infinite."""
    for name, parameter in model.named_parameters():
        if not parameter.is_meta and parameter.is_floating_point() and not torch.isfinite(parameter).all():
            kind = "NaN" if torch.isnan(parameter).any() else "infinite"
            raise WorkError(
                f"tensor {name} holds {kind} values: the checkpoint is broken, nothing to measure"
            )


def hash_checkpoint(folder: Path) -> str:
    """Of config and weights: both decide what the model computes. (The tokenizer shows in the corpus' hash.)"""
    digest = hashlib.sha256()
    for path in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        with path.open("rb") as file:
            for piece in iter(functools.partial(file.read, 1 << 20), b""):
                digest.update(piece)
    return digest.hexdigest()


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
