"""Open a checkpoint to read it in parts from its files; one that cannot be is opened whole, with the reason.

A block's tensors are in memory while it runs or is asked for; what lies outside the blocks always is.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from theodolite.errors import WorkError
from theodolite.models.calls import capture_calls
from theodolite.models.guard import known_state
from theodolite.models.open import open_model
from theodolite.models.opened import OpenModel
from theodolite.models.source import Source
from theodolite.models.stored import loading
from theodolite.models.stored.checkpoint_tensors import (
    CannotReadLazily,
    StreamedBlocks,
    checkpoint_tensors,
    filled_with_rows,
)
from theodolite.models.structure import Structure, first_output
from theodolite.models.structure_search import VERIFIED_LENGTH, find_structure, verify_attention
from theodolite.models.sweep import Sweep
from theodolite.system.choices import Attention, check_dtype
from theodolite.system.processor import say_if_slow


@known_state()
def open_streamed(
    path_or_id: str | Path | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    revision: str | None = None,
    attention: Attention | None = None,
    say: Callable[[str], None] = lambda line: None,
    show_progress: Callable[[int, int], None] = lambda done, total: None,
) -> OpenModel:
    """Open a checkpoint whose blocks are read from its files as they run, for `survey`, `spectra` and `prune_model`.

    The attention of the first and the last block that attend is verified on opening. That weights are finite is seen
    when a block is first read. A checkpoint that cannot be read so is opened whole.

    Args:
        path_or_id, dtype, device, revision, attention: as in `open_model`.
        say: told in a line why the model was opened whole, if it was, and of a dtype in which this processor is slow.
        show_progress: told (bytes done, bytes in all) while the files are hashed; it may raise to stop.

    Raises:
        UsageError, WorkError: as `open_model` does.
    """
    check_dtype(dtype)
    target = loading.usable_device(device)
    try:
        with loading.without_progress_bars():
            checkpoint = loading.Checkpoint.at(path_or_id, revision).of_one_commit()
            tensors = checkpoint_tensors(checkpoint.place, dtype, checkpoint.revision)
            if tensors.model.config.is_encoder_decoder:
                raise CannotReadLazily("encoder and decoder read each other")
            model = OpenModel.of(
                *_parts(tensors, Source.of_transformers(tensors.model, attention), target),
                tokenizer=loading.load_tokenizer(checkpoint.place, checkpoint.revision),
                **checkpoint.identity(show_progress),
            )
    except (CannotReadLazily, *loading.LOADING_ERRORS) as error:
        how: dict[str, Any] = {"device": device, "revision": revision, "attention": attention}
        model = open_model(path_or_id, dtype=dtype, say=say, **how)
        say(f"opened whole, since {loading.reason_of(error)}")
        return model
    say_if_slow(model.hf.dtype, target, say)
    return model


def _parts(tensors: Any, source: Source, device: torch.device) -> Any:
    """Return what `OpenModel.of` takes of a skeleton, verified; its blocks are read as they run from then on."""
    model = tensors.model
    with filled_with_rows(model, 0.0):
        structure = find_structure(source)
    blocks = StreamedBlocks(tensors, structure, device)
    blocks.load_rest()
    with filled_with_rows(model, 0.0, device):
        calls = capture_calls(model, structure, source.small_pass(1))
    for layer in (structure.attending[0], structure.attending[-1]):
        with blocks.present(layer), filled_with_rows(model, 2**-6, device):
            try:
                inputs = verify_attention(model, structure, source.small_pass(VERIFIED_LENGTH))
            except WorkError as error:
                raise CannotReadLazily(str(error)) from error
            blocks.unswept = _why_not_swept(source, structure)
    blocks.readings = [0] * len(blocks.names)
    blocks.read_as_they_run()
    return source, structure, calls, inputs, blocks


def _why_not_swept(source: Source, structure: Structure) -> str | None:
    """Say why passes through one block at a time differ from a whole pass; None where they agree."""
    run, sweep = source.small_pass(VERIFIED_LENGTH), Sweep(structure.blocks)
    with torch.no_grad():
        whole = first_output(run())
        try:
            for layer in range(len(structure.blocks)):
                with sweep.block(layer):
                    swept = first_output(run())
        except (WorkError, *loading.RUNNING_ERRORS) as error:
            return loading.reason_of(error)
    return None if torch.equal(swept, whole) else "its blocks need more than what the ones before them leave"
