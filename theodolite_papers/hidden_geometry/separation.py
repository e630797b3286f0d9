"""Contexts apart from one another and from positions: clusters by label, incoherence against random directions.

Tables of their own (`geometry/clusters`, `geometry/incoherence`), beside Table 1 and Fig. 2.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from scipy.optimize import linear_sum_assignment

from theodolite import Run
from theodolite.errors import UsageError
from theodolite.judging import Criterion
from theodolite.report import published
from theodolite.report.data import (
    Floats,
    error_of,
    layer_average,
    layer_estimates,
    layer_numbers,
    need,
    provenance,
    value_of,
)
from theodolite.report.exhibit import by_layer
from theodolite.report.measures import SONG
from theodolite.report.outcome import Outcome
from theodolite.system.wording import number, with_error
from theodolite_papers.drawing import experiments as lines
from theodolite_papers.drawing import labels as drawing
from theodolite_papers.drawing import theory
from theodolite_papers.experiment import Study, experiment
from theodolite_papers.hidden_geometry import criteria
from theodolite_papers.hidden_geometry.context_basis import chosen_contexts, cosines, frequent_labels
from theodolite_papers.hidden_geometry.layer_columns import columns_with_errors, quotient
from theodolite_papers.hidden_geometry.random_rotations import AS_RANDOM, chance_cosines, over_random

SHOWN_LABELS, SHOWN_CONTEXTS = 8, 24
"""Of the Gram matrix: the most frequent labels, and contexts of each."""

LISTED_LABELS = 24
"""Of the table of labels and clusters."""

OWN_LABEL = Criterion(
    "more than", 0.0, "above 0 a context is nearer to its own label than to the next one (ours)"
)
RECOVERED = Criterion(
    "at least", 0.5, "“strong” read as: half of the way from chance to the labels themselves (ours)"
)


def cluster_shares(labels: np.ndarray, clusters: np.ndarray, listed: list[int]) -> Floats:
    """Share of each listed label's contexts in each cluster, columns ordered to match the rows as they can."""
    count = int(clusters.max()) + 1
    shares = np.array(
        [np.bincount(clusters[labels == label], minlength=count) for label in listed], dtype=np.float64
    )
    shares /= shares.sum(axis=1, keepdims=True)
    rows, columns = linear_sum_assignment(-shares)
    matched = columns[np.argsort(rows)].tolist()
    rest = sorted(set(range(count)) - set(matched), key=lambda column: -shares[:, column].sum())
    return shares[:, [*matched, *rest]]


def _printed(field: str) -> str:
    """A quantity of Table 1, of the models that the paper has on OpenWebText."""
    return ", ".join(f"{model}: {getattr(row, field)[0]:g}" for model, row in published.AVERAGES.items())


COMPARED = {
    "silhouette": ("silhouette of the labels", ""),
    "cluster_ari": ("adjusted Rand index of k-means against labels", ""),
    "similarity_within": ("similarity within labels", _printed("within")),
    "similarity_between": ("similarity between labels", _printed("between")),
}
INCOHERENCES = {
    "incoherence_mean": ("mean", _printed("incoherence")),
    "incoherence_random": ("mean of random directions", "“random baseline is about 0.1”"),
    "incoherence_max": ("maximum", ""),
    "incoherence_max_random": ("maximum of random directions", ""),
}
"""Layer column → (how it is called, what the paper prints)."""


def _read_mean(outcome: Outcome, run: Run, name: str, title: str, printed: str) -> None:
    mean, _ = layer_average(run, name)
    outcome.read(f"{title}, mean over layers", with_error(mean.value, mean.error), printed)


def _curves(run: Run, titles: dict[str, str]) -> dict[str, tuple[Floats, Floats]]:
    return {title: (value_of(run, name), error_of(run, name)) for name, title in titles.items()}


@experiment(
    "geometry/clusters",
    "Do contexts fall into clusters by label?",
    "The context basis has strong cluster patterns corresponding to documents and topics (section 2, claim 2)",
    needs=("labels", "arrays.context_basis", "arrays.context_cluster", "layers.silhouette"),
)
def clusters(study: Study, outcome: Outcome) -> None:
    run, layers = study.run, layer_numbers(study.run)
    labels, of_layers = need(run, "context_label"), need(run, "context_cluster")
    named = provenance(run, "corpus", "labels") or []
    names = [str(named[i]) if i < len(named) else str(i) for i in range(int(labels.max()) + 1)]
    frequent = frequent_labels(labels, len(names))
    if len(frequent) < 2:
        raise UsageError("geometry/clusters needs two labels with two contexts each: use more --contexts")
    for name, (title, printed) in COMPARED.items():
        _read_mean(outcome, run, name, title, printed)
    outcome.read("labels with two contexts or more", str(len(frequent)), "4 documents of 32")
    outcome.claim(
        "Contexts of one document or topic are nearer to each other than to others (claim 2, section 2)",
        "silhouette of the labels",
        layer_estimates(run, "silhouette"),
        OWN_LABEL,
    )
    outcome.claim(
        "The context basis has strong cluster patterns (claim 2, section 2)",
        "adjusted Rand index of k-means against the labels",
        layer_estimates(run, "cluster_ari"),
        RECOVERED,
    )
    pair = ("similarity_within", "similarity_between")
    ratio, errors = quotient(*(find(run, name) for name in pair for find in (value_of, error_of)))
    outcome.claim(
        "Inter-cluster similarity is far below intra-cluster similarity (Table 1), layer by layer",
        "similarity within over between labels",
        replace(layer_estimates(run, pair[0]), values=ratio, errors=errors),
        criteria.SEPARATION,
    )
    outcome.tables["layers"] = columns_with_errors(run, COMPARED)
    places, of = chosen_contexts(labels, SHOWN_LABELS, SHOWN_CONTEXTS, least=2)
    grams, shown = cosines(need(run, "context_basis")[:, places]), [names[label] for label in of]
    outcome.figure(
        "gram",
        "Cosines between contexts, by label",
        by_layer(len(grams), lambda layer: drawing.gram_by_label(grams[layer], shown), grid=True),
        f"All pairs of {len(places)} contexts of the {len(set(of))} most frequent labels, those of one "
        "label together.",
        "one strong block per label on the diagonal, little elsewhere.",
        f"{SONG}, Fig. 2, bottom right",
        wide=True,
    )
    listed = frequent[:LISTED_LABELS]
    shares, rows = [cluster_shares(labels, each, listed) for each in of_layers], [names[i] for i in listed]
    outcome.figure(
        "clusters",
        "Which cluster the contexts of a label fall into",
        by_layer(len(shares), lambda layer: drawing.cluster_table(shares[layer], rows)),
        "Each row a label, each column a cluster that k-means found among the directions of the context vectors, "
        "without knowing the labels; columns are ordered to match the rows as far as they do.",
        "a strong diagonal: the clusters are the labels.",
        f"{SONG}, claim 2 of section 2; k-means is ours",
        wide=True,
    )
    indices = {"silhouette": "silhouette of the labels", "cluster_ari": "k-means against labels"}
    outcome.figure(
        "agreement",
        "How well contexts cluster by label, layer by layer",
        lines.two_texts(layers, _curves(run, indices), "index"),
        "Mean silhouette of the labels by cosine distance (−1 to 1), and adjusted Rand index of k-means against "
        "the labels (0: as by chance, 1: the same groups), with standard errors.",
        "values well above 0 that rise with depth.",
        f"{SONG}, claim 2 of section 2; both indices are ours",
    )
    similarity = {"similarity_within": "within a label", "similarity_between": "between labels"}
    outcome.figure(
        "similarity",
        "Similarity within and between labels",
        lines.two_texts(layers, _curves(run, similarity), "mean |cosine|"),
        "Mean |cosine| of the context vectors of two contexts with the same label (solid) and with another "
        "(dashed), with standard errors.",
        "a wide gap in every layer.",
        f"{SONG}, Table 1",
    )


@experiment(
    "geometry/incoherence",
    "Incoherence of positions and contexts against random directions",
    "Positional basis and context basis are nearly orthogonal; a random baseline is about 0.1 (sections 2 and 5)",
    needs=("layers.incoherence_mean", "layers.incoherence_max", "layers.incoherence_max_random"),
)
def incoherence(study: Study, outcome: Outcome) -> None:
    run = study.run
    titles = {name: title for name, (title, _) in INCOHERENCES.items()}
    for name, (title, printed) in INCOHERENCES.items():
        _read_mean(outcome, run, name, f"|cosine|, {title}", printed)
    over = value_of(run, "incoherence_mean") / value_of(run, "incoherence_random")
    outcome.read("mean over that of random directions", number(float(np.nanmean(over))))
    outcome.claim(
        "Positional basis and context basis are nearly orthogonal (claim 3, section 2)",
        "mean |cosine|, over that of random directions",
        over_random(study, "mean"),
        AS_RANDOM,
    )
    outcome.claim(
        "The largest |cosine| of a position and a context is typically small (section 5)",
        "largest |cosine|, over that of random directions",
        over_random(study, "largest"),
        AS_RANDOM,
    )
    chance = chance_cosines(study)
    outcome.tables["layers"] = columns_with_errors(run, INCOHERENCES).assign(
        **{f"{name}_rotated_limit": chance.limits(name) for name in ("mean", "largest")}
    )
    outcome.figure(
        "incoherence",
        "|Cosine| of positions and contexts, layer by layer",
        theory.layer_lines(layer_numbers(run), _curves(run, titles), "|cosine|"),
        "Mean and maximum over all pairs of a position and a context, with standard errors; dotted: what as many "
        "random directions of the same width have.",
        "solid lines near their dotted ones: position and context are as unrelated as random directions.",
        f"{SONG}, section 5 and Table 1",
        wide=True,
    )
