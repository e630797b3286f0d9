"""Open a checkpoint to read it in parts from its files; one that cannot be is opened whole, with the reason.

The skeleton (`checkpoint_tensors.py`) has what lies outside the blocks for good, and a block's tensors while that runs
or is asked for: the memory of a block and of its activations, on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from theodolite.errors import WorkError
from theodolite.models.calls import capture_calls, capture_current_calls, run_until_tap, stop_at_tap
from theodolite.models.doors.answers import without_interventions
from theodolite.models.doors.taps import tapped
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
from theodolite.models.structure import first_output
from theodolite.models.structure_search import (
    VERIFIED_LENGTH,
    check_recomputed,
    find_structure,
    largest_logit,
    recorded_inputs,
)
from theodolite.models.sweep import Sweep
from theodolite.system.choices import Attention, check_dtype
from theodolite.system.processor import say_if_slow

OTHER_WEIGHTS = 2**-6
"""Size of other weights in the modules that are not read, to see whether queries and keys depend on them."""


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

    The attention of the first and the last block that attend is verified on opening: its output on random hidden
    states, recomputed from its queries, keys and values, is its own. That its weights are finite is seen when a block
    is first read. A checkpoint that cannot be read so is opened whole.

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
        with _read_in_parts():
            checkpoint = loading.Checkpoint.at(path_or_id, revision).of_one_commit()
            tensors = checkpoint_tensors(checkpoint.place, dtype, checkpoint.revision)
            if tensors.model.config.is_encoder_decoder:
                raise CannotReadLazily("encoder and decoder read each other")
            reader = Reader(tensors, attention)
            blocks = StreamedBlocks(tensors, reader.structure, target)
            blocks.unswept = reader.why_not_swept()
            blocks.load_rest()
            for layer in (reader.structure.attending[0], reader.structure.attending[-1]):
                with blocks.present(layer):
                    reader.verify(layer)
            blocks.readings = [0] * len(blocks.names)
            blocks.read_as_they_run()
            for layer, call in reader.calls.items():
                reader.calls[layer] = call.with_hidden(call.hidden.to(target))
            model = OpenModel.of(
                reader.source,
                reader.structure,
                reader.calls,
                reader.inputs,
                tokenizer=loading.load_tokenizer(checkpoint.place, checkpoint.revision),
                **checkpoint.identity(show_progress),
                streamed=blocks,
            )
    except CannotReadLazily as reason:
        how: dict[str, Any] = {"device": device, "revision": revision, "attention": attention}
        model = open_model(path_or_id, dtype=dtype, say=say, **how)
        say(f"opened whole, since {reason}")
        return model
    say_if_slow(model.hf.dtype, target, say)
    return model


@contextmanager
def _read_in_parts() -> Iterator[None]:
    """Convert loading errors to `CannotReadLazily` while open, without progress bars."""
    try:
        with loading.without_progress_bars():
            yield
    except ImportError as error:
        raise CannotReadLazily(
            f"this version of transformers is not known ({loading.reason_of(error)})"
        ) from error
    except loading.LOADING_ERRORS as error:
        raise CannotReadLazily(loading.reason_of(error)) from error


class Reader:
    """Finds and verifies the attention modules of a skeleton.

    Attributes:
        calls: how each attention module is called, with one token at position 0.
        own_calls: the same with `VERIFIED_LENGTH` tokens; `tapped_calls` as the tap makes the model call it;
            `other_calls` with other weights in all of the model, for which `inputs` arrived at the tap.
    """

    def __init__(self, tensors: loading.StoredTensors, attention: Attention | None) -> None:
        model = tensors.model
        self.tensors, self.source = tensors, Source.of_transformers(model, attention)
        one_token, several_tokens = self.source.small_pass(1), self.source.small_pass(VERIFIED_LENGTH)
        with filled_with_rows(model, 0.0):
            self.structure = find_structure(self.source)
            self.calls = capture_calls(model, self.structure, one_token)
            self.own_calls = capture_current_calls(self.structure, several_tokens)
            self.tapped_calls = capture_calls(model, self.structure, several_tokens)
        with filled_with_rows(model, OTHER_WEIGHTS), recorded_inputs(model, self.structure) as self.inputs:
            self.other_calls = capture_current_calls(self.structure, several_tokens)

    def why_not_swept(self) -> str | None:
        """Say why passes through one block at a time differ from a whole pass; None where they agree."""
        run, sweep = self.source.small_pass(VERIFIED_LENGTH), Sweep(self.structure.blocks)
        with filled_with_rows(self.tensors.model, OTHER_WEIGHTS), torch.no_grad():
            whole = first_output(run())
            try:
                for layer in range(len(self.structure.blocks)):
                    with sweep.block(layer):
                        swept = first_output(run())
            except (WorkError, *loading.RUNNING_ERRORS) as error:
                return loading.reason_of(error)
        return (
            None if torch.equal(swept, whole) else "its blocks need more than what the ones before them leave"
        )

    def verify(self, layer: int) -> None:
        """Verify an attention module that has its weights; `CannotReadLazily` where other weights matter, too."""
        model, name = self.tensors.model, self.structure.names[layer]
        module = self.structure.attention_at(layer)
        shape = self.own_calls[layer].hidden.shape
        hidden = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        hidden = hidden.to(next(module.parameters()).device, model.dtype)
        with without_interventions(), torch.inference_mode():
            own = self.own_calls[layer].output(module, hidden)
            with recorded_inputs(model, self.structure) as recorded:
                recomputed = self.tapped_calls[layer].output(module, hidden)
            with tapped(model, stop_at_tap):
                other = run_until_tap(module, self.other_calls[layer], hidden)
        (inputs,) = recorded
        try:
            check_recomputed(f"layer {layer} ({name})", own, recomputed, [largest_logit(inputs)])
        except WorkError as error:
            raise CannotReadLazily(str(error)) from error
        if not all(
            torch.equal(getattr(inputs, part), getattr(other, part)) for part in ("query", "key", "value")
        ):
            raise CannotReadLazily(f"queries, keys or values of {name} depend on weights outside it")
