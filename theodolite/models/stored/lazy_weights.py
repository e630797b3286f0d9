"""A checkpoint opened for its weights only: read from its safetensors files, those of one attention module at a time.

The model is a skeleton whose parameters stay on the meta device (`checkpoint_tensors.py`). While a layer's heads are
looked at, the tensors of its attention module are there, and nothing else; neither embeddings nor feed-forward parts
are read. What cannot be read so is opened whole, and the reason is said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from theodolite.attention.inputs import AttentionInputs
from theodolite.errors import UsageError, WorkError
from theodolite.models.calls import Calls, capture_calls, capture_current_calls
from theodolite.models.doors.answers import without_interventions
from theodolite.models.doors.taps import tapped
from theodolite.models.guard import known_state
from theodolite.models.open import open_model
from theodolite.models.opened import OpenModel
from theodolite.models.source import Source
from theodolite.models.stored.checkpoint_tensors import (
    CannotReadLazily,
    CheckpointTensors,
    checkpoint_tensors,
    filled_with_rows,
    restore_tensors,
    stored_tensors,
)
from theodolite.models.stored.loading import (
    LOADING_ERRORS,
    Checkpoint,
    reason_of,
    refuse_nonfinite_weights,
    without_progress_bars,
)
from theodolite.models.structure import Structure
from theodolite.models.structure_search import find_structure
from theodolite.models.verification import VERIFIED_LENGTH, check_recomputed, largest_logit, recorded_inputs
from theodolite.models.weights.copies import run_until_tap, stop_at_tap
from theodolite.system.choices import Attention, check_dtype

OTHER_WEIGHTS = 2**-6
"""Size of other weights in the modules that are not read, to see whether queries and keys depend on them."""


@known_state()
def open_weights(
    path_or_id: str | Path | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
    attention: Attention | None = None,
    say: Callable[[str], None] = lambda line: None,
    show_progress: Callable[[int, int], None] = lambda done, total: None,
) -> OpenModel:
    """Open a checkpoint for its weights only, for `OpenModel.head_weights` and `spectra`, on the CPU.

    Memory is that of one attention module, whatever the size of the model. Every attention module is verified as it is
    read: its output on random hidden states, recomputed from its queries, keys and values, is its own. A checkpoint
    that cannot be read so is opened whole.

    Args:
        path_or_id, dtype, revision, attention: as in `open_model`.
        say: told in a line why the model was opened whole, if it was.
        show_progress: told (bytes done, bytes in all) while the files are hashed; it may raise to stop.

    Raises:
        UsageError, WorkError: as `open_model` does.
    """
    check_dtype(dtype)
    try:
        return _open_lazily(path_or_id, dtype, revision, attention, show_progress)
    except CannotReadLazily as reason:
        model = open_model(path_or_id, dtype=dtype, device="cpu", revision=revision, attention=attention)
        say(f"opened whole, since {reason}")
        return model


def _open_lazily(
    path_or_id: str | Path | None,
    dtype: str | torch.dtype,
    revision: str | None,
    attention: Attention | None,
    show_progress: Callable[[int, int], None],
) -> OpenModel:
    checkpoint = Checkpoint.at(path_or_id, revision)
    with read_in_parts():
        checkpoint = checkpoint.of_one_commit()
        tensors = checkpoint_tensors(checkpoint.place, dtype, checkpoint.revision)
        reader = Reader.of(tensors, attention)
        attending = reader.structure.attending
        for layer in (attending[0], attending[-1]):
            with reader.loaded(layer):
                pass
    reader.source.trunk.register_forward_pre_hook(_refuse_to_run)
    return OpenModel.of(
        reader.source,
        reader.structure,
        reader.calls,
        reader.inputs,
        **checkpoint.identity(show_progress),
        _load_layer=reader.loaded,
    )


@contextmanager
def read_in_parts() -> Iterator[None]:
    """While open, what keeps a checkpoint from being read in parts is raised as `CannotReadLazily`, quietly."""
    try:
        with without_progress_bars():
            yield
    except ImportError as error:
        raise CannotReadLazily(f"this version of transformers is not known ({reason_of(error)})") from error
    except LOADING_ERRORS as error:
        raise CannotReadLazily(reason_of(error)) from error


def _refuse_to_run(module: nn.Module, _args: Any) -> None:
    raise UsageError(
        f"this {type(module).__name__} was opened for its weights only, and cannot read a text: use open_model"
    )


@dataclass(frozen=True)
class Reader:
    """Reads the attention modules of a skeleton, one at a time.

    Attributes:
        structure: of the skeleton.
        calls: how each attention module is called, with one token at position 0.
        own_calls: the same with `VERIFIED_LENGTH` tokens; `tapped_calls` as the tap makes the model call it;
            `other_calls` with other weights in all of the model.
        inputs: what arrived at the tap with those other weights.
    """

    tensors: CheckpointTensors
    source: Source
    structure: Structure
    calls: Calls
    own_calls: Calls
    tapped_calls: Calls
    other_calls: Calls
    inputs: list[AttentionInputs]

    @classmethod
    def of(cls, tensors: CheckpointTensors, attention: Attention | None) -> Reader:
        """Find the attention modules and how they are called, by forward passes without weights."""
        model = tensors.model
        source = Source.of_transformers(model, attention)
        with filled_with_rows(model, 0.0):
            one_token, several_tokens = source.small_pass(1), source.small_pass(VERIFIED_LENGTH)
            structure = find_structure(source)
            calls = capture_calls(model, structure, one_token)
            own_calls = capture_current_calls(structure, several_tokens)
            tapped_calls = capture_calls(model, structure, several_tokens)
        with filled_with_rows(model, OTHER_WEIGHTS), recorded_inputs(model, structure) as inputs:
            other_calls = capture_current_calls(structure, several_tokens)
        return cls(tensors, source, structure, calls, own_calls, tapped_calls, other_calls, inputs)

    @contextmanager
    def loaded(self, layer: int) -> Iterator[None]:
        """While open, the weights of one attention module are there; they are finite, and the module is verified.

        Raises:
            WorkError: weights are missing, NaN or infinite, or the module is not what the tap says.
        """
        module, name = self.structure.attention_at(layer), self.structure.names[layer]
        stored = stored_tensors(module)
        try:
            self.tensors.load(name)
            refuse_nonfinite_weights(module, name + ".")
            self.verify(layer)
            yield
        finally:
            restore_tensors(stored)

    def verify(self, layer: int) -> None:
        """Verify an attention module whose weights are there.

        Raises:
            CannotReadLazily: it is not what the tap says, or depends on weights outside it.
        """
        model, name = self.tensors.model, self.structure.names[layer]
        module = self.structure.attention_at(layer)
        shape = self.own_calls[layer].hidden.shape
        hidden = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        hidden = hidden.to(next(module.parameters()).device, self.tensors.dtype)
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
