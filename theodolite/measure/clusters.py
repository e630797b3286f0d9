"""Do the context vectors of one layer fall into the corpus's own groups (documents, topics)?

The clustering of Song & Zhong 2024, Figure 2, as two numbers. Only directions count: the paper's Gram matrices and
similarities are of normalised vectors. This module knows neither positions nor groups of contexts.
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

from theodolite.measure.column import BALANCE, HALVES, Column
from theodolite.measure.publications import SONG

STARTS = 10
"""Seeded starts of k-means, of which the tightest clustering is taken."""

_cluster = partial(
    Column, "layers", source=f"{SONG}, claim 2 of section 2; the index is ours", range=BALANCE, error=HALVES
)
CLUSTER_COLUMNS = (
    _cluster(
        "silhouette",
        "Mean silhouette of the labels. 1: compact and separated; 0: no structure.",
        "Of the kept contexts' directions, by cosine distance, over contexts that share their label with another; "
        "empty below two such labels.",
        title="silhouette of labels",
    ),
    _cluster(
        "cluster_ari",
        "How well k-means finds the labels (adjusted Rand index). 1: perfect; 0: chance.",
        "Of the same directions, as many clusters as labels, best of 10 seeded starts.",
        title="k-means ARI",
    ),
)

_LIMITED = threading.Lock()


def clusters(
    ctx: Float[Tensor, "sampled width"],
    labels: Int[Tensor, " sampled"],
    start: Int[Tensor, " sampled"] | None = None,
) -> tuple[dict[str, float], Int[Tensor, " sampled"]]:
    """Compute the silhouette of the labels and the agreement of k-means with them, as `CLUSTER_COLUMNS` defines them.

    Args:
        ctx: context vectors, (S, d).
        labels: one for each, −1 for none.
        start: a clustering to start from, as returned for more contexts than these; None: `STARTS` seeded starts.

    Returns:
        The two numbers, NaN with fewer than two labels that contexts share; and each context's cluster, −1 for those
        left out.
    """
    # A tenth of every start, if it were on top.
    from sklearn.metrics import adjusted_rand_score, silhouette_score

    _, inverse, counts = labels.unique(return_inverse=True, return_counts=True)
    taken = (labels >= 0) & (counts[inverse] >= 2)
    found = torch.full_like(labels, -1)
    if len(labels[taken].unique()) < 2:
        return {"silhouette": math.nan, "cluster_ari": math.nan}, found
    truth = inverse[taken].numpy()
    direction = torch.nn.functional.normalize(ctx[taken].double(), dim=-1).numpy()
    # Sums over threads would depend on how many there are; and their number is one for all of the process.
    with _LIMITED, _thread_pools().limit(limits=1):
        silhouette = silhouette_score(direction, truth, metric="cosine")
        assigned = _k_means(direction, len(np.unique(truth)), None if start is None else start[taken].numpy())
    found[taken] = torch.from_numpy(assigned).to(found.dtype)
    numbers = {
        "silhouette": float(silhouette),
        "cluster_ari": float(adjusted_rand_score(truth, assigned)),
    }
    return numbers, found


@functools.cache
def _thread_pools() -> ThreadpoolController:
    """Return the thread pools of all loaded libraries; looking for them takes longer than a small clustering."""
    return ThreadpoolController()


def _k_means(direction: np.ndarray, k: int, start: np.ndarray | None) -> np.ndarray:
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
        return model.fit(direction).labels_
