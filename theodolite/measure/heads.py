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
from theodolite.attention.summary import SINK_THRESHOLD, is_sink
from theodolite.corpus.cutting import NO_TOKEN
from theodolite.judging import Criterion
from theodolite.measure import column, head_roles
from theodolite.measure.column import Array, Column, array_without, gives, head_places, table_of
from theodolite.measure.publications import BAO, OLSSON, SONG, XIAO, ZHAI, ZHANG
from theodolite.theory.propagation import propagation_of_draws
from theodolite.theory.unbiased import Jackknifed, ratio

_head = partial(Column, "heads", range=column.SHARE)
_measured = partial(_head, error=column.LEFT_OUT)
_SINK = (
    f"A key is a sink of a context where it gets more than {SINK_THRESHOLD} of the attention of the queries that see "
    "it on average; at least min(16, T/4), rounded up, other queries must see it."
)


def _of_role(role: head_roles.HeadRole, source: str, formula: str, **more: Any) -> Column:
    """Declare the column of a role's score."""
    group = column.SINKS if role in head_roles.SINK_ROLES else column.BEHAVIOUR
    return _measured(role.column, role.meaning, formula, source, role.name, group=group, **more)


_RATIOS = {
    "entropy": ("total_entropy", "queries"),
    "propagation": ("total_propagates", "total_last_sees"),
    "sink_first": ("sink_first", "contexts"),
    "sink_later": ("sink_later", "contexts"),
    "sink_learned": ("learned", "queries"),
    "previous_token": ("previous", "previous_queries"),
    "same_token": ("same", "same_queries"),  # 0/0 = NaN: no token came twice
    "sink_last": ("sink_last", "contexts"),
    "to_image": ("picture", "text_queries"),
}
"""Column → the sums of `AttentionStatistics` that it is the ratio of."""


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
    _measured(
        "entropy",
        "Mean Shannon entropy of the head's attention rows. Low: a single key; high: near-uniform attention.",
        "Mean over queries; a learned sink column counts as an outcome.",
        f"{ZHAI}; {BAO}, section 5",
        unit="nats",
        range=column.AMOUNT,
        group=column.ATTENTION,
    ),
    _measured(
        "propagation",
        "Share of the last query's keys that receive gradient (linearised softmax). 0: vanishing signal.",
        "Of the keys that contexts' last queries see, before special tokens at the end.",
        f"{BAO}, section 3, definition 1",
        "signal propagation",
        group=column.ATTENTION,
        healthy=Criterion("at least", 0.05, "mean propagation: hardly any key's signal reaches the gradient"),
    ),
    _of_role(head_roles.PREVIOUS_TOKEN, OLSSON, "Mean over queries at positions 1 … T − 1."),
    _of_role(head_roles.SAME_TOKEN, f"{SONG}, section 5", "All earlier copies, over queries with one."),
    _of_role(head_roles.FIRST_TOKEN_SINK, f"{XIAO}; {ZHANG}", f"Key 0. {_SINK}"),
    _of_role(head_roles.LATER_SINK, ZHANG, "A later key of the text, defined as `sink_first`."),
    _of_role(
        head_roles.END_TOKEN_SINK,
        "Clark et al. 2019, section 3.2",
        "Only where special tokens end every context, which are then no later keys.",
    ),
    _of_role(
        head_roles.LEARNED_SINK, "models with a sink column, such as gpt-oss", "Mean over queries.", rare=True
    ),
    _measured(
        "to_image",
        "Share of a head's attention that text behind an image pays to the image's tokens.",
        "Only of texts with images: mean over the queries behind an image's last token.",
        title="attention to the image",
        group=column.BEHAVIOUR,
    ),
)
def head_columns(attention: State) -> dict[str, Jackknifed]:
    """Compute the measured columns of the heads table, L · H values each, from `AttentionStatistics`."""
    heads = attention["entropy"].shape[1]
    known = (attention["contexts"] > 0).all(dim=1).repeat_interleave(heads)
    columns = {}
    for name, (part, whole) in _RATIOS.items():
        if part in attention:
            of_groups = attention[whole].reshape(*attention[whole].shape[:2], -1)  # of all heads, or of each
            values = ratio(attention[part].transpose(0, 1), of_groups.transpose(0, 1))
            columns[name] = Jackknifed(values.value.flatten(), values.without.flatten(1)).if_known(known)
    return columns


def with_errors(columns: Mapping[str, Jackknifed]) -> dict[str, list[float]]:
    """List the values of columns by name, and their standard errors by NAME_se."""
    values = {name: of.value.tolist() for name, of in columns.items()}
    return values | {f"{name}_se": of.error.tolist() for name, of in columns.items()}


@gives(
    _head(
        "propagation_independent",
        "Signal propagation if queries and keys were drawn independently: far from the measured one, a query's logits "
        "depend on more than the size of queries and keys.",
        "ρ = P(−1 ≤ x ≤ T − 1), x ~ N(0, σ²), σ² = tr(E[q qᵀ] Cov(k)) · scaling², q the last query and k the keys that "
        "it sees, normed and turned by position as they are used; without soft-capping and biases.",
        f"{BAO}, section 3; independent draws are ours",
        "signal propagation of independent draws",
        group=column.ATTENTION,
        short="ρ indep.",
        offered=False,
    )
)
def propagation_of_moments(query_keys: State, attention: State) -> dict[str, Tensor]:
    """Compute `propagation_independent`, L · H values, from the state of `QueryKeyMoments`."""
    contexts = query_keys["contexts"]
    variance = torch.einsum("lhxy,lhxy->lh", query_keys["query"], query_keys["key"]) / contexts**2
    keys = attention["total_last_sees"].sum(dim=1) / contexts
    return {"propagation_independent": propagation_of_draws(variance, keys).flatten()}


@gives(
    _of_role(
        head_roles.INDUCTION,
        OLSSON,
        "On ⌊T/2⌋ random tokens, twice: mean attention from the second copy to the token after the first.",
        error="each random sequence left out in turn (jackknife)",
    )
)
def induction_columns(patterns: State) -> dict[str, Jackknifed]:
    """Return the induction score of every head, L · H values, from the state of a `PatternPass`."""
    place = list(head_roles.ATTENTION_PATTERNS).index("induction")
    scores, without = (patterns[name][:, place].flatten(0, 1) for name in ("scores", "without"))
    return {"induction": Jackknifed(scores, without.T)}


@gives(
    Array(
        "entropy_by_position", "(L, H, T)", "Mean attention entropy of the queries at each position, in nats."
    ),
    Array(
        "propagation_by_position", "(L, H, T)", "Measured ρ of the last query; NaN: it never sees the key."
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
        "sink_by_position": attention["sink"] / readers,
        "visible_keys": attention["visible_keys"],
    }


@gives(
    *head_places("sinks"),
    Column("sinks", "token_id", "The token that became a sink of the head."),
    Column("sinks", "token", "Its text.", kind="text"),
    Column("sinks", "first", "Whether it is one at position 0, or later.", kind="flag"),
    Column("sinks", "contexts", "In how many contexts it is a sink, at one position or at several."),
    Column("sinks", "share", "Their share of all contexts."),
    Column("sinks", "position", "The mean position at which it is a sink."),
    array_without("sinks", "share"),
)
def sinks_table(attention: State, text: Callable[[int], str]) -> tuple[pd.DataFrame, dict[str, Tensor]]:
    """Tabulate the tokens that became sinks, by layer, head, token, and first or not; shares also without groups."""
    sums = part_of(attention, "sink_tokens")
    layer, head, token, first = sums["keys"].unbind(dim=1)
    in_contexts, sinks, positions = (sums[name].long() for name in ("contexts", "sinks", "positions"))
    contexts = attention["contexts"].amax(dim=0)  # 0 of a layer that does not attend
    share = ratio(in_contexts.T, contexts[:, None])
    columns: dict[str, Tensor | list[str]] = {
        "layer": layer,
        "head": head,
        "token_id": token,
        "token": [text(number) for number in token.tolist()],
        "first": first.bool(),
        "contexts": in_contexts.sum(dim=1),
        "share": share.value,
        "position": (positions / sinks).double(),
    }
    order = ["layer", "head", "contexts", "token_id"]
    table = table_of(columns).sort_values(order, ascending=[True, True, False, True])
    share = share[table.index.to_numpy(copy=True)].if_known((contexts > 0).all())
    return table.reset_index(drop=True), {f"sinks.share{column.WITHOUT}": share.without.float()}


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
    ),
    Column("examples", "layer", "The block of that head."),
    Column("examples", "head", "That head."),
    Column("examples", "sink", f"Whether that is more than {SINK_THRESHOLD}.", kind="flag"),
    Array("example_picture", "(E, height, width, 3)", "The first images of a survey of images."),
    Array("example_received", "(L, E, T)", "The most attention that any head of a block pays each token."),
)
def examples_table(
    attention: State,
    examples: Int[Tensor, "examples positions"],
    text: Callable[[int], str],
    pictures: Tensor | None = None,
) -> tuple[pd.DataFrame, dict[str, Tensor]]:
    """Tabulate the tokens of the examples with the most attention that any head pays them, images as arrays, too."""
    received, layer = attention["example_received"].max(dim=0)
    head = attention["example_head"].gather(0, layer[None])[0].long()
    context, position = places = (examples != NO_TOKEN).nonzero(as_tuple=True)
    ids = examples[places]
    columns: dict[str, Tensor | list[str]] = {
        "context": context,
        "position": position,
        "token_id": ids,
        "token": [text(token) for token in ids.tolist()],
        "received": received[places],
        "layer": layer[places],
        "head": head[places],
        "sink": is_sink(received)[places],
    }
    if pictures is None:
        return table_of(columns), {}
    by_layer = attention["example_received"].float()
    return table_of(columns), {"example_picture": pictures, "example_received": by_layer}
