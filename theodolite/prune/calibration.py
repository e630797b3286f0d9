"""The text that calibrates, as a pruning sees it: moments of what enters a block, and on to the next block.

`InThisProcess` runs the blocks here; `ray_pruning.py` has them run by others; `Unread` runs none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from theodolite.models.block_matrices import Matrix
from theodolite.prune.moments import InputMoments
from theodolite.prune.sequential import BlockByBlock


@runtime_checkable  # for the tests, which check annotations
class Calibration(Protocol):
    """A text on its way through the blocks."""

    def moments(self, layer: int, matrices: Sequence[Matrix]) -> InputMoments:
        """The moments of what enters the matrices of a block, the current one."""

    def advance(self, layer: int) -> None:
        """What the block, which is pruned now, gives is what enters the next one."""

    def verify_end(self) -> None:
        """Raise `WorkError` where what was run was not the pruned model."""


class Unread:
    """No text, for methods that weigh no inputs: no block is run, and all inputs count alike."""

    def moments(self, layer: int, matrices: Sequence[Matrix]) -> InputMoments:
        """Of nothing."""
        return InputMoments(matrices)

    def advance(self, layer: int) -> None:
        """Nothing enters the next block."""

    def verify_end(self) -> None:
        """Nothing was run."""


@dataclass(frozen=True)
class InThisProcess:
    """Blocks run here.

    Attributes:
        stream: over the text, or some of its shards.
        damping: as `InputMoments` takes it.
    """

    stream: BlockByBlock
    damping: float | None

    def moments(
        self, layer: int, matrices: Sequence[Matrix], shards: Sequence[int] | None = None
    ) -> InputMoments:
        """Of some shards, or all, summed one by one as workers would."""
        moments = InputMoments(matrices, self.damping)
        for shard in self.stream.shards if shards is None else shards:
            with moments.collecting():
                self.stream.read(layer, shard)
            moments.end_part()
        return moments

    def advance(self, layer: int) -> None:
        """As `BlockByBlock.advance`."""
        self.stream.advance(layer)

    def verify_end(self) -> None:
        """As `BlockByBlock.verify_end`."""
        self.stream.verify_end()
