"""The context basis and the positional basis: the Gram matrix ordered by label (Figs. 2 and 15 to 17)."""

from __future__ import annotations

import numpy as np
import pandas as pd

from theodolite.estimates import Estimate, Estimates
from theodolite.report.data import Floats, evenly, need, provenance
from theodolite.report.exhibit import by_layer
from theodolite.report.measures import SONG
from theodolite.report.outcome import Outcome
from theodolite.system.wording import number
from theodolite_papers.drawing import labels as drawing
from theodolite_papers.experiment import Study, experiment
from theodolite_papers.hidden_geometry import criteria
from theodolite_papers.hidden_geometry.layer_columns import smooth_verdict
from theodolite_papers.hidden_geometry.random_rotations import AS_RANDOM, over_random

DOCUMENTS, CONTEXTS_PER_DOCUMENT = 4, 32
"""As in Fig. 2: four documents, 32 contexts each; fewer where the run has fewer."""

SHOWN_POSITIONS = 96
POSITIONS_PER_CONTEXT = 2  # at most, or the contexts would vanish beside them
LEAST_LAYERS = 5  # below that, the steps between them are too few to show a trend


def frequent_labels(labels: np.ndarray, most: int, least: int = 2) -> list[int]:
    """The labels that at least so many contexts have, the most frequent first."""
    present, counts = np.unique(labels[labels >= 0], return_counts=True)
    ordered = sorted(zip(-counts, present, strict=True))[:most]
    return [int(label) for count, label in ordered if -count >= least]


def chosen_contexts(
    labels: np.ndarray, most: int = DOCUMENTS, each: int = CONTEXTS_PER_DOCUMENT, least: int = 1
) -> tuple[list[int], list[int]]:
    """Kept contexts of the most frequent labels, so many of `each`, grouped: (places, label of each place)."""
    chosen = frequent_labels(labels, most, least)
    pairs = [(int(place), label) for label in chosen for place in np.flatnonzero(labels == label)[:each]]
    return [place for place, _ in pairs], [label for _, label in pairs]


def cosines(rows: Floats) -> Floats:
    """Of (…, n, d): the cosines of all pairs, (…, n, n); those of a row of zeros are 0."""
    norms = np.linalg.norm(rows.astype(np.float64), axis=-1, keepdims=True)
    unit = rows / np.where(norms > 0, norms, 1.0)
    gram: Floats = unit @ unit.swapaxes(-1, -2)
    return gram


def _blocks(grams: Floats, first: int, of: list[int]) -> pd.DataFrame:
    """Of every layer: mean cosine within and between labels, and mean |cosine| of positions and contexts."""
    label = np.array(of)
    pairs = np.triu(np.ones((len(of), len(of)), dtype=bool), 1)
    same = label[:, None] == label[None]
    inner = grams[:, first:, first:]
    return pd.DataFrame(
        {
            "layer": range(len(grams)),
            "within": inner[:, pairs & same].mean(axis=1) if (pairs & same).any() else np.nan,
            "between": inner[:, pairs & ~same].mean(axis=1),
            "position_context": np.abs(grams[:, :first, first:]).mean(axis=(1, 2)),
        }
    )


def gap_errors(grams: Floats, first: int, of: list[int]) -> Floats:
    """Standard errors of within − between at every layer, by leaving out one context at a time (jackknife).

    NaN where a context left out leaves no pair with one label.
    """
    label, inner = np.array(of), grams[:, first:, first:]
    same = label[:, None] == label[None]
    means = []
    for pairs in (same & ~np.eye(len(of), dtype=bool), ~same):
        rows, counts = (inner * pairs).sum(axis=2), pairs.sum(axis=1)
        pair_count = (counts.sum() - 2 * counts).astype(np.float64)
        means.append(
            (rows.sum(axis=1, keepdims=True) - 2 * rows) / np.where(pair_count > 0, pair_count, np.nan)
        )
    gaps = means[0] - means[1]
    errors: Floats = np.sqrt((len(of) - 1) * gaps.var(axis=1))
    return errors


@experiment(
    "geometry/figure2",
    "Gram matrix of positions and of contexts ordered by label",
    "Positions are smooth, positions and contexts near orthogonal, contexts of one document cluster (Fig. 2)",
    needs=("labels", "arrays.context_basis", "arrays.positional_basis", "layers.low_frequency_10"),
)
def figure_2(study: Study, outcome: Outcome) -> None:
    run = study.run
    names = provenance(run, "corpus", "labels") or []
    places, of = chosen_contexts(need(run, "context_label"))
    shown = min(SHOWN_POSITIONS, POSITIONS_PER_CONTEXT * len(places))
    positions = [1 + place for place in evenly(need(run, "positional_basis").shape[1] - 1, shown)]
    basis, contexts = need(run, "positional_basis"), need(run, "context_basis")
    grams = cosines(np.concatenate([basis[:, positions], contexts[:, places]], axis=1))
    blocks = _blocks(grams, len(positions), of)
    count, cosine = len(set(of)), {name: number(float(blocks[name].mean())) for name in blocks}
    outcome.read("labels and contexts", f"{count} labels, {len(places)} contexts", "4 documents of 32")
    outcome.read("mean cosine within a label", cosine["within"])
    outcome.read("mean cosine between labels", cosine["between"])
    outcome.read("mean |cosine| of positions and contexts", cosine["position_context"], "“values close to 0”")
    outcome.verdicts.append(smooth_verdict(study, run, "The position–position part is smooth (Fig. 2, i)"))
    outcome.claim(
        "The position–context part has values close to 0 (Fig. 2, ii)",
        "mean |cosine|, over that of random directions",
        over_random(study, "mean"),
        AS_RANDOM,
    )
    gap = (blocks["within"] - blocks["between"]).to_numpy()
    outcome.claim(
        "The context–context part shows strong cluster patterns (Fig. 2, iii)",
        "mean cosine within labels less that between",
        Estimates(gap, gap_errors(grams, len(positions), of), len(of), "contexts"),
        criteria.CLUSTERS,
    )
    _deepens(outcome, gap)
    outcome.tables["blocks"] = blocks
    labels = [str(names[label]) if label < len(names) else str(label) for label in of]
    outcome.figure(
        "gram",
        "Normalised Gram matrix of positions and contexts",
        by_layer(len(grams), lambda layer: drawing.gram_by_label(grams[layer], labels, positions), grid=True),
        f"Cosines between all pairs of {len(positions)} positions and {len(places)} contexts of {count} labels, "
        "grouped by label.",
        "smooth shading among positions (top left), nearly nothing between positions and contexts, and one strong "
        "block per label (bottom right).",
        f"{SONG}, Fig. 2; Figs. 15 to 17",
        wide=True,
    )


def _deepens(outcome: Outcome, gap: Floats) -> None:
    """Layers lean on each other, as the places of a random walk do: only its steps are independent."""
    claim = "The blocks become progressively clear with depth (appendix C.3)"
    if not np.isfinite(gap).all():
        outcome.cannot_test(claim, "no label has two contexts")
        return
    if len(gap) < LEAST_LAYERS:
        outcome.cannot_test(claim, f"{len(gap)} layers show no trend; at least {LEAST_LAYERS} can")
        return
    what = f"mean step of (within − between) from layer to layer, over {len(gap)} layers"
    outcome.claim(claim, what, Estimate.mean(np.diff(gap), "steps"), criteria.DEEPENS)
