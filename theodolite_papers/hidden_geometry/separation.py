"""Clusters of contexts by label, and incoherence of positions and contexts against random directions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
import torch
from scipy.optimize import linear_sum_assignment

from theodolite import Run
from theodolite.errors import UsageError
from theodolite.estimates import Estimate, Floats
from theodolite.report import data, style
from theodolite.report.drawing.grammar import heat
from theodolite.system.wording import for_plotly, number, with_error
from theodolite.theory import normalised_gram
from theodolite.theory.unbiased import Jackknifed, combined
from theodolite_papers import drawing
from theodolite_papers.experiment import Outcome, Study, by_layer, declared
from theodolite_papers.hidden_geometry import layer_columns, published
from theodolite_papers.hidden_geometry.layer_columns import estimates_of, jackknifed, mean_of

LEAST_NAMED = 0.04  # of a map's side, below which a block has no room for its name


def gram_by_label(cosines: Floats, labels: Sequence[str], positions: Sequence[int] = ()) -> go.Figure:
    """Draw cosines between positions, if any, then between contexts in blocks of one label, lines between them."""
    first, size = len(positions), len(positions) + len(labels)
    starts = [first + i for i, label in enumerate(labels) if i == 0 or labels[i - 1] != label]
    ticks = [(first / 2, "positions")] if first else []
    for start, end in zip(starts, [*starts[1:], size], strict=True):
        if end - start >= LEAST_NAMED * size:
            ticks.append(((start + end - 1) / 2, for_plotly(_short(labels[start - first]))))
    centres = [first / 2, first + len(labels) / 2]
    of_positions = {"tickvals": centres, "ticktext": ["positions →", "contexts"], "tickangle": 0}
    return drawing.cosine_map(
        cosines,
        [f"position {position}" for position in positions]
        + [f"context {i} of {for_plotly(label)}" for i, label in enumerate(labels)],
        "cosine",
        ticks,
        [start for start in starts if start],
        xaxis=of_positions if first else {"showticklabels": False},
    )


def cluster_table(shares: Floats, labels: Sequence[str]) -> go.Figure:
    """Draw which cluster the contexts of each label fall into, (labels, clusters), rows of shares."""
    cells = heat(
        shares,
        0,
        1,
        "%{y}<br>cluster %{x}: %{z:.2f} of its contexts<extra></extra>",
        bar="share of the label's contexts",
        cells=True,
        x=[str(cluster + 1) for cluster in range(shares.shape[1])],
        y=[for_plotly(_short(label)) for label in labels],
    )
    axis = {"type": "category", "showgrid": False, "ticks": ""}
    layout = {"xaxis": axis, "yaxis": axis | {"autorange": "reversed"}}
    return style.figure([cells], "cluster of k-means", height=min(900, 110 + 18 * len(labels)), layout=layout)


def _short(label: str, limit: int = 16) -> str:
    return label if len(label) <= limit else label[: limit - 1] + "…"


DOCUMENTS, CONTEXTS_PER_DOCUMENT = 4, 32  # as in Fig. 2; fewer where the run has fewer
SHOWN_POSITIONS = 96
POSITIONS_PER_CONTEXT = 2  # at most, or the contexts would vanish beside them
LEAST_LAYERS = 5  # below that, the steps between them are too few to show a trend


def frequent_labels(labels: np.ndarray, most: int, least: int = 2) -> list[int]:
    """List the labels that at least so many contexts have, the most frequent first."""
    present, counts = np.unique(labels[labels >= 0], return_counts=True)
    ordered = sorted(zip(-counts, present, strict=True))[:most]
    return [int(label) for count, label in ordered if -count >= least]


def chosen_contexts(
    labels: np.ndarray, most: int = DOCUMENTS, each: int = CONTEXTS_PER_DOCUMENT, least: int = 1
) -> tuple[list[int], list[int]]:
    """Choose kept contexts of the most frequent labels, so many of `each`, grouped: (places, label of each place)."""
    chosen = frequent_labels(labels, most, least)
    pairs = [(int(place), label) for label in chosen for place in np.flatnonzero(labels == label)[:each]]
    return [place for place, _ in pairs], [label for _, label in pairs]


def _judge_layers(outcome: Outcome, key: str, numbers: Jackknifed) -> None:
    estimates = estimates_of(numbers)
    layer_columns.judge_seen(outcome, key, estimates, estimates.values)


BLOCKS = {
    "cosine_within": ("mean cosine within a label", ""),
    "cosine_between": ("mean cosine between labels", ""),
    "incoherence_mean": ("root mean square cosine of positions and contexts", "“values close to 0”"),
}


@declared("geometry/figure2")
def figure_2(study: Study, outcome: Outcome) -> None:
    run = study.run
    names = data.provenance(run, "corpus", "labels") or []
    places, of = chosen_contexts(data.need(run, "context_label"))
    shown = min(SHOWN_POSITIONS, POSITIONS_PER_CONTEXT * len(places))
    positions = [1 + place for place in data.evenly(data.need(run, "positional_basis").shape[1] - 1, shown)]
    basis, contexts = data.need(run, "positional_basis"), data.need(run, "context_basis")
    rows = np.concatenate([basis[:, positions], contexts[:, places]], axis=1)
    grams = normalised_gram(torch.from_numpy(rows)).numpy()
    count = len(set(of))
    outcome.read("labels and contexts", f"{count} labels, {len(places)} contexts", "4 documents of 32")
    _read_means(outcome, run, BLOCKS)
    outcome.verdicts.append(layer_columns.smooth_verdict(outcome, run))
    _judge_layers(outcome, "incoherent", layer_columns.over_random(run))
    gap = combined(torch.sub, jackknifed(run, "cosine_within"), jackknifed(run, "cosine_between"))
    _judge_layers(outcome, "clusters", gap)
    _deepens(outcome, gap.value.numpy())
    outcome.tables["blocks"] = layer_columns.columns_with_errors(run, BLOCKS)
    labels = [str(names[label]) if label < len(names) else str(label) for label in of]
    outcome.draw(
        "gram",
        by_layer(len(grams), lambda layer: gram_by_label(grams[layer], labels, positions), grid=True),
        positions=len(positions),
        places=len(places),
        count=count,
    )


def _deepens(outcome: Outcome, gap: Floats) -> None:
    """Judge whether the gap grows by its steps: the layers depend on each other as places of a random walk do."""
    if not np.isfinite(gap).all():
        outcome.cannot_judge("deepens", "no label has two contexts")
    elif len(gap) < LEAST_LAYERS:
        outcome.cannot_judge("deepens", f"{len(gap)} layers show no trend; at least {LEAST_LAYERS} can")
    else:
        outcome.judge("deepens", Estimate.mean(np.diff(gap), "steps"), layers=len(gap))


SHOWN_LABELS, SHOWN_CONTEXTS = 8, 24  # of the Gram matrix: the most frequent labels, and contexts of each
LISTED_LABELS = 24  # of the table of labels and clusters


def cluster_shares(labels: np.ndarray, clusters: np.ndarray, listed: list[int]) -> Floats:
    """Compute the share of each label's contexts in each cluster, columns ordered to match the rows as they can."""
    count = int(clusters.max()) + 1
    counts = [np.bincount(clusters[labels == label], minlength=count) for label in listed]
    shares = np.array(counts, dtype=np.float64)
    shares /= shares.sum(axis=1, keepdims=True)
    rows, columns = linear_sum_assignment(-shares)
    matched = columns[np.argsort(rows)].tolist()
    rest = sorted(set(range(count)) - set(matched), key=lambda column: -shares[:, column].sum())
    return shares[:, [*matched, *rest]]


def _printed(field: str) -> str:
    """Write a quantity of Table 1, of the models that the paper has on OpenWebText."""
    return ", ".join(f"{model}: {getattr(row, field)[0]:g}" for model, row in published.AVERAGES.items())


COMPARED = {
    "silhouette": ("silhouette of the labels", ""),
    "cluster_ari": ("adjusted Rand index of k-means against labels", ""),
    "similarity_within": ("root mean square cosine within labels", _printed("within")),
    "similarity_between": ("root mean square cosine between labels", _printed("between")),
}
INCOHERENCES = {
    "incoherence_mean": ("root mean square cosine", _printed("incoherence")),
    "incoherence_random": ("that of random directions", "“random baseline is about 0.1”"),
}
"""Layer column → (how it is called, what the paper prints: mean |cosine|)."""


def _read_means(outcome: Outcome, run: Run, columns: dict[str, tuple[str, str]]) -> None:
    for name, (title, printed) in columns.items():
        mean, _ = data.layer_average(run, name)
        outcome.read(f"{title}, mean over layers", with_error(mean.value, mean.error), printed)


def _curves(run: Run, titles: dict[str, str]) -> dict[str, tuple[Floats, Floats]]:
    return {title: (data.value_of(run, name), data.error_of(run, name)) for name, title in titles.items()}


@declared("geometry/clusters")
def clusters(study: Study, outcome: Outcome) -> None:
    run, layers = study.run, data.layer_numbers(study.run)
    labels, of_layers = data.need(run, "context_label"), data.need(run, "context_cluster")
    named = data.provenance(run, "corpus", "labels") or []
    names = [str(named[i]) if i < len(named) else str(i) for i in range(int(labels.max()) + 1)]
    frequent = frequent_labels(labels, len(names))
    if len(frequent) < 2:
        raise UsageError("geometry/clusters needs two labels with two contexts each: use more --contexts")
    _read_means(outcome, run, COMPARED)
    outcome.read("labels with two contexts or more", str(len(frequent)), "4 documents of 32")
    outcome.judge("nearer", data.layer_estimates(run, "silhouette"))
    outcome.judge("clusters", data.layer_estimates(run, "cluster_ari"))
    _judge_layers(outcome, "separated", layer_columns.between_over_within(run))
    outcome.tables["layers"] = layer_columns.columns_with_errors(run, COMPARED)
    places, of = chosen_contexts(labels, SHOWN_LABELS, SHOWN_CONTEXTS, least=2)
    grams = normalised_gram(torch.from_numpy(data.need(run, "context_basis")[:, places])).numpy()
    shown = [names[label] for label in of]
    drawn = by_layer(len(grams), lambda layer: gram_by_label(grams[layer], shown), grid=True)
    outcome.draw("gram", drawn, places=len(places), of=len(set(of)))
    listed = frequent[:LISTED_LABELS]
    shares, rows = [cluster_shares(labels, each, listed) for each in of_layers], [names[i] for i in listed]
    outcome.draw("clusters", by_layer(len(shares), lambda layer: cluster_table(shares[layer], rows)))
    indices = {"silhouette": "silhouette of the labels", "cluster_ari": "k-means against labels"}
    outcome.draw("agreement", drawing.over_layers(layers, _curves(run, indices), "index"))
    similarity = {"similarity_within": "within a label", "similarity_between": "between labels"}
    outcome.draw(
        "similarity", drawing.over_layers(layers, _curves(run, similarity), "root mean square cosine")
    )


@declared("geometry/incoherence")
def incoherence(study: Study, outcome: Outcome) -> None:
    run = study.run
    titles = {name: title for name, (title, _) in INCOHERENCES.items()}
    _read_means(outcome, run, INCOHERENCES)
    ratio = layer_columns.over_random(run)
    outcome.read("over that of random directions", number(mean_of(estimates_of(ratio)).value))
    _judge_layers(outcome, "mean", ratio)
    outcome.tables["layers"] = layer_columns.columns_with_errors(run, INCOHERENCES)
    drawn = drawing.over_layers(data.layer_numbers(run), _curves(run, titles), "cosine", baseline=True)
    outcome.draw("incoherence", drawn)
