"""What a survey sums besides its own: an accumulator of the caller's, and the columns that it makes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from theodolite.accumulate.sums import LayerSums, State
from theodolite.attention.inputs import AttentionInputs

Columns = dict[str, Sequence[float]]


class Extra(LayerSums):
    """Sums over a text that add columns to the tables of a survey; for `survey(…, extra=[…])`.

    A subclass gives `LayerSums.__init__` its tensors (one a residual layer, or one a block), sums in those of
    `stream`, `attention_input` and `attention` that it needs, and says what comes of it in `columns`. The survey
    works on a copy, so that the same instance may be given again.

    `name` stands for the measurement in the fingerprint of the run: change it when the numbers change.
    """

    name: str

    def stream(self, layer: int, hidden: Tensor) -> None:
        """The residual stream (batch, positions, d): layer 0 enters the first block, ℓ leaves block ℓ."""

    def attention_input(self, layer: int, hidden: Tensor) -> None:
        """What enters the attention module of a block, (batch, positions, d)."""

    def attention(self, layer: int, inputs: AttentionInputs) -> None:
        """A block's queries, keys and values."""

    def columns(self, state: State) -> dict[str, Columns]:
        """From the state of the whole text: `{"layers": {name: N values}, "heads": {name: L · H values}}`, or one.

        No name may be that of a column which the survey has.
        """
        raise NotImplementedError
