"""Contents of the page besides its figures: sink texts, tables, provenance; as plain values."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup, escape

from theodolite.corpus.images import grid_described
from theodolite.measure.column import SPECTRUM, SPECTRUM_DATA, Column, declared
from theodolite.measure.head_roles import UNIFORM_ATTENTION
from theodolite.passes.run import Run
from theodolite.report import data
from theodolite.report.drawing.heads import head_measures
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
from theodolite.theory.regimes import regime_of_curve

EXAMPLE_CONTEXTS, EXAMPLE_TOKENS = 8, 512
SINK_TOKENS, OUTLIER_ROWS, MASSIVE_ROWS, HEAD_SINKS = 20, 30, 30, 4
LONG_VALUE = 200  # letters
TEXT, ROLES_CARD = "Measured on the text", "Roles and their scores"
OVER_LAYERS = ("rank", "relative_norm", "pp_low_frequency_10", "incoherence_mean", "similarity_within")
OVER_HEADS = ("entropy", "entropy_share", "propagation", "sink_first", "sink_later")
STRONGEST = ("previous_token", "induction", "same_token")
CARDS = {SPECTRUM: "From W_QK", SPECTRUM_DATA: "From W_QK Σ̂"}  # group of columns → their card; others: `TEXT`
_NAMED = re.compile(r"\bL\d+H\d+\b|\blayer \d+\b|‘[^‘’]+’")


@dataclass(frozen=True)
class Cell:
    """A table cell: what is shown, the number that sorting goes by (None: sort by what is shown), and its error."""

    shown: str
    value: float | None = None
    error: float | None = None


@dataclass(frozen=True)
class Table:
    """A table: headings with explanations, and rows of cells; `ids` link rows, `picks` are headings to filter by."""

    headings: list[tuple[str, str]]
    rows: list[list[Cell]]
    ids: Sequence[str] = ()
    picks: Sequence[str] = ()

    @property
    def are_words(self) -> list[bool]:
        """True for each column that holds words, which are aligned on the left."""
        columns = zip(*self.rows, strict=True)
        return [{cell.value is None for cell in of if cell.shown != MISSING} == {True} for of in columns]


def flowing(token: object) -> dict[str, Any]:
    """Return a token for running text: its line ends are marked and kept, those at its end apart, as `breaks`."""
    text = "\n".join(visible(line) for line in str(token).split("\n")).replace("\n", "↵\n")
    line = text.rstrip("\n")
    return {"text": line, "breaks": text[len(line) :]}


def sink_texts(run: Run) -> list[list[dict[str, Any]]]:
    """Return the example contexts, each a list of tokens in order; empty where the run has none."""
    if run.examples.empty or data.grid_of(run):
        return []  # of images, pictures are shown
    ordered = run.examples.sort_values(["context", "position"], kind="stable")
    contexts = list(ordered.groupby("context", sort=True))[:EXAMPLE_CONTEXTS]
    return [[_token(row) for row in rows.head(EXAMPLE_TOKENS).to_dict("records")] for _, rows in contexts]


def _token(row: dict[Any, Any]) -> dict[str, Any]:
    received = math.nan if row["received"] is None else float(row["received"])
    hint = f"position {int(row['position'])}"
    if not (math.isnan(received) or pd.isna(row["layer"]) or pd.isna(row["head"])):
        hint += f" · receives {received:.2f} from {head_name(int(row['layer']), int(row['head']))}"
    shade = round(min(received, 1.0), 2) if received >= 0.02 else None  # fainter ones get no colour
    sink = not pd.isna(row["sink"]) and bool(row["sink"])
    hint += " · sink" if sink else ""
    return flowing(row["token"]) | {"received": shade, "sink": sink, "hint": hint}


def sink_tokens(run: Run) -> Table | None:
    """Tabulate the tokens most often sinks: contexts summed over heads, how many heads, the strongest one."""
    if run.sinks.empty:
        return None
    names = [
        ("token", "spaces are shown as ␣, line breaks as ↵"),
        ("position", "its mean position in the contexts where it is a sink"),
        ("times a sink", "head × context pairs"),
        ("heads", "heads for which it is a sink"),
        ("strongest head", "the head for which it is a sink in most contexts, and the share of contexts"),
    ]
    groups = [group for _, group in run.sinks.groupby(["token", "first"], sort=True)]
    rows = []
    for heads in sorted(groups, key=lambda group: -group["contexts"].sum())[:SINK_TOKENS]:
        best = heads.sort_values(["contexts", "layer", "head"], ascending=[False, True, True]).iloc[0]
        contexts, share = heads["contexts"].to_numpy(float), float(best["share"])
        position = float(np.average(heads["position"].to_numpy(float), weights=contexts))
        row = [
            Cell(shown_token(best["token"])),
            Cell("first" if best["first"] else f"later (mean {number(position)})", position),
            Cell(number(contexts.sum()), float(contexts.sum())),
            Cell(str(len(heads)), float(len(heads))),
            Cell(f"{head_name(int(best['layer']), int(best['head']))} ({percent(share)})", share),
        ]
        rows.append(row)
    return Table(names, rows, [f"token-{place}" for place in range(len(rows))])


def frame_table(frame: pd.DataFrame | None, described: Mapping[str, Column] | None = None) -> Table | None:
    """Show a data frame as a table, each number with its standard error; None where it is empty.

    `described`: what its columns mean; None: what columns of layers and heads by these names do.
    """
    if frame is None or frame.empty:
        return None
    described = declared("layers") | declared("heads") if described is None else described
    names, unknown = _without_errors(frame), [math.nan] * len(frame)
    columns = [map(_cell, frame[name], frame.get(f"{name}_se", unknown)) for name in names]
    headings = [
        (described[name].title, described[name].meaning)
        if name in described
        else (str(name).replace("_", " "), "")
        for name in names
    ]
    return Table(headings, [list(row) for row in zip(*columns, strict=True)])


def _without_errors(frame: pd.DataFrame) -> list[str]:
    """List the columns but the standard errors of others, which stand in the cells of these."""
    return [name for name in frame if name not in {f"{value}_se" for value in frame}]


def run_table(run: Run, name: str) -> Table | None:
    """Show a table of the run, of heads by their names, of outliers the largest; None where it is empty."""
    frame, described = getattr(run, name), declared(name, run.provenance)
    if name == "outliers" and len(frame):
        order, directions = ["maximum", "layer", "dimension"], [False, True, True]
        frame = frame.sort_values(order, ascending=directions, kind="stable").head(OUTLIER_ROWS)
    values = frame.drop(columns=["layer", "head"]) if "head" in frame else frame
    if (table := frame_table(values, described)) is None:
        return None
    headings, rows = table.headings, table.rows
    if name == "layers":
        for index, value in enumerate(_without_errors(frame)):
            for place in np.flatnonzero(data.at_floor(run, value)):
                rows[place][index] = replace(rows[place][index], shown=data.AT_FLOOR, error=None)
        return Table(headings, rows, [f"layer-{int(layer)}" for layer in frame["layer"]])
    if name == "heads":
        headings.insert(0, ("roles", "what the head does by its scores, the clearest first"))
        for row, roles in zip(rows, data.roles_of_heads(run), strict=True):
            row.insert(0, Cell(", ".join(role.name for role in roles) or MISSING))
    if "head" not in frame:
        return table
    headings.insert(0, ("head", "block and head, both counted from 0"))
    for row, layer, head in zip(rows, frame["layer"], frame["head"], strict=True):
        row.insert(0, Cell(head_name(int(layer), int(head)), float(layer * 10_000 + head)))
    if name == "heads":
        return Table(headings, rows, [row[0].shown for row in rows], ("head", "roles"))
    return Table(headings, rows, picks=("head", "pattern", "group"))


def massive_table(run: Run) -> Table | None:
    """Tabulate the tokens that were left out for their massive activations; None where there are none."""
    if (tokens := data.massive_tokens(run).head(MASSIVE_ROWS)).empty:
        return None
    shown = tokens.assign(token=tokens["token"].map(shown_token), layer=tokens["layers"].map(spans))
    columns = ["token", "context", "position", "dimension", "value", "layer"]
    return frame_table(shown[columns], declared("massive"))


def _cell(value: Any, error: Any) -> Cell:
    if isinstance(value, str):
        return Cell(visible(value, LONG_VALUE))
    if pd.isna(value):
        return Cell(MISSING)
    amount, spread = float(value), math.nan if pd.isna(error) else float(error)
    exact = float(f"{amount:.7g}") if math.isfinite(amount) else None
    return Cell(with_error(amount, spread), exact, float(f"{spread:.3g}") if math.isfinite(spread) else None)


def head_cards(run: Run) -> dict[str, Any]:
    """Return what the cards of heads show: (group, title) of `measures`, and of `heads` own groups and their values."""
    heads, measures, sinks = {}, head_measures(run), _sinks_by_head(run)
    curves, roles = data.array(run, "propagation_by_position"), data.roles_of_heads(run)
    regimes = None if curves is None else regime_of_curve(curves[run.heads["layer"], run.heads["head"]])
    for place, row in enumerate(run.heads.to_dict("records")):
        layer, head = int(row["layer"]), int(row["head"])
        scores = [(role.name, number(row[role.column])) for role in roles[place]]
        if regimes is not None:
            scores.append(("measured regime", str(regimes[place])))
        groups = {ROLES_CARD: scores, "Its sinks, in how many contexts": sinks.get((layer, head), [])}
        values = [number(row[measure.name]) for measure in measures]
        heads[f"{layer},{head}"] = [[group for group in groups.items() if group[1]], values]
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
    for name, value in record.items():
        if name == "fingerprint":
            continue
        if isinstance(value, dict):
            rows += [(f"{visible(name)}.{inner}", shown) for inner, shown in provenance_rows(value)]
        else:
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            rows.append((visible(name), visible(shown, LONG_VALUE)))
    return rows


def subtitle(provenance: dict[str, Any]) -> str:
    """Say in one line what was surveyed on what."""
    model = provenance.get("model") or {}
    if model.get("layers") == 0:
        trained = model.get("architecture") not in (None, "no model")
        return visible(model["architecture"], 60) if trained else "theory or its own training runs"
    shape = f"{model.get('layers', '?')} blocks × {model.get('heads', '?')} heads"
    parts = [visible(model.get("architecture") or "unknown architecture", 60), shape]
    show: dict[str, tuple[str, Callable[[Any], str]]] = {
        "width": ("width {}", str),
        "parameters": ("{} parameters", _short_count),
        "positions": ("{} positions", visible),
        "chosen_layers": ("only heads of blocks {}", spans),
    }
    parts += [words.format(word(model[name])) for name, (words, word) in show.items() if model.get(name)]
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
    titles = {name: column.title for name, column in (declared("heads") | declared("layers")).items()}
    titles |= {UNIFORM_ATTENTION.column: "entropy over its maximum", "entropy": "attention entropy in nats"}
    return (
        {name: f"{titles[name]}, mean over heads" for name in OVER_HEADS}
        | {name: f"{titles[name]}, mean over layers" for name in OVER_LAYERS}
        | {f"{name}_max": f"{titles[name]} score, strongest head" for name in STRONGEST}
    )


def summary_row(run: Run) -> dict[str, float]:
    """Compute a run's key numbers: every one of `measures`, NaN where it has none; `…_se` for those over layers."""
    share = data.entropy_share(run)
    heads = run.heads.assign(**{UNIFORM_ATTENTION.column: math.nan if share is None else share})
    row = heads.reindex(columns=OVER_HEADS).mean().to_dict()
    for name in OVER_LAYERS:
        row[name], row[f"{name}_se"] = data.layer_mean(run, name) or (math.nan, math.nan)
    return row | heads.reindex(columns=STRONGEST).max().add_suffix("_max").to_dict()


def linked(run: Run, tokens: Table | None) -> Callable[[str], Markup]:
    """Return a function that escapes a sentence and links every head, layer and token that it names to its place."""
    targets = {name: name for name in data.head_labels(run)} if len(run.heads) else {}
    targets |= {f"layer {int(layer)}": f"layer-{int(layer)}" for layer in run.layers.get("layer", ())}
    for row, anchor in zip(tokens.rows, tokens.ids, strict=True) if tokens else ():
        targets.setdefault(str(escape(f"‘{row[0].shown}’")), anchor)

    def link(match: re.Match[str]) -> str:
        target = targets.get(match[0])
        return f'<a href="#{target}">{match[0]}</a>' if target else match[0]

    return lambda text: Markup(_NAMED.sub(link, str(escape(text))))
