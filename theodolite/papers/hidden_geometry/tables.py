"""Tables 1 to 3: averages over layers, robustness on another text, and the smoothness that the QK matrix inherits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from theodolite.comparison.stream import overlap
from theodolite.judging import UNTESTABLE, Verdict, judge, judge_layers
from theodolite.measure.geometry import CUTOFFS
from theodolite.papers.experiment import Experiment
from theodolite.papers.hidden_geometry import criteria
from theodolite.papers.hidden_geometry.layer_columns import closest_model, quotient, smooth_verdict
from theodolite.papers.hidden_geometry.low_rank import found_ranks, low_rank_verdict, no_room
from theodolite.passes.run import Run
from theodolite.report import published
from theodolite.report.data import Floats, column, error_of, mean_over_layers, need, need_column, value_of
from theodolite.report.drawing import experiments as drawing
from theodolite.report.exhibit import exhibit
from theodolite.report.measures import SONG
from theodolite.report.outcome import Outcome, Reading
from theodolite.system.wording import MISSING, number, percent, visible, with_error

if TYPE_CHECKING:
    from theodolite.papers.experiment import Study

# Quantity of Table 1 → (column of the layers table, field of a published row).
QUANTITIES = {
    "rank estimate": ("rank", "rank"),
    "relative norm": ("relative_norm", "relative_norm"),
    "inter-cluster similarity": ("similarity_between", "between"),
    "intra-cluster similarity": ("similarity_within", "within"),
    "incoherence": ("incoherence_mean", "incoherence"),
}
ROWS_OF_TABLE_3 = {
    "PPᵀ": ("", published.LOW_FREQUENCY),
    "PWPᵀ": ("pwp_", published.LOW_FREQUENCY_PWP),
    "QK matrix": ("qk_", published.LOW_FREQUENCY_QK),
}


def _table_1(study: Study) -> Outcome:
    run, this_run = study.run, "this run"
    rows: dict[str, dict[str, tuple[float, float]]] = {this_run: {}}
    readings, errors = [], {}
    model = closest_model(run)
    for quantity, (name, field) in QUANTITIES.items():
        mean, deviation, error = mean_over_layers(value_of(run, name), error_of(run, name))
        errors[quantity] = error
        if math.isfinite(mean):
            rows[this_run][quantity] = (mean, deviation)
        paper = getattr(published.AVERAGES[model], field)
        decimals = 3 if field == "incoherence" else 2  # as printed
        readings.append(
            Reading(
                f"{quantity}, mean (sd) over layers",
                f"{with_error(mean, error)} ({number(deviation)})" if math.isfinite(mean) else MISSING,
                f"{model}: {paper[0]:.{decimals}f} ({paper[1]:.2f})",
            )
        )
    for row in published.TABLE_1:
        rows[f"{row.model} · {row.text}"] = {
            quantity: getattr(row, field)
            for quantity, (_, field) in QUANTITIES.items()
            if math.isfinite(getattr(row, field)[0])
        }
    table = pd.DataFrame(
        [
            {"row": name}
            | {
                f"{q}{s}": cells.get(q, (math.nan,) * 2)[i]
                for q in QUANTITIES
                for i, s in enumerate(("", " sd"))
            }
            | {f"{q} se": errors[q] if name == this_run else math.nan for q in QUANTITIES}
            for name, cells in rows.items()
        ]
    )
    figure = exhibit(
        "table1",
        "Averages over layers, against the published ones",
        drawing.averages(rows, list(QUANTITIES)),
        "Mean over layers 0…L of each measure, with a bar of one standard deviation over layers; the top row is "
        "this run, the others are Table 1.",
        "a low rank, a relative norm well above 0.1, intra above inter similarity, and incoherence near 0.",
        f"{SONG}, Table 1",
        wide=True,
    )
    return Outcome(readings, _verdicts_1(run), {"averages": table}, [figure])


def _verdicts_1(run: Run) -> list[Verdict]:
    width, layers = need(run, "positional_basis").shape[2], len(run.layers)
    return [
        low_rank_verdict(run, "The positional basis is a low-rank component (Table 1)", every=False),
        judge_layers(
            "The positional basis is a significant component (Table 1, section 3.1)",
            "relative norm",
            value_of(run, "relative_norm"),
            criteria.SIGNIFICANT,
            error_of(run, "relative_norm"),
        ),
        _separation(run),
        judge(
            "Position and context are incoherent (Table 1, section 5)",
            f"mean |cosine| over {layers} layers",
            *_judged(run, "incoherence_mean", criteria.incoherent(width)),
        ),
    ]


def _judged(run: Run, name: str, criterion: Any) -> tuple[float, Any, float]:
    mean, _, error = mean_over_layers(value_of(run, name), error_of(run, name))
    return mean, criterion, error


def _separation(run: Run) -> Verdict:
    claim = "Inter-cluster similarity is far below intra-cluster similarity (Table 1)"
    within, _, error_within = mean_over_layers(
        value_of(run, "similarity_within"), error_of(run, "similarity_within")
    )
    between, _, error_between = mean_over_layers(
        value_of(run, "similarity_between"), error_of(run, "similarity_between")
    )
    if not math.isfinite(within * between):
        return Verdict(claim, UNTESTABLE, "the text has no labels, or no two contexts with the same one")
    numbers = (np.asarray(x, dtype=np.float64) for x in (within, error_within, between, error_between))
    ratio, error = map(float, quotient(*numbers))
    what = f"intra {within:.3f} over inter {between:.3f}, means over {len(run.layers)} layers"
    return judge(claim, what, ratio, criteria.SEPARATION, error)


def _table_2(study: Study) -> Outcome:
    first, second = study.run, study.other_run()
    names = [visible(Path(run.provenance["corpus"]["name"]).name, 60) for run in (first, second)]
    if names[0] == names[1]:
        names = [names[0], f"{names[1]} (second text)"]
    layers = need_column(first.layers, "layer")
    shared, chance = overlap(first, second)
    table = pd.DataFrame({"layer": layers.astype(int)})
    for run, title in zip((first, second), ("", "other_"), strict=True):
        for name in ("rank", "low_frequency_10"):
            table[title + name] = value_of(run, name)
            table[f"{title}{name}_se"] = error_of(run, name)
    table["overlap"] = shared
    readings = [
        Reading(
            f"{what} on {name}",
            with_error(mean, error) if measure == "rank" else percent(mean),
            paper,
        )
        for run, name, papers in zip((first, second), names, _papers_2(study), strict=True)
        for (what, measure), paper in zip(
            (("mean rank", "rank"), ("share of energy at K = 10", "low_frequency_10")), papers, strict=True
        )
        for mean, _, error in [mean_over_layers(value_of(run, measure), error_of(run, measure))]
    ]
    readings.append(
        Reading(
            "overlap of the leading positional directions, as many as the rank",
            f"{percent(float(np.nanmean(shared)))} (random directions: {percent(chance)})",
        )
    )
    figures = [
        _two_texts(first, second, names, "rank", "dimensions", "Rank of the positional basis"),
        _two_texts(first, second, names, "low_frequency_10", "share of energy", "Smoothness"),
    ]
    runs = {} if second is first else {"other": second.provenance}
    return Outcome(readings, _verdicts_2(first, second), {"robustness": table}, figures, runs)


def _papers_2(study: Study) -> list[list[str]]:
    model = closest_model(study.run)
    row = next((row for row in published.TABLE_2 if row.model == model), published.TABLE_2[1])
    trained = percent(published.LOW_FREQUENCY[10]) + " (GPT-2)"
    return [
        [f"{row.model}: {row.trained_rank:g}", trained],
        [f"{row.model} on {row.text}: {row.rank[0]:g}", percent(row.low_frequency)],
    ]


def _two_texts(first: Run, second: Run, names: list[str], name: str, y: str, title: str) -> Any:
    curves = {
        title: (value_of(run, name), error_of(run, name))
        for run, title in zip((first, second), names, strict=True)
    }
    return exhibit(
        name.replace("_", "-"),
        f"{title} on both texts",
        drawing.two_texts(need_column(first.layers, "layer"), curves, y, share=name != "rank"),
        "The measure at every layer, on the text of the run and on the other text; bars are standard errors.",
        "two curves that stay close.",
        f"{SONG}, Table 2",
    )


def _verdicts_2(first: Run, second: Run) -> list[Verdict]:
    claim = "The positional basis keeps its low rank on text unlike the training data (Table 2, section 4.1)"
    if first is second:
        return [
            Verdict(claim, UNTESTABLE, "the run itself is on random tokens: pass another text with --other")
        ]
    missing = [int(np.isnan(found_ranks(run)).sum()) for run in (first, second)]
    if why := no_room(first):
        rank = Verdict(claim, UNTESTABLE, why)
    elif any(missing):
        why = f"no rank found in {missing[0]} layers here and {missing[1]} on the other text, of {len(first.layers)}"
        rank = Verdict(claim, UNTESTABLE, why)
    else:
        ranks = [mean_over_layers(value_of(run, "rank"), error_of(run, "rank")) for run in (first, second)]
        change, error = abs(ranks[1][0] - ranks[0][0]), math.hypot(ranks[0][2], ranks[1][2])
        what = f"mean rank {ranks[0][0]:.3g} here, {ranks[1][0]:.3g} on the other text; change"
        rank = judge(claim, what, change, criteria.RANK_CHANGE, error)
    smooth = "The positional basis stays smooth on text unlike the training data (Table 2, section 4.1)"
    return [rank, smooth_verdict(second, smooth)]


def _table_3(study: Study) -> Outcome:
    run = study.run
    shares_here: dict[str, dict[int, float]] = {}
    rows: list[dict[str, Any]] = []
    readings, verdicts = (
        [],
        [
            smooth_verdict(
                run, "The Gram matrix of positions is concentrated in low frequencies (section 3.2, Table 3)"
            )
        ],
    )
    for name, (prefix, paper) in ROWS_OF_TABLE_3.items():
        frame = run.heads if prefix else run.layers
        columns = {cutoff: column(frame, f"{prefix}low_frequency_{cutoff}") for cutoff in CUTOFFS}
        values = {
            cutoff: float(np.nanmean(shares)) for cutoff, shares in columns.items() if shares is not None
        }
        shares_here[name] = values
        rows.append(
            {"row": name, "where": "this run"} | {f"K = {k}": values.get(k, math.nan) for k in CUTOFFS}
        )
        rows.append({"row": name, "where": "GPT-2, Table 3"} | {f"K = {k}": paper[k] for k in CUTOFFS})
        shown = ", ".join(percent(values[k]) for k in CUTOFFS if k in values) or "missing in this run"
        over = "heads" if prefix else "layers"
        readings.append(
            Reading(
                f"{name}, K = 1, 3, 5, 10, mean over {over}",
                shown,
                "GPT-2: " + ", ".join(percent(paper[k]) for k in CUTOFFS),
            )
        )
        if prefix:
            verdicts.append(_inherited(run, name, columns[10]))
    figure = exhibit(
        "table3",
        "Smoothness, from positions to logits",
        drawing.shares_by_cutoff(shares_here, {name: paper for name, (_, paper) in ROWS_OF_TABLE_3.items()}),
        "Share of the energy of the two-dimensional cosine transform in its K × K lowest frequencies: of the Gram "
        "matrix of normalised positions (mean over layers), and of PWPᵀ and the QK matrix (means over heads).",
        "shares near 1 at K = 10 in all rows.",
        f"{SONG}, Table 3",
        wide=True,
    )
    return Outcome(readings, verdicts, {"shares": pd.DataFrame(rows)}, [figure])


def _inherited(run: Run, name: str, shares: Floats | None) -> Verdict:
    claim = f"{name} inherits the smoothness of the positional basis (section 4.2, Table 3)"
    if shares is None:
        return Verdict(
            claim, UNTESTABLE, f"missing in this run: survey again for the low-frequency shares of {name}"
        )
    finite = shares[np.isfinite(shares)]
    # Heads are not drawn independently: their spread is shown, and no standard error is claimed.
    what = f"share of energy at K = 10, mean over {len(finite)} heads (sd {finite.std():.2g})"
    return judge(claim, what, float(finite.mean()), criteria.SMOOTH)


_NEEDS = ("layers.rank", "layers.low_frequency_10", "arrays.positional_basis")

TABLES = [
    Experiment(
        "geometry/table1",
        "Rank, relative norm, similarity and incoherence, averaged over layers",
        "The positional basis is a low-rank and significant component, inter similarity is far below intra "
        "similarity, and the two bases are incoherent (Table 1)",
        _NEEDS,
        _table_1,
    ),
    Experiment(
        "geometry/table2",
        "Robustness of the positional basis: rank and smoothness on another text",
        "Similar geometric structures are found on samples unlike the training data, even on random tokens (Table 2)",
        (*_NEEDS, "model"),
        _table_2,
        options=("other",),
    ),
    Experiment(
        "geometry/table3",
        "Low-frequency shares of PPᵀ, PWPᵀ and the QK matrix",
        "PWPᵀ and the QK matrix inherit the smoothness of the positional basis (Table 3)",
        ("layers.low_frequency_10",),
        _table_3,
    ),
]
