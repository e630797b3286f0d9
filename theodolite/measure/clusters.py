"""How well the context vectors of one layer cluster by the corpus's labels (documents, topics).

The clustering of Song & Zhong 2024, Figure 2, as two numbers. Only directions count: the paper's Gram matrices and
similarities are of normalised vectors. Each context comes as two vectors, means over disjoint halves of its positions,
so that what they have in common is no noise of single tokens.
"""

from __future__ import annotations

import functools
import math
import threading
import warnings
from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Int
from threadpoolctl import ThreadpoolController
from torch import Tensor
from torch.nn import functional

from theodolite.measure.column import BALANCE, CONTEXTS, LEFT_OUT, Column
from theodolite.measure.publications import SONG

STARTS = 10
"""Seeded starts of k-means, of which the tightest clustering is taken."""

_cluster = partial(
    Column,
    "layers",
    group=CONTEXTS,
    source=f"{SONG}, claim 2 of section 2; the index is ours",
    range=BALANCE,
    error=LEFT_OUT,
)
CLUSTER_COLUMNS = (
    _cluster(
        "silhouette",
        "Mean silhouette of the labels. 1: compact and separated; 0: no structure.",
        "Of the kept contexts, by cosine distance between disjoint halves of their positions, over contexts that share "
        "their label with another; empty below two such labels. The more labels, the nearer is the nearest other one.",
        title="silhouette of labels",
    ),
    _cluster(
        "cluster_ari",
        "How well k-means finds the labels (adjusted Rand index). 1: perfect; 0: chance.",
        "Clusters from one half of the positions, as many as labels, best of 10 seeded starts; the other half says "
        "which one a context is in.",
        title="k-means ARI",
    ),
)

_LIMITED = threading.Lock()


def clusters(
    ctx: Float[Tensor, "2 sampled width"],
    cosines: Float[Tensor, "sampled sampled"],
    labels: Int[Tensor, " sampled"],
    start: Int[Tensor, " sampled"] | None = None,
) -> tuple[dict[str, float], Int[Tensor, " sampled"]]:
    """Compute the silhouette of the labels and the agreement of k-means with them, as `CLUSTER_COLUMNS` defines them.

    Args:
        ctx: context vectors from either half of the positions, (2, S, d).
        cosines: between contexts, unbiased; NaN of contexts without a direction.
        labels: one for each, −1 for none.
        start: a clustering to start from, as returned for more contexts than these; None: `STARTS` seeded starts.

    Returns:
        The two numbers, NaN with fewer than two labels that contexts share; and each context's cluster, −1 for those
        left out.
    """
    _, inverse, counts = labels.unique(return_inverse=True, return_counts=True)
    taken = (labels >= 0) & (counts[inverse] >= 2)
    cluster = torch.full_like(labels, -1)
    if len(labels[taken].unique()) < 2:
        return {"silhouette": math.nan, "cluster_ari": math.nan}, cluster
    from sklearn.metrics import adjusted_rand_score  # only here: it takes a second to start

    truth = inverse[taken]
    first, second = functional.normalize(ctx[:, taken].double(), dim=-1).numpy()
    # Sums over threads would depend on how many there are; and their number is one for all of the process.
    with _LIMITED, _thread_pools().limit(limits=1):
        before = None if start is None else start[taken].numpy()
        assigned = _k_means(first, second, len(truth.unique()), before)
    cluster[taken] = torch.from_numpy(assigned).to(cluster.dtype)
    numbers = {
        "silhouette": silhouette(1 - cosines[taken][:, taken], truth),
        "cluster_ari": float(adjusted_rand_score(truth.numpy(), assigned)),
    }
    return numbers, cluster


def silhouette(distance: Float[Tensor, "contexts contexts"], labels: Int[Tensor, " contexts"]) -> float:
    """Compute the mean of (b − a)/max(a, b): a to the others of the own label, b to the nearest other label.

    Mean distances that are estimates may be below 0; NaN distances are left out.
    """
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


def _k_means(direction: np.ndarray, other: np.ndarray, k: int, start: np.ndarray | None) -> np.ndarray:
    """Find clusters of one half's directions, and give each context that of its other half's."""
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    if start is None:
        model = KMeans(k, n_init=STARTS, random_state=0)
    else:
        # Contexts that were in no cluster before do not say where one begins.
        known = np.unique(start[start >= 0])
        centres = np.stack([direction[start == cluster].mean(axis=0) for cluster in known])
        model = KMeans(len(known), init=centres, n_init=1)
    with warnings.catch_warnings():
        # Equal contexts can be fewer points than clusters; then each point is its own cluster, as it should be.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return model.fit(direction).predict(other)
