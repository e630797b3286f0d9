"""Separation of contexts from one another and from positions: clusters by label, incoherence against its random "
"baseline."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
from scipy.optimize import linear_sum_assignment

from theodolite.errors import UsageError
from theodolite.judging import Criterion, Estimates, Verdict, judge
from theodolite.papers.experiment import Study, experiment
from theodolite.papers.hidden_geometry import criteria
from theodolite.papers.hidden_geometry.layer_columns import quotient
from theodolite.passes.run import Run
from theodolite.report import published
from theodolite.report.data import (
    Floats,
    error_of,
    layer_estimates,
    layer_numbers,
    mean_over_layers,
    need,
    provenance,
    value_of,
)
from theodolite.report.drawing import contexts as drawing
from theodolite.report.drawing import experiments as lines
from theodolite.report.drawing import theory
from theodolite.report.exhibit import Exhibit, by_layer
from theodolite.report.measures import SONG
from theodolite.report.outcome import Outcome, Reading
from theodolite.system.wording import number, with_error

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
AS_RANDOM = Criterion(
    "at most", 1.0, "no more alike than random directions of the same number and width (ours)"
)


def frequent_labels(labels: np.ndarray, most: int) -> list[int]:
    """The labels that at least two contexts have, the most frequent first."""
    present, counts = np.unique(labels[labels >= 0], return_counts=True)
    return [int(label) for count, label in sorted(zip(-counts, present, strict=True)) if count <= -2][:most]


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


def _gram(run: Run, names: list[str]) -> Exhibit:
    labels = need(run, "context_label")
    places, label_names = [], []
    for label in frequent_labels(labels, SHOWN_LABELS):
        contexts_of_label = np.flatnonzero(labels == label)[:SHOWN_CONTEXTS].tolist()
        places += contexts_of_label
        label_names += [names[label]] * len(contexts_of_label)
    contexts = need(run, "context_basis")[:, places].astype(np.float64)
    unit = contexts / np.maximum(np.linalg.norm(contexts, axis=-1, keepdims=True), np.finfo(np.float64).tiny)
    grams = unit @ unit.transpose(0, 2, 1)
    return Exhibit(
        "gram",
        "Cosines between contexts, by label",
        drawing.gram_by_label(grams[len(grams) // 2], label_names),
        f"All pairs of {len(places)} contexts of the {len(set(label_names))} most frequent labels, those of one "
        "label together.",
        "one strong block per label on the diagonal, little elsewhere.",
        f"{SONG}, Fig. 2, bottom right",
        choice=by_layer(
            len(grams), lambda layer: drawing.gram_by_label(grams[layer], label_names), grid=True
        ),
        wide=True,
    )


def _by_cluster(run: Run, names: list[str]) -> Exhibit:
    labels, clusters = need(run, "context_label"), need(run, "context_cluster")
    listed = frequent_labels(labels, LISTED_LABELS)
    shares = [cluster_shares(labels, of_layer, listed) for of_layer in clusters]
    listed_names = [names[label] for label in listed]
    return Exhibit(
        "clusters",
        "Which cluster the contexts of a label fall into",
        drawing.cluster_table(shares[len(shares) // 2], listed_names),
        "Each row a label, each column a cluster that k-means found among the directions of the context vectors, "
        "without knowing the labels; columns are ordered to match the rows as far as they do.",
        "a strong diagonal: the clusters are the labels.",
        f"{SONG}, claim 2 of section 2; k-means is ours",
        choice=by_layer(len(shares), lambda layer: drawing.cluster_table(shares[layer], listed_names)),
        wide=True,
    )


def _curves(run: Run, names: dict[str, str]) -> dict[str, tuple[Floats, Floats]]:
    return {title: (value_of(run, name), error_of(run, name)) for name, title in names.items()}


def _agreement(run: Run) -> list[Exhibit]:
    layers = layer_numbers(run)
    indices = _curves(
        run, {"silhouette": "silhouette of the labels", "cluster_ari": "k-means against labels"}
    )
    similarity = _curves(run, {"similarity_within": "within a label", "similarity_between": "between labels"})
    return [
        Exhibit(
            "agreement",
            "How well contexts cluster by label, layer by layer",
            lines.two_texts(layers, indices, "index"),
            "Mean silhouette of the labels by cosine distance (−1 to 1), and adjusted Rand index of k-means against "
            "the labels (0: as by chance, 1: the same groups), with standard errors.",
            "values well above 0 that rise with depth.",
            f"{SONG}, claim 2 of section 2; both indices are ours",
        ),
        Exhibit(
            "similarity",
            "Similarity within and between labels",
            lines.two_texts(layers, similarity, "mean |cosine|"),
            "Mean |cosine| of the context vectors of two contexts with the same label (solid) and with another "
            "(dashed), with standard errors.",
            "a wide gap in every layer.",
            f"{SONG}, Table 1",
        ),
    ]


def _cluster_verdicts(run: Run) -> list[Verdict]:
    pair = ("similarity_within", "similarity_between")
    gap, gap_error = quotient(*(find(run, name) for name in pair for find in (value_of, error_of)))
    return [
        judge(
            "Contexts of one document or topic are nearer to each other than to others (claim 2, section 2)",
            "silhouette of the labels",
            layer_estimates(run, "silhouette"),
            OWN_LABEL,
        ),
        judge(
            "The context basis has strong cluster patterns (claim 2, section 2)",
            "adjusted Rand index of k-means against the labels",
            layer_estimates(run, "cluster_ari"),
            RECOVERED,
        ),
        judge(
            "Inter-cluster similarity is far below intra-cluster similarity (Table 1), layer by layer",
            "similarity within over between labels",
            Estimates(gap, gap_error),
            criteria.SEPARATION,
        ),
    ]


COMPARED = {
    "silhouette": ("silhouette of the labels", ""),
    "cluster_ari": ("adjusted Rand index of k-means against labels", ""),
    "similarity_within": ("similarity within labels", "within"),
    "similarity_between": ("similarity between labels", "between"),
}
"""Layer column → (how it is called, its field of a published row)."""


def _reading_against_paper(run: Run, name: str, title: str, part: str) -> Reading:
    """The mean over layers, next to that of the models that the paper has on OpenWebText."""
    rows = published.AVERAGES.items() if part else ()
    printed = ", ".join(f"{model}: {getattr(row, part)[0]:g}" for model, row in rows)
    mean, _, error = mean_over_layers(value_of(run, name), error_of(run, name))
    return Reading(f"{title}, mean over layers", with_error(mean, error), printed)


@experiment(
    "geometry/clusters",
    "Do contexts fall into clusters by label?",
    "The context basis has strong cluster patterns corresponding to documents and topics (section 2, claim 2)",
    needs=("labels", "arrays.context_basis", "arrays.context_cluster", "layers.silhouette"),
)
def clusters(study: Study, outcome: Outcome) -> None:
    run = study.run
    numbered = need(run, "context_label")
    named = provenance(run, "corpus", "labels") or []
    names = [str(named[i]) if i < len(named) else str(i) for i in range(int(numbered.max()) + 1)]
    if not frequent_labels(numbered, 2)[1:]:
        raise UsageError("geometry/clusters needs two labels with two contexts each: use more --contexts")
    readings = [_reading_against_paper(run, name, *labels) for name, labels in COMPARED.items()]
    counted = len(frequent_labels(numbered, len(names)))
    readings.append(Reading("labels with two contexts or more", str(counted), "4 documents of 32"))
    figures = [_gram(run, names), _by_cluster(run, names), *_agreement(run)]
    outcome.readings += readings
    outcome.verdicts += _cluster_verdicts(run)
    outcome.tables |= {"layers": _columns(run, tuple(COMPARED))}
    outcome.exhibits += figures


def _columns(run: Run, names: tuple[str, ...]) -> pd.DataFrame:
    return pd.DataFrame(
        {"layer": range(len(run.layers))}
        | {f"{name}{end}": value_of(run, f"{name}{end}") for name in names for end in ("", "_se")}
    )


@experiment(
    "geometry/incoherence",
    "Incoherence of positions and contexts against random directions",
    "Positional basis and context basis are nearly orthogonal; a random baseline is about 0.1 (sections 2 and 5)",
    needs=("layers.incoherence_mean", "layers.incoherence_max", "layers.incoherence_max_random"),
)
def incoherence(study: Study, outcome: Outcome) -> None:
    run = study.run
    names = ("incoherence_mean", "incoherence_random", "incoherence_max", "incoherence_max_random")
    titles = ("mean", "mean of random directions", "maximum", "maximum of random directions")
    figure = Exhibit(
        "incoherence",
        "|Cosine| of positions and contexts, layer by layer",
        theory.layer_lines(
            layer_numbers(run), _curves(run, dict(zip(names, titles, strict=True))), "|cosine|"
        ),
        "Mean and maximum over all pairs of a position and a context, with standard errors; dotted: what as many "
        "random directions of the same width have.",
        "solid lines near their dotted ones: position and context are as unrelated as random directions.",
        f"{SONG}, section 5 and Table 1",
        wide=True,
    )
    values = {name: value_of(run, name) for name in names}
    ratio = values["incoherence_max"] / values["incoherence_max_random"]
    verdicts = [
        judge(
            "Positional basis and context basis are nearly orthogonal (claim 3, section 2)",
            "mean |cosine|",
            Estimates(values["incoherence_mean"], error_of(run, "incoherence_mean")),
            criteria.incoherent(run.provenance["model"]["width"]),
        ),
        judge(
            "The largest |cosine| of a position and a context is typically small (section 5)",
            "maximum over that of random directions",
            Estimates(ratio, error_of(run, "incoherence_max") / values["incoherence_max_random"]),
            AS_RANDOM,
        ),
    ]
    parts = ("incoherence", "", "", "")
    readings = [
        _reading_against_paper(run, name, f"|cosine|, {title}", part)
        for name, title, part in zip(names, titles, parts, strict=True)
    ]
    readings[1] = replace(readings[1], paper="“random baseline is about 0.1”")
    over = values["incoherence_mean"] / values["incoherence_random"]
    readings.append(Reading("mean over that of random directions", number(float(np.nanmean(over)))))
    outcome.readings += readings
    outcome.verdicts += verdicts
    outcome.tables |= {"layers": _columns(run, names)}
    outcome.exhibits += [figure]
