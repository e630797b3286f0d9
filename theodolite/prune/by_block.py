"""How much each block can lose: from its outliers, or from the tags that its heads write.

Outlier weighed layerwise sparsity (OWL, Yin et al. 2024): a block's entries are weighed as Wanda weighs them, A_ij =
|W_ij| ‖x_j‖ with the inputs of the dense model. D is the share of its entries with A_ij above M times the block's mean.
Sparsities fall with D on a line, in a range of 2λ, as in the released code: ρ − 2λ (D − mean D) / (max D − min D). By
tags (ours), D is the variance of a head's output that its sinks explain, on average over the block's heads, and the
line is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.models import OpenModel
from theodolite.models.block_matrices import Matrix, one_expert_at_a_time
from theodolite.prune.moments import InputMoments
from theodolite.prune.patterns import check_sparsity
from theodolite.prune.sequential import BlockByBlock, keeping
from theodolite.prune.skipped import Matrices
from theodolite.sinks.trace import trace_sinks

MULTIPLE, HALF_RANGE = 5.0, 0.08
"""M and λ, as published."""


def check_sparsity_by(sparsity_by: str, sparsity: object, pattern: str | None) -> None:
    """Raise `UsageError` where the mean sparsity cannot be distributed over blocks, or by nothing that is known."""
    if sparsity_by not in _SHARES:
        raise UsageError(f"unknown --sparsity-by {sparsity_by}: use {' or '.join(_SHARES)}")
    if pattern is not None or isinstance(sparsity, Sequence):
        raise UsageError(
            f"--sparsity-by {sparsity_by} starts from one sparsity: give a number, and no pattern"
        )
    check_sparsity(sparsity)


@dataclass(frozen=True)
class DenseReading:
    """A dense model that reads a text once, before it is pruned.

    Attributes:
        model, corpus, matrices: of every block.
        batch: contexts per forward pass.
        folder: where the hidden states of a model larger than memory are kept, if it is one.
        between: called after every batch; it may raise to stop.
    """

    model: OpenModel
    corpus: Corpus
    matrices: Matrices
    batch: int
    folder: Path | None
    between: Callable[[], None]

    def sparsities(self, sparsity_by: str, sparsity: float) -> list[float]:
        """The sparsity of each block, by "owl" or "tags", with the given mean over blocks that have matrices.

        Raises:
            UsageError: a block would lose all or nothing.
        """
        return falling(_SHARES[sparsity_by](self), sparsity)

    def outliers(self) -> list[float | None]:
        """D of each block by its outliers."""
        shares = []
        with one_expert_at_a_time(self.model.root), keeping(self.model, self.folder) as keep:
            stream = BlockByBlock(self.model, self.corpus, self.batch, self.between, keep)
            for layer, block in enumerate(self.matrices):
                with self.model.block_present(layer):
                    moments = InputMoments(block)
                    stream.advance(layer, moments.collecting())
                    shares.append(_outliers(block, moments))
        return shares

    def tags(self) -> list[float | None]:
        """D of each block by the tags of its heads."""

        def show_progress(what: str, done: int, total: int) -> None:
            self.between()

        traces = trace_sinks(self.model, self.corpus, batch=self.batch, show_progress=show_progress).traces
        if not traces["tagged"].sum() > 0:
            raise UsageError(
                "no sink of this text tags anything, so that blocks do not differ: leave out --sparsity-by"
            )
        tagged = traces.groupby("layer")["tagged"].sum()  # of what no sink explains, nothing is known (NaN)
        return [
            float(tagged.get(layer, 0.0)) / max(self.model.heads_of[layer], 1) if block else None
            for layer, block in enumerate(self.matrices)
        ]


_SHARES: dict[str, Callable[[DenseReading], list[float | None]]] = {
    "owl": DenseReading.outliers,
    "tags": DenseReading.tags,
}


def falling(shares: Sequence[float | None], sparsity: float) -> list[float]:
    """Sparsities that fall with D on a line; None: a block without matrices, which counts for nothing.

    Raises:
        UsageError: a block would lose all or nothing.
    """
    known = [share for share in shares if share is not None]
    mean, spread = sum(known) / len(known), max(known) - min(known)
    slope = 2 * HALF_RANGE / spread if spread else 0.0
    each = [sparsity if share is None else sparsity - slope * (share - mean) for share in shares]
    if not 0 < min(each) <= max(each) < 1:
        raise UsageError(
            f"sparsity {sparsity:g} by block is {min(each):.3g} to {max(each):.3g}: give one nearer to the middle"
        )
    return each


def _outliers(block: Sequence[Matrix], moments: InputMoments) -> float | None:
    """D of a block. Matrices that no token reaches do not count."""
    reached = [(matrix, moments.of(matrix)) for matrix in block]
    reached = [(matrix, of_inputs) for matrix, of_inputs in reached if of_inputs.count]
    if not reached:
        return None

    def weighed() -> Iterator[Tensor]:  # one matrix in memory at a time
        for matrix, of_inputs in reached:
            # Norms over tokens, no means: matrices that are read by some tokens only count for less.
            norms = (of_inputs.diagonal * of_inputs.count).sqrt()
            yield matrix.read().to(norms.device).double().abs() * norms

    entries = sum(matrix.shape[0] * matrix.shape[1] for matrix, _ in reached)
    mean = sum(float(each.sum()) for each in weighed()) / entries
    return sum(int((each > MULTIPLE * mean).sum()) for each in weighed()) / entries
