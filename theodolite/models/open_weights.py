"""Open a checkpoint for its weights only: in parts where that can be done, else whole, and the reason is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from theodolite.errors import UsageError
from theodolite.models.open import DTYPES, OpenModel, open_model


def open_weights(
    path_or_id: str | Path | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
    say: Callable[[str], None] = lambda line: None,
    show_progress: Callable[[int, int], None] = lambda done, total: None,
) -> OpenModel:
    """Open a checkpoint for its weights only, for `OpenModel.head_weights` and `spectra`, on the CPU.

    Memory is that of one attention module, whatever the size of the model. Every attention module is verified as it is
    read: its output on random hidden states, recomputed from its queries, keys and values, is its own. A checkpoint
    that cannot be read so is opened whole.

    Args:
        path_or_id, dtype, revision: as in `open_model`.
        say: told in a line why the model was opened whole, if it was.
        show_progress: told (bytes done, bytes in all) while the files are hashed; it may raise to stop.

    Raises:
        UsageError, WorkError: as `open_model` does.
    """
    if str(dtype).removeprefix("torch.") not in DTYPES:
        raise UsageError(f"unknown dtype {dtype}: use one of {', '.join(DTYPES)}")
    try:
        # The parts of the loader of transformers that it needs are no promise of theirs, so that they may be gone.
        from theodolite.models.lazy_weights import Whole, open_shards
    except ImportError as error:
        why = f"this version of transformers is not known ({error})"
    else:
        try:
            return open_shards(path_or_id, dtype, revision, show_progress)
        except Whole as reason:
            why = str(reason)
    whole = open_model(path_or_id, dtype=dtype, device="cpu", revision=revision)
    say(f"opened whole, since {why}")
    return whole
