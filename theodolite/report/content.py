"""Contents of the page besides its figures: sink texts, tables, provenance; as plain values."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from theodolite.corpus.images import grid_described
from theodolite.measure.catalogue import declared
from theodolite.measure.column import SPECTRUM, SPECTRUM_DATA, Column
from theodolite.measure.head_roles import (
    UNIFORM_ATTENTION,
)
from theodolite.passes.run import Run
from theodolite.report.data import (
    AT_FLOOR,
    at_floor,
    column,
    columns_of,
    entropy_share,
    grid_of,
    layer_mean,
    massive_tokens,
    roles_of_heads,
)
from theodolite.report.drawing.heads import head_measures
from theodolite.report.findings import measured_regimes
from theodolite.system.wording import (
    MISSING,
    gguf_described,
    head_name,
    listed,
    number,
    percent,
    shown_token,
    spans,
    tokens_of,
    visible,
    with_error,
)

EXAMPLE_CONTEXTS = 8
EXAMPLE_TOKENS = 512
FAINT = 0.02  # attention below which a token gets no colour
SINK_TOKENS = 20
OUTLIER_ROWS = 30
MASSIVE_ROWS = 30
LONG_VALUE = 200
HEAD_SINKS = 4
TEXT, ROLES_CARD, SINKS_CARD = (
    "Measured on the text",
    "Roles and their scores",
    "Its sinks, in how many contexts",
)
OVER_LAYERS = ("rank", "relative_norm", "pp_low_frequency_10", "incoherence_mean", "similarity_within")
OVER_HEADS = ("entropy", "entropy_share", "propagation", "sink_first", "sink_later")
STRONGEST = ("previous_token", "induction", "same_token")
CARDS = {SPECTRUM: "From W_QK", SPECTRUM_DATA: "From W_QK Σ̂"}
"""Group of columns → the card of a head that has them; all others are on `TEXT`'s."""


@dataclass(frozen=True)
class Cell:
    """A table cell: what is shown, the number that sorting goes by (None: sort by what is shown), and its error."""

    shown: str
    value: float | None = None
    error: float | None = None


@dataclass(frozen=True)
class Table:
    """A table: column headings, each with a longer explanation (possibly empty), and rows of cells.

    `ids`: by which the rows are linked, if they are. `picks`: headings by whose words the rows may be filtered.
    """

    headings: list[tuple[str, str]]
    rows: list[list[Cell]]
    ids: Sequence[str] = ()
    picks: Sequence[str] = ()

    @property
    def are_words(self) -> list[bool]:
        """True for each column that holds words, which are aligned on the left."""
        columns = zip(*self.rows, strict=True)
        return [{cell.value is None for cell in of if cell.shown != MISSING} == {True} for of in columns]


def flowing(token: object) -> str:
    """Show a token inside running text: line ends are marked and kept, other control characters become marks."""
    return "\n".join(visible(line) for line in str(token).split("\n")).replace("\n", "↵\n")


def sink_texts(run: Run) -> list[list[dict[str, Any]]]:
    """Return the example contexts, each a list of tokens in order; empty where the run has none.

    The line ends of a token stand apart as its `breaks`, so that its mark does not reach into the next line.
    """
    if run.examples.empty or grid_of(run):
        return []  # of images, pictures are shown
    texts = []
    ordered = run.examples.sort_values(["context", "position"], kind="stable")
    for _, rows in list(ordered.groupby("context", sort=True))[:EXAMPLE_CONTEXTS]:
        texts.append([_token(row) for row in rows.head(EXAMPLE_TOKENS).to_dict("records")])
    return texts


def _token(row: dict[Any, Any]) -> dict[str, Any]:
    received = float(row["received"]) if row["received"] is not None else math.nan
    has_attention = math.isfinite(received)
    hint = f"position {int(row['position'])}"
    if has_attention and not (pd.isna(row["layer"]) or pd.isna(row["head"])):
        hint += f" · receives {received:.2f} from {head_name(int(row['layer']), int(row['head']))}"
    shade = round(min(max(received, 0.0), 1.0), 2) if has_attention and received >= FAINT else None
    sink = bool(row["sink"]) if not pd.isna(row["sink"]) else False
    text = flowing(row["token"])
    line = text.rstrip("\n")
    hint += " · sink" if sink else ""
    return {"text": line, "breaks": text[len(line) :], "received": shade, "sink": sink, "hint": hint}


def sink_tokens(run: Run) -> Table | None:
    """Tabulate the tokens most often sinks: contexts summed over heads, how many heads, the strongest one."""
    if run.sinks.empty:
        return None
    rows = []
    for (token, first), group in run.sinks.groupby(["token", "first"], sort=True):
        best = group.sort_values(["contexts", "layer", "head"], ascending=[False, True, True]).iloc[0]
        contexts, share = float(group["contexts"].sum()), float(best["share"])
        position = float(
            np.average(group["position"].to_numpy(float), weights=group["contexts"].to_numpy(float))
        )
        cells = [
            Cell(shown_token(token)),
            Cell("first" if first else f"later (mean {number(position, 3)})", position),
            Cell(number(contexts), contexts),
            Cell(str(len(group)), float(len(group))),
            Cell(f"{head_name(int(best['layer']), int(best['head']))} ({percent(share)})", share),
        ]
        rows.append((-contexts, str(token), bool(first), cells))
    rows.sort(key=lambda row: row[:3])
    names = [
        ("token", "spaces are shown as ␣, line breaks as ↵"),
        ("position", "its mean position in the contexts where it is a sink"),
        ("times a sink", "head × context pairs"),
        ("heads", "heads for which it is a sink"),
        ("strongest head", "the head for which it is a sink in most contexts, and the share of contexts"),
    ]
    shown = [row[3] for row in rows[:SINK_TOKENS]]
    return Table(names, shown, [f"token-{number}" for number in range(len(shown))])


def frame_table(frame: pd.DataFrame | None, described: Mapping[str, Column] | None = None) -> Table | None:
    """Show a data frame as a table, numbers short, each with its standard error; None where it is empty.

    `described`: what its columns mean; None: what columns of layers and heads by these names do.
    """
    if frame is None or frame.empty:
        return None
    described = declared("layers") | declared("heads") if described is None else described
    names, unknown = _without_errors(frame), [math.nan] * len(frame)
    columns = [map(_cell, frame[name], frame.get(f"{name}_se", unknown)) for name in names]
    return Table(
        [heading(str(name), described) for name in names], [list(row) for row in zip(*columns, strict=True)]
    )


def _without_errors(frame: pd.DataFrame) -> list[str]:
    """List the columns but the standard errors of others, which stand in the cells of these."""
    return [name for name in frame if name not in {f"{value}_se" for value in frame}]


def heading(name: str, described: Mapping[str, Column]) -> tuple[str, str]:
    """Return the title of a column and what it means: as declared, or its name with spaces and nothing."""
    if name in described:
        return described[name].title, described[name].meaning
    return name.replace("_", " "), ""


def run_table(run: Run, name: str) -> Table | None:
    """Show a table of the run; None where it is empty.

    Outliers: the largest. Heads and attribution: the head's name in place of its layer and number, sorted by both;
    heads: their roles.
    """
    frame, described = getattr(run, name), columns_of(run, name)
    if name == "outliers" and len(frame):
        order, directions = ["maximum", "layer", "dimension"], [False, True, True]
        frame = frame.sort_values(order, ascending=directions, kind="stable").head(OUTLIER_ROWS)
    values = frame.drop(columns=["layer", "head"]) if "head" in frame else frame
    table = frame_table(values, described)
    if table is None or name == "outliers":
        return table
    if name == "layers":
        for index, value in enumerate(_without_errors(frame)):
            for place in np.flatnonzero(at_floor(run, value)):
                table.rows[place][index] = Cell(AT_FLOOR, table.rows[place][index].value)
        return replace(table, ids=[f"layer-{int(layer)}" for layer in frame["layer"]])
    headings = [("head", "block and head, both counted from 0")]
    for row, layer, head in zip(table.rows, frame["layer"], frame["head"], strict=True):
        row.insert(0, Cell(head_name(int(layer), int(head)), float(layer * 10_000 + head)))
    if name != "heads":
        return Table(headings + table.headings, table.rows, picks=("head", "pattern", "group"))
    for row, roles in zip(table.rows, roles_of_heads(run), strict=True):
        row.insert(1, Cell(", ".join(role.name for role in roles) or MISSING))
    headings.append(("roles", "what the head does by its scores, the clearest first"))
    return Table(
        headings + table.headings, table.rows, [row[0].shown for row in table.rows], ("head", "roles")
    )


def massive_table(run: Run) -> Table | None:
    """Tabulate the tokens that were left out for their massive activations; None where there are none."""
    tokens = massive_tokens(run).head(MASSIVE_ROWS)
    if not len(tokens):
        return None
    shown = tokens.assign(token=tokens["token"].map(shown_token), layer=tokens["layers"].map(spans))
    return frame_table(
        shown[["token", "context", "position", "dimension", "value", "layer"]], declared("massive")
    )


def _cell(value: Any, error: Any = math.nan) -> Cell:
    if isinstance(value, str):
        return Cell(visible(value, LONG_VALUE))
    if pd.isna(value):
        return Cell(MISSING)
    amount, spread = float(value), math.nan if pd.isna(error) else float(error)
    return Cell(with_error(amount, spread), _rounded(amount, 7), _rounded(spread, 3))


def _rounded(amount: float, digits: int) -> float | None:
    return float(f"{amount:.{digits}g}") if math.isfinite(amount) else None


def head_cards(run: Run) -> dict[str, Any]:
    """Return what the cards of heads show: `measures`, the group and title of each, and `heads` by `"layer,head"`.

    Of a head: groups of its own, each a title with (name, value) pairs, and the value of every measure.
    """
    heads, measures = {}, head_measures(run)
    regimes, roles = measured_regimes(run), roles_of_heads(run)
    sinks = _sinks_by_head(run)
    for place, row in enumerate(run.heads.to_dict("records")):
        layer, head = int(row["layer"]), int(row["head"])
        scores = [(role.name, number(row[role.column])) for role in roles[place]]
        if regimes is not None:
            scores.append(("measured regime", str(regimes[place])))
        groups = {ROLES_CARD: scores, SINKS_CARD: sinks.get((layer, head), [])}
        values = [row[measure.name] for measure in measures]
        heads[f"{layer},{head}"] = [
            [group for group in groups.items() if group[1]],
            list(map(number, values)),
        ]
    return {"measures": [(CARDS.get(one.group, TEXT), one.title) for one in measures], "heads": heads}


def _sinks_by_head(run: Run) -> dict[tuple[int, int], list[tuple[str, str]]]:
    """List what is most often a head's sink, each with its share of the contexts: the first token, and later ones."""
    if run.sinks.empty:
        return {}
    named = run.sinks["token"].map(shown_token).where(~run.sinks["first"].astype(bool), "the first token")
    shares = run.sinks.groupby(["layer", "head", named], sort=True)["share"].sum()
    by_head: dict[tuple[int, int], list[tuple[str, str]]] = {}
    for (layer, head, name), share in shares.sort_values(ascending=False, kind="stable").items():
        by_head.setdefault((int(layer), int(head)), []).append((name, percent(share)))
    return {place: sinks[:HEAD_SINKS] for place, sinks in by_head.items()}


def provenance_rows(record: dict[str, Any]) -> list[tuple[str, str]]:
    """List where the run comes from: (name, value) pairs, nested names joined by dots."""
    rows: list[tuple[str, str]] = []

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key in value:
                walk(f"{prefix}.{key}" if prefix else str(key), value[key])
        else:
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            rows.append((visible(prefix), visible(shown, LONG_VALUE)))

    walk("", {key: value for key, value in record.items() if key != "fingerprint"})
    return rows


def subtitle(provenance: dict[str, Any]) -> str:
    """Say in one line what was surveyed on what."""
    model = provenance.get("model") or {}
    if model.get("layers") == 0:
        trained = model.get("architecture") not in (None, "no model")
        return visible(model["architecture"], 60) if trained else "theory or its own training runs"
    shape = f"{model.get('layers', '?')} blocks × {model.get('heads', '?')} heads"
    parts = [visible(model.get("architecture") or "unknown architecture", 60), shape]
    if model.get("width"):
        parts.append(f"width {model['width']}")
    if model.get("parameters"):
        parts.append(f"{_short_count(float(model['parameters']))} parameters")
    if model.get("positions"):
        parts.append(f"{visible(model['positions'], 30)} positions")
    if model.get("chosen_layers"):
        parts.append(f"only heads of blocks {spans(model['chosen_layers'])}")
    if model.get("gguf"):
        parts.append(gguf_described(visible(model["gguf"], 20), visible(model.get("dtype"), 20)))
    return " · ".join(parts)


def text_line(provenance: dict[str, Any]) -> str:
    """Describe in one line the text that was read, or say that none was."""
    corpus = provenance.get("corpus")
    if provenance.get("grid"):
        return "measured by the training runs on their own held-out text"
    if (provenance.get("model") or {}).get("layers") == 0:
        return "no model or text was read"
    if provenance.get("reads"):
        return f"on {provenance['reads']}"
    if not corpus:
        return "weights only, no text was read"
    if grid := grid_described(corpus):
        before = f" and {listed(list(grid.before))} before" if grid.before else ""
        tokens = f"{grid.rows} × {grid.columns} patches{before}"
        size = f"{number(corpus['contexts'])} images of {tokens}"
    else:
        size = f"{number(corpus['contexts'])} contexts of {tokens_of(corpus)} tokens"
    labels = f" (labels: {visible(corpus['labels_are'], 80)})" if corpus.get("labels_are") else ""
    return f"on {size} from {visible(corpus['name'], 80)}{labels}"


def _short_count(amount: float) -> str:
    for size, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if amount >= size:
            return f"{number(amount / size)} {suffix}"
    return number(amount)


def measures() -> dict[str, str]:
    """Name the key numbers, and say what each is: a column's mean over heads or layers, or its largest value."""
    heads, layers = declared("heads"), declared("layers")
    titles = {name: column.title for name, column in (heads | layers).items()}
    titles |= {UNIFORM_ATTENTION.column: "entropy over its maximum", "entropy": "attention entropy in nats"}
    return (
        {name: f"{titles[name]}, mean over heads" for name in OVER_HEADS}
        | {name: f"{titles[name]}, mean over layers" for name in OVER_LAYERS}
        | {f"{name}_max": f"{titles[name]} score, strongest head" for name in STRONGEST}
    )


def summary_row(run: Run) -> dict[str, float]:
    """Compute a run's key numbers: every one of `measures`, NaN where it has none; `…_se` for those over layers."""
    row: dict[str, float] = {}
    for name in OVER_HEADS:
        values = entropy_share(run) if name == UNIFORM_ATTENTION.column else column(run.heads, name)
        row[name] = math.nan if values is None else float(np.nanmean(values))
    for name in OVER_LAYERS:
        row[name], row[f"{name}_se"] = layer_mean(run, name) or (math.nan, math.nan)
    for name in STRONGEST:
        values = column(run.heads, name)
        row[f"{name}_max"] = math.nan if values is None else float(np.nanmax(values))
    return row
