"""Standard errors of what is made of the positional basis: contexts drawn anew, in the survey's eight groups.

One mechanism for every claim on P: a number of the basis is taken anew from balanced halves of the groups, as
`measure.uncertainty` does for the layers table. A run keeps the basis of all contexts only, so the text is read once
more, hidden states alone; without the model or the text no error is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from theodolite import Corpus, OpenModel, Run
from theodolite.accumulate.means import Means, Sample, decomposed
from theodolite.corpus.groups import GROUPS
from theodolite.corpus.spec import RANDOM
from theodolite.corpus.special_tokens import trailing_special_tokens
from theodolite.measure.uncertainty import balanced_halves, half_sample_error
from theodolite.passes.corpus_pass import CorpusPass, batch_of
from theodolite.passes.stages import Stage, run_stages
from theodolite.report.data import Floats
from theodolite.system.progress import ShowStage
from theodolite_papers.experiment import Study, random_tokens_like

READING = "reading contexts by group"


@dataclass(frozen=True)
class GroupedBasis:
    """Sums of hidden states by layer and group of contexts, over those of its contexts that have a position.

    Position 0 is apart, the special tokens behind a text are left out, and a basis has the positions before `end`.
    """

    sums: Float64[Tensor, "layers groups positions width"]
    readers: Float64[Tensor, "layers groups positions"]
    end: int

    def of(self, groups: Float[Tensor, " groups"]) -> Float64[Tensor, "layers positions_1_on width"]:
        """The positional basis of the groups of weight 1."""
        groups = groups.double()
        text, width = slice(1, self.sums.shape[2]), self.sums.shape[3]
        nothing = torch.empty(0, width, dtype=torch.float64), torch.empty(0, dtype=torch.float64)
        bases = [
            decomposed(torch.tensordot(groups, sums, 1), groups @ readers, *nothing, text)[1][1 : self.end]
            for sums, readers in zip(self.sums, self.readers, strict=True)
        ]
        return torch.stack(bases)


class _SumsPass(CorpusPass):
    """`Means` of the residual stream, and nothing else."""

    def __init__(self, model: OpenModel, corpus: Corpus) -> None:
        super().__init__(model, corpus, 0, batch_of(corpus, None))
        self.trailing = trailing_special_tokens(model.tokenizer, corpus.contexts, corpus.lengths)
        nothing = torch.empty(0, dtype=torch.int64)
        sample = Sample(torch.full((self.total,), -1), nothing, nothing)
        length = corpus.contexts.shape[1]
        self.means = Means(model.layers + 1, length, model.width, sample, self.trailing)
        self._first = 0

    @property
    def accumulators(self) -> dict[str, Means]:
        """The means."""
        return {"means": self.means}

    def begin(self, first: int, ids: Tensor) -> None:
        """Contexts `first …` come next."""
        self._first = first

    def stream(self, layer: int, hidden: Tensor) -> None:
        """Take in the residual stream of one layer."""
        self.means.update(layer, hidden, self._first)


def read_by_group(model: OpenModel, corpus: Corpus, run: Run, show: ShowStage) -> GroupedBasis | None:
    """Read the text of a run for the basis of its groups; None below 8 contexts, of which some groups are empty."""
    if len(corpus.contexts) < GROUPS or corpus.leading != 1:
        return None
    reading = _SumsPass(model, corpus)
    state = run_stages([Stage("text", READING, lambda _: reading)], show).of("text.means")
    text = slice(corpus.contexts.shape[1] - reading.trailing)
    end = run.arrays["positional_basis"].shape[1]
    return GroupedBasis(state["position_sum"][:, :, text], state["readers"][:, :, text], end)


def grouped_basis(study: Study, run: Run | None = None) -> GroupedBasis | None:
    """The basis by group of the text of a run: the study's, or that on random tokens; read when first asked for."""
    run = run or study.run
    model, corpus = study.model, study.corpus
    sha256 = run.provenance["corpus"].get("sha256")

    def read() -> GroupedBasis | None:
        if model is None:
            return None
        text = corpus if corpus is not None and corpus.sha256 == sha256 else _random_tokens(model, run)
        if text is None or text.sha256 != sha256:
            return None
        return read_by_group(model, text, run, study.show)

    return study.cached(f"basis by group of {sha256}", read)


def _random_tokens(model: OpenModel, run: Run) -> Corpus | None:
    """The text of a run on random tokens (`Study.random_run`), which its description gives again."""
    if run.provenance["corpus"]["name"] != RANDOM or model.vocabulary is None:
        return None
    return random_tokens_like(model, run)


def by_halves(basis: GroupedBasis, numbers: Callable[[Tensor], Floats]) -> Floats:
    """Numbers of a positional basis, such as one a layer, from each of the balanced halves: (halves, …)."""
    return np.stack([np.asarray(numbers(basis.of(half)), dtype=np.float64) for half in balanced_halves()])


def errors_of(
    basis: GroupedBasis | None, numbers: Callable[[Tensor], Floats], like: Floats | float
) -> Floats:
    """The standard errors of numbers of a positional basis; NaN, in the shape of `like`, where none are known."""
    if basis is None:
        return np.full(np.shape(like), np.nan)
    errors: Floats = half_sample_error(torch.from_numpy(by_halves(basis, numbers))).numpy()
    return errors
