"""The context vectors of each residual layer: similarity within and between labels, clusters, coherence with position.

A context's vector is the mean of its hidden states less what their positions average to. It comes as two means over
disjoint halves of its positions (`accumulate.means`): a product of different halves holds no noise of single tokens.
Source: Song & Zhong 2024.
"""

from __future__ import annotations

import functools
import math
import threading
import warnings
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from threadpoolctl import ThreadpoolController
from torch import Tensor
from torch.nn import functional

from theodolite.accumulate.means import Sample, decomposed_means
from theodolite.accumulate.sums import State
from theodolite.corpus.groups import Groups
from theodolite.judging import Criterion
from theodolite.measure.column import BALANCE, CONTEXTS, LEFT_OUT, SHARE, Array, Column, gives
from theodolite.measure.position import grouped_basis
from theodolite.measure.publications import SONG
from theodolite.system.processor import parallel_map
from theodolite.theory.smoothness import Grid
from theodolite.theory.unbiased import Jackknifed, combined, leaving_out, product, together

STARTS = 10  # seeded starts of k-means, of which the tightest clustering is taken

_LIMITED = threading.Lock()

_layer = partial(Column, "layers", group=CONTEXTS, error=LEFT_OUT)
_share = partial(_layer, range=SHARE, source=f"{SONG}, Table 1")
_cluster = partial(_layer, source=f"{SONG}, claim 2 of section 2; the index is ours", range=BALANCE)
_SQUARED = (
    "√(Σ c_12 c_21 / Σ c_11 c_22), c_ij the cosine of one context's vector from half i of its positions and the "
    "other's from half j; c_11 and c_22 those of either context's own two: noise makes all smaller alike."
)


@gives(
    _share(
        "incoherence_mean",
        "Root mean square cosine between positional and context vectors. Near 0: nearly orthogonal subspaces.",
        "√(Σ ⟨pos_t, u_c⟩⟨pos_t, v_c⟩ / Σ ‖pos_t‖² Σ ⟨u_c, v_c⟩), pos from two groups of contexts without c, u and v "
        "directions of ctx_c from either half; the root keeps the sign. Published: mean |cosine|, which noise fills.",
        title="incoherence",
        floor="incoherence_random",
        short="incoh.",
        healthy=Criterion("at most", 0.30, "cosine of position and context; GPT-2: 0.051"),
    ),
    _share(
        "similarity_within",
        "Root mean square cosine between context vectors with the same label.",
        f"{_SQUARED} Its error leaves out groups of contexts, or labels, whichever is larger; empty below two labels.",
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
    _cluster(
        "silhouette",
        "Mean silhouette of the labels. 1: compact and separated; 0: no structure.",
        "By cosine distance between disjoint halves of the positions of kept contexts that share their label with "
        "another; empty below two such labels.",
        title="silhouette of labels",
    ),
    _cluster(
        "cluster_ari",
        "How well k-means finds the labels (adjusted Rand index). 1: perfect; 0: chance.",
        "Clusters from one half of the positions, as many as labels, best of 10 seeded starts; the other half says "
        "which one a context is in.",
        title="k-means ARI",
    ),
    Array("context_basis", "(N, S, d)", "ctx, the mean of each kept context less μ, in each layer."),
    Array("context_label", "(S)", "The label of each kept context, −1 for none."),
    Array("context_cluster", "(N, S)", "The k-means cluster of each kept context, −1 for none."),
)
def context_columns(
    means: State, sample: Sample, labels: Int[Tensor, " sampled"], leading: int = 1, grid: Grid | None = None
) -> dict[str, Any]:
    """Compute columns, N values each, and arrays from `Means`, which kept `sample`, with a label each (−1: none)."""
    ctx = decomposed_means(means, leading=leading)[2]
    group = Groups(len(sample.slot)).of(sample.kept)

    def of_layer(layer: int) -> tuple[dict[str, Jackknifed], Tensor]:
        basis = grouped_basis(means, layer, leading, grid)
        read = (means["context_tokens"][layer] > 0).all(dim=0)
        contexts = Contexts(ctx[layer][:, read], labels[read], group[read], list(basis.groups))
        numbers = contexts.similarities() | {"incoherence_mean": contexts.incoherence(basis.p)}
        agreement, cluster = contexts.clusters()
        clustering = torch.full_like(labels, -1).masked_scatter(read, cluster)
        return numbers | agreement, clustering

    rows, clustering = zip(*parallel_map(of_layer, list(range(len(ctx)))), strict=True)
    tokens = means["context_tokens"]
    of_halves = tokens / tokens.sum(dim=1, keepdim=True).clamp_min(1)
    return {
        **together(rows),
        "context_basis": (ctx * of_halves.unsqueeze(-1)).sum(dim=1).float(),
        "context_label": labels,
        "context_cluster": torch.stack(clustering),
    }


class Contexts:
    """Context vectors of one layer: `halves` (2, S, d), and of each a label (−1: none) and a group, one of `groups`."""

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
        squares, agreement = self.gram * self.gram.T, self.agreement.outer(self.agreement)
        crossed, both = (self.gram + self.gram.T) / 2, (self.agreement + self.agreement[:, None]) / 2
        random = _ratio(squares, agreement, pairs, self.apart).root()
        numbers = {"similarity_random": random}
        for where, kind in (("within", same), ("between", ~same)):
            if len(apart_by_label) < 2:
                undefined = Jackknifed.constant(torch.tensor(math.nan, dtype=torch.float64), len(self.apart))
                numbers |= {f"similarity_{where}": undefined, f"cosine_{where}": undefined}
                continue
            of_squares, of_cosines = (
                [_ratio(part, whole, labelled & kind, apart) for apart in (self.apart, apart_by_label)]
                for part, whole in ((squares, agreement), (crossed, both))
            )
            numbers[f"similarity_{where}"] = _widest(*of_squares).root()
            numbers[f"cosine_{where}"] = _widest(*of_cosines)
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
            crossed = torch.einsum("gc,ghc,hc->c", free, products, free)
            crossed = crossed - torch.einsum("gc,ggc->c", free, products)
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
    part: Tensor, whole: Tensor, chosen: Tensor, apart: Bool[Tensor, "left_out sampled"]
) -> Jackknifed:
    """Compute Σ part / Σ whole over chosen pairs of contexts: all, and those of the contexts in each row of `apart`.

    NaN where the whole is not above its noise.
    """
    kept = apart.double()

    def summed(of: Tensor) -> Jackknifed:
        return Jackknifed((of * chosen).sum(), torch.einsum("gc,cd,gd->g", kept, of * chosen, kept))

    parts, wholes = summed(part), summed(whole)
    # Of pairs, of which one without a group has fewer, the sum per pair has the error that tells noise.
    mean = combined(torch.div, wholes, summed(torch.ones_like(whole)))
    return combined(torch.div, parts, wholes).where(mean.above_noise())


def _widest(by_groups: Jackknifed, by_labels: Jackknifed) -> Jackknifed:
    """Return the first with the larger error of both; one that is not known is none."""
    if not by_groups.error.isfinite():
        return by_groups
    return by_groups.about(by_groups.value, torch.fmax(by_groups.error, by_labels.error))


def clusters(
    ctx: Float[Tensor, "2 sampled width"],
    cosines: Float[Tensor, "sampled sampled"],
    labels: Int[Tensor, " sampled"],
    start: Int[Tensor, " sampled"] | None = None,
) -> tuple[dict[str, float], Int[Tensor, " sampled"]]:
    """Compute the silhouette of the labels (−1: none), and how far k-means finds them; and each context's cluster.

    `ctx` are vectors from either half of the positions, of which directions count; `cosines` are unbiased, NaN of
    contexts without a direction. K-means begins with a clustering of more contexts, `start`, or `STARTS` times. With
    fewer than two labels that contexts share both numbers are NaN, and all clusters −1.
    """
    _, inverse, counts = labels.unique(return_inverse=True, return_counts=True)
    taken = (labels >= 0) & (counts[inverse] >= 2)
    cluster = torch.full_like(labels, -1)
    if len(labels[taken].unique()) < 2:
        return {"silhouette": math.nan, "cluster_ari": math.nan}, cluster
    from sklearn.cluster import KMeans  # only here: it takes a second to start
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.metrics import adjusted_rand_score

    truth = inverse[taken]
    first, second = functional.normalize(ctx[:, taken].double(), dim=-1).numpy()
    # Sums over threads would depend on how many there are; and their number is one for all of the process.
    model = KMeans(len(truth.unique()), n_init=STARTS, random_state=0)
    if start is not None:
        # Contexts that were in no cluster before do not say where one begins.
        before = start[taken].numpy()
        centres = np.stack([first[before == one].mean(axis=0) for one in np.unique(before[before >= 0])])
        model = KMeans(len(centres), init=centres, n_init=1)
    with _LIMITED, _thread_pools().limit(limits=1), warnings.catch_warnings():
        # Equal contexts can be fewer points than clusters; then each point is its own cluster, as it should be.
        warnings.simplefilter("ignore", ConvergenceWarning)
        assigned = model.fit(first).predict(second)
    cluster[taken] = torch.from_numpy(assigned).to(cluster.dtype)
    numbers = {
        "silhouette": silhouette(1 - cosines[taken][:, taken], truth),
        "cluster_ari": float(adjusted_rand_score(truth.numpy(), assigned)),
    }
    return numbers, cluster


def silhouette(distance: Float[Tensor, "contexts contexts"], labels: Int[Tensor, " contexts"]) -> float:
    """Compute the mean of (b − a)/max(a, b): a to the others of the own label, b to the nearest other label."""
    kinds, inverse = labels.unique(return_inverse=True)
    known = distance.isfinite().double().fill_diagonal_(0)
    member = functional.one_hot(inverse, len(kinds)).double()
    mean = (distance.nan_to_num() * known) @ member / (known @ member)
    inside = mean.gather(1, inverse[:, None]).flatten()
    nearest = mean.masked_fill(member.bool() | mean.isnan(), math.inf).amin(dim=1)
    size = torch.maximum(inside, nearest)
    values = ((nearest - inside) / size)[(size > 0) & nearest.isfinite()]
    return float(values.nanmean()) if len(values) else math.nan


@functools.cache
def _thread_pools() -> ThreadpoolController:
    """Return the thread pools of all loaded libraries; looking for them takes longer than a small clustering."""
    return ThreadpoolController()
