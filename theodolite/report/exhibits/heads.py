"""The exhibits of attention: all heads, one head, sinks, with their captions."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from theodolite.measure.head_roles import COMMON_ROLES
from theodolite.measure.publications import BAO, SONG, XIAO, ZHAI, ZHANG
from theodolite.passes.run import Run
from theodolite.report.data import blocks, column, heads_per_block
from theodolite.report.drawing import constituents as drawing
from theodolite.report.drawing import heads as maps
from theodolite.report.drawing import sinks
from theodolite.report.drawing.grammar import Sketched
from theodolite.report.exhibit import Choice, Option, SurveyExhibit
from theodolite.system.wording import head_name

OVERVIEW = ("entropy", *(role.column for role in COMMON_ROLES))


def _by_head(draw: Sketched[...], **more: str) -> Callable[[Run], Choice]:
    def choice(run: Run) -> Choice:
        places = itertools.product(range(blocks(run)), range(heads_per_block(run)))
        options = [Option(f"{layer},{head}", head_name(layer, head)) for layer, head in places]
        return Choice(
            "head", options, lambda key: draw.sketch(run, *map(int, key.split(",")), **more), "head"
        )

    return choice


def _by_measure(run: Run) -> Choice:
    options = [
        Option(m.name, m.title, m.group, f"{m.meaning} Source: {m.source}." if m.source else m.meaning)
        for m in maps.head_measures(run)
    ]
    shown = [name for name in OVERVIEW if column(run.heads, name) is not None]
    return Choice("measure", options, lambda key: maps.head_map.sketch(run, key), grid=shown)


_HEADS = [
    SurveyExhibit(
        "head-map",
        "heads",
        "Head map, by any measure",
        ("heads.trace",),
        lambda run: maps.head_map(run, maps.head_measures(run)[0].name),
        "One cell per head: hover for its other values, click to open it below.",
        "rows or single cells that stand out.",
        "given with each measure",
        choice=_by_measure,
        wide=True,
    ),
    SurveyExhibit(
        "entropy-by-position",
        "heads",
        "Entropy by position",
        ("arrays.entropy_by_position",),
        maps.entropy_by_position,
        "Attention entropy by query position, median over the heads of each layer; dashed: its maximum.",
        "curves that rise with the maximum (averaging) or stay flat (attention to a fixed number of keys).",
        f"{ZHAI}; {BAO}, section 5",
        "curves at 0: entropy collapse, which stalls training.",
    ),
    SurveyExhibit(
        "regime-plane",
        "heads",
        "Regimes predicted by the spectra",
        ("heads.xi_symmetric", "heads.eta_symmetric"),
        maps.regime_plane,
        "Every head by ξ (mean over scale of W_QK's spectrum) and η (scale over temperature); dotted: |ξη| = 2.",
        "heads far left or right: a concentrated spectrum, hence localized attention.",
        f"{BAO}, eq. 6, Fig. 2 and Lemma 2",
        "heads at the top: vanishing signal.",
    ),
    SurveyExhibit(
        "regime-plane-data",
        "heads",
        "Regimes predicted by the spectra, on this text",
        ("heads.xi_symmetric_data", "heads.eta_symmetric_data"),
        lambda run: maps.regime_plane(run, "_data"),
        "Every head by the ξ and η of W_QK Σ̂, Σ̂ the covariance of the tokens in this text; dotted: |ξη| = 2.",
        "heads that the covariance moves far from their position by the weights alone.",
        f"{BAO}, eq. 6, Fig. 2 and Lemma 2",
        "heads at the top: vanishing signal.",
    ),
]

_ONE_HEAD = [
    SurveyExhibit(
        "constituents",
        "head",
        "Constituents of its logits",
        ("constituents.share",),
        drawing.constituents,
        "Share of the logits' variance across keys, in per cent, by constituent of the query (rows) and the key "
        "(columns); blank below 0.5 %. Negative shares cancel others; hover for standard errors over contexts.",
        "one strong cell: pos · pos is a positional head, resid · resid matches tokens; a strong mean or bias row: "
        "every query prefers the same keys.",
        f"{SONG}, section 5.2, with constituents that sum to the logits",
        choice=_by_head(drawing.constituents),
    ),
    SurveyExhibit(
        "spectrum",
        "head",
        "Eigenvalues of W_QK",
        ("arrays.spectrum",),
        maps.spectrum,
        "The non-zero eigenvalues of W_QK (at relative distance 0) in the complex plane. Their “spectrum variance”, "
        "the spread along the real axis less that along the imaginary one, can be negative.",
        "a cloud right of 0: tokens attend to similar keys; left of 0: to dissimilar ones.",
        f"{BAO}, section 4",
        choice=_by_head(maps.spectrum),
    ),
    SurveyExhibit(
        "spectrum-data",
        "head",
        "Eigenvalues of W_QK Σ̂",
        ("arrays.spectrum_data",),
        lambda run: maps.spectrum(run, name="spectrum_data"),
        "The non-zero eigenvalues of W_QK Σ̂ in the complex plane, Σ̂ the covariance of this text's tokens.",
        "a few large eigenvalues: the directions of the data that this head reads.",
        f"{BAO}, section 4",
        choice=_by_head(maps.spectrum, name="spectrum_data"),
    ),
    SurveyExhibit(
        "propagation",
        "head",
        "Signal propagation by position",
        ("arrays.propagation_predicted",),
        maps.propagation,
        "ρ(θ): the probability that the token at relative position θ reaches the gradient, measured on the last query "
        "and predicted for a random walk.",
        "where the measured curve is high, and whether the prediction with Σ̂ agrees.",
        f"{BAO}, eq. 6, Figs. 2 and 7; the printed variance 2θ² + 7/12 should read 2θ² − 2θ + 7/12",
        "near 0 everywhere: vanishing signal.",
        _by_head(maps.propagation),
    ),
    SurveyExhibit(
        "head-entropy",
        "head",
        "Entropy by position, one head",
        ("arrays.entropy_by_position",),
        maps.head_entropy,
        "Mean attention entropy of the head by query position; dashed: its maximum, that of uniform attention.",
        "near the dashed line attention is uniform; near 0 it is on a single key.",
        ZHAI,
        choice=_by_head(maps.head_entropy),
    ),
]

HEAD_EXHIBITS = [
    *_HEADS,
    *_ONE_HEAD,
    SurveyExhibit(
        "sinks-by-position",
        "sinks",
        "Sinks by position",
        ("arrays.sink_by_position",),
        sinks.sinks_by_position,
        "Share of contexts in which a position is a sink of the layer's strongest head (bins show their maximum).",
        "a strong first column, and later columns that persist across layers.",
        f"{XIAO}; {ZHANG}, Fig. 2(a)",
    ),
]
