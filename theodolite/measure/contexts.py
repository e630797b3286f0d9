"""The context vectors of each residual layer: similarity within and between labels, and coherence with position.

A context's vector is the mean of its hidden states less what their positions average to. It comes as two means over
disjoint halves of its positions (`accumulate.means`): a product of different halves holds no noise of single tokens.
Source: Song & Zhong 2024.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from theodolite.accumulate.means import Sample, decomposed_means, whole_contexts
from theodolite.accumulate.second_moments import trace_and_norm_of
from theodolite.accumulate.sums import State
from theodolite.corpus.groups import Groups
from theodolite.judging import Criterion
from theodolite.measure.clusters import CLUSTER_COLUMNS, clusters
from theodolite.measure.column import BALANCE, CONTEXTS, LEFT_OUT, SHARE, Array, Column, gives
from theodolite.measure.position import grouped_basis
from theodolite.measure.publications import SONG
from theodolite.system.processor import parallel_map
from theodolite.theory.smoothness import Grid
from theodolite.theory.unbiased import Jackknifed, combined, leaving_out, product, together

_layer = partial(Column, "layers", group=CONTEXTS, error=LEFT_OUT)
_share = partial(_layer, range=SHARE, source=f"{SONG}, Table 1")
_SQUARED = (
    "√(Σ c_12 c_21 / Σ c_11 c_22), c_ij the cosine of one context's vector from half i of its positions and the "
    "other's from half j; c_11 and c_22 those of either context's own two: noise makes all smaller alike."
)


CONTEXT_COLUMNS = (
    _share(
        "incoherence_mean",
        "Root mean square cosine between positional and context vectors. Near 0: nearly orthogonal subspaces.",
        "√(Σ ⟨pos_t, u_c⟩⟨pos_t, v_c⟩ / Σ ‖pos_t‖² Σ ⟨u_c, v_c⟩), pos from two groups of contexts without c, u and v "
        "the directions of ctx_c from either half of its positions; the square may be below 0, and the root keeps the "
        "sign. The publication has mean |cosine| and the largest one, both of which sampling noise fills.",
        title="incoherence",
        floor="incoherence_random",
        short="incoh.",
        healthy=Criterion("at most", 0.30, "cosine of position and context; GPT-2: 0.051"),
    ),
    _share(
        "incoherence_random",
        "Root mean square cosine of random directions with the covariance of the hidden states.",
        "‖Σ‖_F / tr Σ.",
        source="a closed form",
        title="incoherence, random",
        error="",
    ),
    _share(
        "similarity_within",
        "Root mean square cosine between context vectors with the same label.",
        f"{_SQUARED} Its error leaves out groups of contexts, or labels, whichever is larger; empty below two labels. "
        "The publication has mean |cosine|, which sampling noise fills.",
        floor="similarity_random",
        short="within",
    ),
    _share(
        "similarity_between",
        "Root mean square cosine between context vectors with different labels.",
        "As `similarity_within`.",
        floor="similarity_random",
        short="between",
    ),
    _share(
        "similarity_random",
        "Root mean square cosine between context vectors whatever their labels.",
        _SQUARED,
        source="ours",
        title="similarity, random labels",
    ),
    *(
        _layer(
            f"cosine_{where}",
            f"Mean cosine between context vectors with {labels}.",
            "Σ (c_12 + c_21) / Σ (c_11 + c_22) of the same cosines; errors as of `similarity_within`.",
            "ours",
            range=BALANCE,
        )
        for where, labels in (("within", "the same label"), ("between", "different labels"))
    ),
    *CLUSTER_COLUMNS,
)


@gives(
    *CONTEXT_COLUMNS,
    Array("context_basis", "(N, S, d)", "ctx, the mean of each kept context less μ, in each layer."),
    Array("context_label", "(S)", "The label of each kept context, −1 for none."),
    Array("context_cluster", "(N, S)", "The k-means cluster of each kept context, −1 for none."),
)
def context_columns(
    means: State,
    residual: State,
    sample: Sample,
    labels: Int[Tensor, " sampled"],
    leading: int = 1,
    grid: Grid | None = None,
) -> dict[str, Any]:
    """Compute the columns of the context vectors, N values each, and their arrays.

    From states of `Means`, which kept the contexts of `sample`, with a label each (−1: none), and of `SecondMoments` of
    the residual stream.
    """
    ctx = decomposed_means(means, leading=leading)[2]
    group = Groups(len(sample.slot)).of(sample.kept)

    def of_layer(layer: int) -> tuple[dict[str, Jackknifed], Tensor]:
        basis = grouped_basis(means, layer, leading, grid)
        read = (means["context_tokens"][layer] > 0).all(dim=0)
        contexts = Contexts(ctx[layer][:, read], labels[read], group[read], list(basis.groups))
        numbers = contexts.similarities() | {"incoherence_mean": contexts.incoherence(basis.p)}
        trace, norm = trace_and_norm_of(residual, layer)
        random = norm / trace
        numbers["incoherence_random"] = Jackknifed.constant(random, len(basis.groups))
        agreement, cluster = contexts.clusters()
        clustering = torch.full_like(labels, -1).masked_scatter(read, cluster)
        return numbers | agreement, clustering

    rows, clustering = zip(*parallel_map(of_layer, list(range(len(ctx)))), strict=True)
    return {
        **together(rows),
        "context_basis": whole_contexts(ctx, means["context_tokens"]).float(),
        "context_label": labels,
        "context_cluster": torch.stack(clustering),
    }


class Contexts:
    """The context vectors of one layer, with what groups of contexts and labels they are in.

    Args:
        halves: of either half of the positions, (2, S, d).
        labels: of each, −1 for none.
        group: of each, among `groups`.
    """

    def __init__(
        self,
        halves: Float[Tensor, "2 sampled width"],
        labels: Int[Tensor, " sampled"],
        group: Int[Tensor, " sampled"],
        groups: list[int],
    ) -> None:
        self.halves, self.labels = halves, labels
        self.apart = torch.stack([group != one for one in groups])
        inside = (~self.apart).double()
        means = (inside @ halves) / inside.sum(dim=1).clamp_min(1).unsqueeze(-1)
        # The mean over the contexts was taken off, which is not that of all texts: products of different groups are 0
        # on average about the latter.
        common = -product(means[0], means[1]).value.nan_to_num()
        # Directions, so that every context counts alike, whatever its length and the noise of its half.
        lengths = torch.linalg.vector_norm(halves, dim=-1).clamp_min(1e-300)
        self.directions = halves / lengths.unsqueeze(-1)
        self.gram = self.directions[0] @ self.directions[1].T + common / lengths[0].outer(lengths[1])
        self.agreement = self.gram.diagonal()

    def similarities(self) -> dict[str, Jackknifed]:
        """Compute the similarity of context vectors within labels, between labels, and of all."""
        pairs = torch.ones_like(self.gram, dtype=torch.bool).triu(1)
        labelled = pairs & (self.labels >= 0) & (self.labels[:, None] >= 0)
        same = self.labels == self.labels[:, None]
        names = self.labels.unique()
        apart_by_label = self.labels != names[names >= 0][:, None]
        kinds = {"random": pairs}
        if len(apart_by_label) > 1:
            kinds |= {"within": labelled & same, "between": labelled & ~same}
        squares, agreement = self.gram * self.gram.T, self.agreement.outer(self.agreement)
        crossed = (self.gram + self.gram.T) / 2
        undefined = Jackknifed.constant(torch.tensor(math.nan, dtype=torch.float64), len(self.apart))
        numbers = {
            f"{of}_{where}": undefined for of in ("similarity", "cosine") for where in ("within", "between")
        }
        for where, chosen in kinds.items():
            aparts = [self.apart] if where == "random" else [self.apart, apart_by_label]
            of_squares = [_ratio(squares, agreement, chosen, apart) for apart in aparts]
            numbers[f"similarity_{where}"] = _widest(of_squares).root()
            if where != "random":
                both = (self.agreement + self.agreement[:, None]) / 2
                of_cosines = [_ratio(crossed, both, chosen, apart) for apart in aparts]
                numbers[f"cosine_{where}"] = _widest(of_cosines)
        return numbers

    def incoherence(self, p: Float[Tensor, "groups positions width"]) -> Jackknifed:
        """Compute the root mean square cosine between P, of each group of contexts, and the contexts."""
        first, second = (p @ half.T for half in self.directions)
        products = torch.einsum("gtc,htc->ghc", first, second)
        flat = p.flatten(1)
        table = flat @ flat.T

        def energy(used: Float[Tensor, " groups"]) -> Tensor:
            return (used @ table @ used - used @ table.diagonal()) / (used.sum() * (used.sum() - 1))

        def square(used: Float[Tensor, " groups"]) -> Tensor:
            """Average over pairs of the used groups, of which neither holds the context."""
            free = self.apart * used[:, None]
            count = free.sum(dim=0)
            crossed = torch.einsum("gc,ghc,hc->c", free, products, free) - torch.einsum(
                "gc,ggc->c", free, products
            )
            kept = (~self.apart * used[:, None]).sum(dim=0)
            agreement = (self.agreement * kept).sum()
            return (crossed / (count * (count - 1)) * kept).sum() / (energy(used) * agreement)

        kept = self.apart.double()
        agreement = Jackknifed(self.agreement.mean(), kept @ self.agreement / kept.sum(dim=1))
        known = bool(leaving_out(energy, len(p)).above_noise() & agreement.above_noise())
        return leaving_out(square, len(p)).corrected().root().where(known)

    def clusters(self) -> tuple[dict[str, Jackknifed], Int[Tensor, " sampled"]]:
        """Compute the silhouette and k-means agreement of the labels, and each context's cluster, −1 for none."""
        known = torch.where(self.agreement > 0, self.agreement, math.nan).sqrt()
        cosines = ((self.gram + self.gram.T) / 2 / known.outer(known)).clamp(-1, 1)
        numbers, clustering = clusters(self.halves, cosines, self.labels)
        without = [
            clusters(self.halves[:, kept], cosines[kept][:, kept], self.labels[kept], clustering[kept])[0]
            for kept in self.apart
        ]
        columns = {
            name: Jackknifed(*(cosines.new_tensor(of) for of in (value, [row[name] for row in without])))
            for name, value in numbers.items()
        }
        # The nearest of several labels is the nearer, the less is known of each.
        return columns | {"silhouette": columns["silhouette"].corrected()}, clustering


def _ratio(
    part: Float[Tensor, "sampled sampled"],
    whole: Float[Tensor, "sampled sampled"],
    chosen: Bool[Tensor, "sampled sampled"],
    apart: Bool[Tensor, "left_out sampled"],
) -> Jackknifed:
    """Compute Σ part / Σ whole over chosen pairs of contexts: all, and those of the contexts in each row of `apart`.

    NaN where the whole is not above its noise.
    """
    kept = apart.double()
    sums = [
        Jackknifed((of * chosen).sum(), torch.einsum("gc,cd,gd->g", kept, of * chosen, kept))
        for of in (part, whole)
    ]
    # Of pairs, of which one without a group has fewer, the sum per pair has the error that tells noise.
    pairs = Jackknifed(chosen.sum().double(), torch.einsum("gc,cd,gd->g", kept, chosen.double(), kept))
    return combined(torch.div, *sums).where(combined(torch.div, sums[1], pairs).above_noise())


def _widest(several: list[Jackknifed]) -> Jackknifed:
    """Return the first, which leaves out groups, with the largest error of all; one that is not known is none."""
    errors = torch.stack([one.error for one in several])
    return (
        several[0].about(several[0].value, errors.nan_to_num(0).amax(dim=0))
        if errors[0].isfinite()
        else several[0]
    )
