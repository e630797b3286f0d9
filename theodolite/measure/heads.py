"""Columns of each head's attention: entropy, propagation, head scores and sinks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from theodolite.accumulate.sums import State, part_of
from theodolite.attention.sinks import SINK_THRESHOLD, is_sink
from theodolite.corpus.ragged import NO_TOKEN
from theodolite.judging import Criterion
from theodolite.measure.column import (
    AMOUNT,
    ATTENTION,
    BEHAVIOUR,
    SHARE,
    SINKS,
    Array,
    Column,
    gives,
    head_places,
    table_of,
)
from theodolite.measure.head_roles import (
    ATTENTION_PATTERNS,
    END_TOKEN_SINK,
    FIRST_TOKEN_SINK,
    INDUCTION,
    LATER_SINK,
    LEARNED_SINK,
    PREVIOUS_TOKEN,
    SAME_TOKEN,
    HeadRole,
)
from theodolite.measure.publications import BAO, OLSSON, SONG, XIAO, ZHAI, ZHANG
from theodolite.measure.ratios import ratio

_head = partial(Column, "heads", range=SHARE)
_BY_RATIO = "contexts, as that of a ratio of sums over them, to first order"
_SINK = (
    f"A key is a sink of a context where it gets more than {SINK_THRESHOLD} of the attention of the queries that see "
    "it on average; at least min(16, T/4), rounded up, other queries must see it."
)


def _of_role(role: HeadRole, group: str, source: str, formula: str = "", **more: Any) -> Column:
    """Declare the column of a role's score."""
    return _head(role.column, role.meaning, formula, source, role.name, group=group, **more)


@gives(*head_places("heads"))
def heads_that_are(columns: Mapping[str, Sequence[Any]], heads_of: Sequence[int]) -> pd.DataFrame:
    """Drop the rows of heads that a layer does not have from a table with `layer` and `head`."""
    places = [(layer, head) for layer, heads in enumerate(heads_of) for head in range(heads)]
    rows = pd.DataFrame(columns).iloc[head_rows(heads_of)]
    return pd.DataFrame(places, columns=["layer", "head"]).join(rows.reset_index(drop=True))


def head_rows(heads_of: Sequence[int]) -> list[int]:
    """List the rows of heads that there are, where every layer has as many rows as the one with the most heads."""
    return [layer * max(heads_of) + head for layer, heads in enumerate(heads_of) for head in range(heads)]


@gives(
    _head(
        "entropy",
        "Mean Shannon entropy of the head's attention rows. Low: a single key; high: near-uniform attention.",
        "Mean over queries; a learned sink column counts as an outcome.",
        f"{ZHAI}; {BAO}, section 5",
        unit="nats",
        range=AMOUNT,
        group=ATTENTION,
        error="contexts, taken as independent; of unlike lengths, to first order",
    ),
    _head(
        "propagation",
        "Share of the last query's keys that receive gradient (linearised softmax). 0: vanishing signal.",
        "Of the keys that contexts' last queries see, before special tokens at the end.",
        f"{BAO}, section 3, definition 1",
        "signal propagation",
        group=ATTENTION,
        healthy=Criterion("at least", 0.05, "mean propagation: hardly any key's signal reaches the gradient"),
    ),
    _of_role(PREVIOUS_TOKEN, BEHAVIOUR, OLSSON, "Mean over queries at positions 1 … T − 1.", error=_BY_RATIO),
    _of_role(
        SAME_TOKEN,
        BEHAVIOUR,
        f"{SONG}, section 5",
        "All earlier copies, over queries with one.",
        error=_BY_RATIO,
    ),
    _of_role(FIRST_TOKEN_SINK, SINKS, f"{XIAO}; {ZHANG}", f"Key 0. {_SINK}"),
    _of_role(LATER_SINK, SINKS, ZHANG, "A later key of the text, defined as `sink_first`."),
    _of_role(
        END_TOKEN_SINK,
        SINKS,
        "Clark et al. 2019, section 3.2",
        "Only where special tokens end every context, which are then no later keys.",
    ),
    _of_role(
        LEARNED_SINK, SINKS, "models with a sink column, such as gpt-oss", "Mean over queries.", rare=True
    ),
    _head(
        "sink_registers",
        "Share of contexts in which a token between [CLS] and the patches of an image is a sink.",
        "Only of images with such tokens.",
        title="register sink",
        group=SINKS,
        offered=False,
    ),
)
def head_columns(attention: State) -> dict[str, list[float]]:
    """Compute the measured columns of the heads table, L · H values each, layer by layer, from `AttentionStatistics`.

    `entropy_se` is NaN of a single context; of contexts of unlike lengths it is to first order.
    """
    contexts = attention["contexts"].view(-1, 1)
    queries = attention["readers"].sum(dim=-1, keepdim=True)
    entropy = attention["entropy"].sum(dim=-1) / queries
    weight = attention["squared_lengths"].view(-1, 1)
    # About the mean over queries, of sums over contexts' queries: that of a ratio, to first order.
    spread = attention["entropy_spread"] + weight * (attention["squared_entropy"] / weight - entropy).square()
    independent = contexts / torch.where(contexts > 1, contexts - 1, torch.nan)
    columns = {
        "entropy": entropy,
        "entropy_se": (spread * independent).sqrt() / queries,
        "propagation": attention["propagates"].sum(dim=-1) / attention["last_sees"].sum(dim=-1),
        "sink_first": attention["sink"][:, :, 0] / contexts,
        "sink_later": attention["sink_later"] / contexts,
        "sink_learned": attention["learned"] / queries,
    }
    for name, of in (("previous_token", "previous"), ("same_token", "same")):
        columns[name], columns[f"{name}_se"] = ratio(attention[of])  # 0/0 = NaN: no token came twice
    for name in ("sink_last", "sink_registers"):
        if name in attention:
            columns[name] = attention[name] / contexts
    return {name: value.flatten().tolist() for name, value in columns.items()}


@gives(
    _of_role(
        INDUCTION,
        BEHAVIOUR,
        OLSSON,
        "On ⌊T/2⌋ random tokens, twice: mean attention from the second copy to the token after the first.",
        error="the random sequences",
    )
)
def induction_columns(patterns: State) -> dict[str, list[float]]:
    """Return the induction score of every head and its error, L · H values each, from the state of a `PatternPass`."""
    place = list(ATTENTION_PATTERNS).index("induction")
    scores = {"induction": patterns["scores"], "induction_se": patterns["errors"]}
    return {name: values[:, place].flatten().tolist() for name, values in scores.items()}


@gives(
    Array(
        "entropy_by_position", "(L, H, T)", "Mean attention entropy of the queries at each position, in nats."
    ),
    Array(
        "propagation_by_position", "(L, H, T)", "Measured ρ of the last query; NaN: it never sees the key."
    ),
    Array(
        "received_by_position", "(L, H, T)", "Mean attention that each key gets from the queries that see it."
    ),
    Array("sink_by_position", "(L, H, T)", "Share of contexts in which the position is a sink."),
    Array("visible_keys", "(L, T)", "How many keys a query sees: causal, a window's, or all."),
)
def head_arrays(attention: State) -> dict[str, Tensor]:
    """Return the arrays per head and position, of the contexts that have the position."""
    readers = attention["readers"].unsqueeze(1)
    return {
        "entropy_by_position": attention["entropy"] / readers,
        "propagation_by_position": attention["propagates"] / attention["last_sees"],
        "received_by_position": attention["received"] / readers,
        "sink_by_position": attention["sink"] / readers,
        "visible_keys": attention["visible_keys"],
    }


@gives(
    *head_places("sinks"),
    Column("sinks", "token_id", "The token that became a sink of the head."),
    Column("sinks", "token", "Its text.", kind="text"),
    Column("sinks", "first", "Whether it is one at position 0, or later.", kind="flag"),
    Column("sinks", "contexts", "In how many contexts it is a sink, at one position or at several."),
    Column("sinks", "share", "Their share of all contexts.", range=SHARE),
    Column("sinks", "position", "The mean position at which it is a sink."),
)
def sinks_table(attention: State, text: Callable[[int], str]) -> pd.DataFrame:
    """Tabulate the tokens that became sinks: one row for each (layer, head, token, first or later position)."""
    sums = part_of(attention, "sink_tokens")
    layer, head, token, first = sums["keys"].unbind(dim=1)
    in_contexts, sinks, positions = (sums[name].long() for name in ("contexts", "sinks", "positions"))
    contexts = float(attention["contexts"].max())  # 0 of a layer that does not attend
    columns: dict[str, Tensor | list[str]] = {
        "layer": layer,
        "head": head,
        "token_id": token,
        "token": [text(number) for number in token.tolist()],
        "first": first.bool(),
        "contexts": in_contexts,
        "share": in_contexts / contexts,
        "position": (positions / sinks).double(),
    }
    order = ["layer", "head", "contexts", "token_id"]
    return table_of(columns).sort_values(order, ascending=[True, True, False, True], ignore_index=True)


@gives(
    Column("examples", "context", "The context, counted from 0."),
    Column("examples", "position", "The token's position in it."),
    Column("examples", "token_id", "The token."),
    Column("examples", "token", "Its text.", kind="text"),
    Column(
        "examples",
        "received",
        "The most attention that any head pays it, in the mean of the queries that see it.",
        title="attention received",
        range=SHARE,
    ),
    Column("examples", "layer", "The block of that head."),
    Column("examples", "head", "That head."),
    Column("examples", "sink", f"Whether that is more than {SINK_THRESHOLD}.", kind="flag"),
)
def examples_table(
    attention: State, examples: Int[Tensor, "examples positions"], text: Callable[[int], str]
) -> pd.DataFrame:
    """Tabulate every token of the example contexts with the most attention that any head pays it on average."""
    received, layer = attention["example_received"].max(dim=0)
    head = attention["example_head"].gather(0, layer[None])[0].long()
    context, position = places = (examples != NO_TOKEN).nonzero(as_tuple=True)
    return table_of(
        {
            "context": context,
            "position": position,
            "token_id": examples[places],
            "token": [text(token) for token in examples[places].tolist()],
            "received": received[places],
            "layer": layer[places],
            "head": head[places],
            "sink": is_sink(received)[places],
        }
    )


@gives(
    Array("example_picture", "(E, height, width, 3)", "The first images of a survey of images."),
    Array("example_received", "(L, E, T)", "The most attention that any head of a block pays each token."),
    Array("example_norm", "(N, E, T)", "‖h‖₂ of each token."),
)
def picture_arrays(pictures: Tensor, attention: State, example_norms: State) -> dict[str, Tensor]:
    """Return what figures show on the first images; `example_norms` is the state of `ExampleNorms`."""
    return {
        "example_picture": pictures,
        "example_received": attention["example_received"].float(),
        "example_norm": example_norms["norm"].float(),
    }
