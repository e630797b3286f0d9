"""Standard errors of what is made of the positional basis: contexts drawn anew, in the survey's eight groups.

A run keeps the basis of all contexts only, so the text is read once more, hidden states alone; without the model or the
text no error is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from theodolite import Corpus, OpenModel, Run
from theodolite.accumulate.means import Means, Sample, decomposed
from theodolite.corpus.groups import GROUPS
from theodolite.corpus.spec import RANDOM
from theodolite.corpus.special_tokens import trailing_special_tokens
from theodolite.estimates import Estimate, Estimates, jackknife_error
from theodolite.jobs.job import Stage, run_stages
from theodolite.measure.uncertainty import balanced_halves, half_sample_error
from theodolite.models.structure import NoAttention
from theodolite.models.weights.copies import NotAffine
from theodolite.passes.corpus_pass import CorpusPass, batch_of
from theodolite.report.data import OF_GROUPS, Floats
from theodolite.system.progress import ShowStage
from theodolite.theory import dct2
from theodolite_papers.experiment import Study, random_tokens_like

QUARTERS = 4

Quarters = Sequence[Float64[Tensor, "*batch positions width"]]


def estimated(basis: GroupedBasis, number: Callable[[GroupedBasis], float]) -> Estimate:
    """A number without noise and its error, by leaving out one group of contexts after the other (jackknife)."""
    values = []
    for left_out in range(GROUPS):
        kept = (torch.arange(GROUPS) != left_out).double()
        sums, readers = basis.sums * kept[:, None, None], basis.readers * kept[:, None]
        values.append(number(replace(basis, sums=sums, readers=readers)))
    return Estimate(number(basis), float(jackknife_error(values)), *OF_GROUPS)


def quarters_of(basis: GroupedBasis) -> list[Float64[Tensor, "layers positions width"]]:
    """The positional basis of each quarter of the contexts."""
    return [basis.of((torch.arange(GROUPS) % QUARTERS == quarter).double()) for quarter in range(QUARTERS)]


def shares(rows: Quarters, columns: Quarters, cutoffs: Sequence[int]) -> Float64[Tensor, "*batch cutoffs"]:
    """Share of the energy of the DCT of rows · columnsᵀ in its lowest frequencies, free of noise."""
    whole = rows[0].new_zeros(rows[0].shape[:-2])
    lowest = whole[..., None].repeat_interleave(len(cutoffs), -1)
    largest = max(cutoffs)
    for one, two, three, four in permutations(range(QUARTERS)):
        if one > three:  # the same product, with its factors in the other order
            continue
        first, second = rows[one] @ columns[two].mT, rows[three] @ columns[four].mT
        whole = whole + (first * second).sum((-2, -1))
        low = dct2(first, largest) * dct2(second, largest)
        lowest = lowest + torch.stack([low[..., :k, :k].sum((-2, -1)) for k in cutoffs], -1)
    share = (lowest / whole[..., None]).clamp(0, 1)
    return torch.where(whole[..., None] > 0, share, torch.nan)


def low_frequency_without_noise(basis: GroupedBasis, cutoff: int = 10) -> Floats:
    """The share of the normalised Gram matrix, by layer; rows over the lengths that all contexts give."""
    lengths = torch.linalg.vector_norm(basis.of(torch.ones(GROUPS)), dim=-1, keepdim=True)
    quarters = [quarter / lengths for quarter in quarters_of(basis)]
    return shares(quarters, quarters, (cutoff,))[..., 0].numpy()


def gram_shares(basis: GroupedBasis, cutoffs: Sequence[int]) -> Floats:
    """The shares of PPᵀ, (layers, cutoffs)."""
    quarters = quarters_of(basis)
    return np.asarray(shares(quarters, quarters, cutoffs))


def product_shares(basis: GroupedBasis, model: OpenModel, cutoffs: Sequence[int]) -> Floats:
    """The shares of PWPᵀ, W = W_q W_kᵀ of every head that has one, (heads of all layers, cutoffs)."""
    quarters = quarters_of(basis)
    parts = []
    for layer in range(model.layers):
        try:
            weights = model.head_weights(layer)
        except (NotAffine, NoAttention):
            continue
        if weights.w_q.shape[1] == quarters[0].shape[-1]:
            w_q, w_k = (w.double().cpu() for w in (weights.w_q, weights.w_k))
            queries, keys = ([quarter[layer] @ w for quarter in quarters] for w in (w_q, w_k))
            parts.append(shares(queries, keys, cutoffs))
    return np.concatenate(parts) if parts else np.empty((0, len(cutoffs)))


def gram_without_noise(basis: GroupedBasis) -> Float64[Tensor, "layers positions positions"]:
    """PPᵀ on average over pairs of quarters, in which no error meets itself."""
    quarters = quarters_of(basis)
    total = sum(quarters)
    assert isinstance(total, Tensor)
    own = sum(quarter @ quarter.mT for quarter in quarters)
    return (total @ total.mT - own) / (QUARTERS * (QUARTERS - 1))


def noise_bases(basis: GroupedBasis) -> Float64[Tensor, "pairs layers positions width"]:
    """Estimate what sampling alone puts into a positional basis: half the difference of two halves of the contexts.

    One for each balanced half and its complement; of equal groups the noise is as large as in the whole basis.
    """
    halves = balanced_halves()
    pairs = zip(*halves.chunk(2), strict=True)
    return torch.stack([(basis.of(half) - basis.of(complement)) / 2 for half, complement in pairs])


def norms_beyond_noise(norms: Estimates, basis: GroupedBasis) -> Estimates:
    """Relative norms of the positional basis less what sampling noise alone has, squares subtracted: lower bounds."""
    noise = torch.linalg.matrix_norm(noise_bases(basis), ord=2).square().mean(0)
    share = noise / torch.linalg.matrix_norm(basis.of(torch.ones(GROUPS)), ord=2).square()
    left = norms.values * np.sqrt(np.clip(1 - share.numpy(), 0, None))
    errors = np.full(left.shape, np.nan) if norms.errors is None else norms.errors
    # d√(r² − s²) = r dr/√(r² − s²); where nothing is left, as large as all that was there.
    grown = errors * norms.values / np.maximum(left, np.maximum(errors, 1e-300))
    return replace(norms, values=left, errors=grown)


READING = "reading contexts by group"


@dataclass(frozen=True)
class GroupedBasis:
    """Sums of hidden states by layer and group of contexts, over those of its contexts that have a position."""

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
        text = corpus if corpus is not None and corpus.sha256 == sha256 else None
        # Random tokens (`Study.random_run`) follow from their description.
        if text is None and run.provenance["corpus"]["name"] == RANDOM and model and model.vocabulary:
            text = random_tokens_like(model, run)
        if model is None or text is None or text.sha256 != sha256:
            return None
        return read_by_group(model, text, run, study.show)

    return study.cached(f"basis by group of {sha256}", read)


def by_halves(basis: GroupedBasis, numbers: Callable[[Tensor], Floats]) -> Floats:
    """Numbers of a positional basis, such as one a layer, from each of the balanced halves: (halves, …)."""
    return np.stack([np.asarray(numbers(basis.of(half)), dtype=np.float64) for half in balanced_halves()])


def errors_of(
    basis: GroupedBasis | None, numbers: Callable[[Tensor], Floats], like: Floats | float
) -> Floats:
    """The standard errors of numbers of a positional basis; NaN, in the shape of `like`, where none are known."""
    if basis is None:
        return np.full(np.shape(like), np.nan)
    return half_sample_error(torch.from_numpy(by_halves(basis, numbers))).numpy()
