"""A checkpoint opened to be run a block at a time: only the blocks that are running are in memory.

What lies outside the blocks (embeddings, the last norm, the head) is read for good. A block is read from its
safetensors files as it begins to run, or as somebody asks for it, and forgotten when it is done with: so a model takes
the memory of a block and of its activations, whatever its size. All of it is on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path

import torch

from theodolite.errors import UsageError
from theodolite.models.guard import known_state
from theodolite.models.open import open_model
from theodolite.models.opened import OpenModel
from theodolite.models.stored.checkpoint_tensors import CannotReadLazily, checkpoint_tensors
from theodolite.models.stored.lazy_weights import Reader, read_in_parts
from theodolite.models.stored.loading import (
    Checkpoint,
    load_tokenizer,
    refuse_nonfinite_weights,
    usable_device,
)
from theodolite.models.stored.streamed_blocks import StreamedBlocks
from theodolite.system import embedded
from theodolite.system.choices import check_dtype
from theodolite.system.processor import say_if_slow


@known_state()
def open_streamed(
    path_or_id: str | Path | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    revision: str | None = None,
    say: Callable[[str], None] = lambda line: None,
    show_progress: Callable[[int, int], None] = lambda done, total: None,
) -> OpenModel:
    """Open a checkpoint whose blocks are read from its files as they run, for `prune_model`.

    Every block is read once on opening: its weights are finite, and the attention of the first and the last that
    attend is verified as `open_weights` does. A checkpoint that cannot be read so is opened whole.

    Args:
        path_or_id, dtype, device, revision: as in `open_model`.
        say: told in a line why the model was opened whole, if it was, and of a dtype in which this processor is slow.
        show_progress: told (0, 1) before each block is read, then (bytes done, bytes in all) while the files are
            hashed; it may raise to stop.

    Raises:
        UsageError, WorkError: as `open_model` does.
    """
    check_dtype(dtype)
    target = usable_device(device)
    try:
        with read_in_parts():
            model = _open(path_or_id, dtype, target, revision, show_progress)
    except CannotReadLazily as reason:
        model = open_model(path_or_id, dtype=dtype, device=device, revision=revision, say=say)
        say(f"opened whole, since {reason}")
        return model
    say_if_slow(model.hf.dtype, target, say)
    return model


def _open(
    path_or_id: str | Path | None,
    dtype: str | torch.dtype,
    device: torch.device,
    revision: str | None,
    show_progress: Callable[[int, int], None],
) -> OpenModel:
    checkpoint = Checkpoint.at(path_or_id, revision).of_one_commit()
    tensors = checkpoint_tensors(checkpoint.place, dtype, checkpoint.revision)
    if tensors.model.config.is_encoder_decoder:
        raise CannotReadLazily("encoder and decoder read each other")
    reader = Reader.of(tensors, None)
    blocks = StreamedBlocks(tensors, reader.structure, device)
    blocks.load_rest()
    attending = reader.structure.attending
    for layer in range(len(blocks.names)):
        show_progress(0, 1)
        with blocks.present(layer):
            refuse_nonfinite_weights(reader.structure.blocks[layer], blocks.names[layer] + ".")
            if layer in (attending[0], attending[-1]):
                reader.verify(layer)
    blocks.read_as_they_run()
    return OpenModel.of(
        reader.source,
        reader.structure,
        {layer: call.with_hidden(call.hidden.to(device)) for layer, call in reader.calls.items()},
        reader.inputs,
        tokenizer=load_tokenizer(checkpoint.place, checkpoint.revision),
        **checkpoint.identity(show_progress),
        streamed=blocks,
        _load_layer=blocks.present,
    )


def instead_of_offloaded(model: OpenModel) -> OpenModel:
    """The checkpoint of a model with offloaded blocks, opened to be run a block at a time; any other model as it is.

    Raises:
        UsageError: its blocks cannot be read so, or its files have changed.
    """
    blocks = (block.parameters() for block in model.structure.blocks)
    offloaded = model.streamed is None and any(parameter.is_meta for parameter in chain(*blocks))
    if not offloaded or model.interventions or not model.weights().of_files:
        return model
    place = None if model.id == embedded.NAME else model.id
    try:
        with read_in_parts():
            streamed = _open(
                place, model.source.dtype, model.device, model.revision, lambda done, total: None
            )
    except CannotReadLazily as reason:
        raise UsageError(
            f"blocks of {model.id} are offloaded, and cannot be read as they run, since {reason}: open it on one device"
        ) from None
    if streamed.sha256 != model.sha256:
        raise UsageError(f"the files of {model.id} have changed since it was opened: open it anew")
    return streamed


def save_checkpoint(model: OpenModel, folder: Path) -> None:
    """Write the model as `transformers` opens it; of a streamed one, a block is in memory at a time."""
    if model.streamed is None:
        model.hf.save_pretrained(folder)
    else:
        model.streamed.save(folder)
