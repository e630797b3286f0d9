"""From attention statistics to what each head does: entropy, propagation, head scores and sinks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from theodolite.accumulate.sums import State
from theodolite.attention.sinks import SINK_THRESHOLD
from theodolite.corpus.ragged import NO_TOKEN
from theodolite.measure.ratios import ratio


def heads_that_are(columns: Mapping[str, Sequence[Any]], heads_of: Sequence[int]) -> pd.DataFrame:
    """A table with `layer` and `head`, without rows of heads that a layer does not have."""
    most = max(heads_of)
    places = [(layer, head) for layer, heads in enumerate(heads_of) for head in range(heads)]
    rows = pd.DataFrame(columns).iloc[[layer * most + head for layer, head in places]]
    return pd.DataFrame(places, columns=["layer", "head"]).join(rows.reset_index(drop=True))


def head_columns(attention: State) -> dict[str, list[float]]:
    """Measured columns of the heads table, L · H values each, layer by layer.

    entropy: mean over queries, nats; entropy_se: its standard error, contexts taken as independent
    (NaN for one; of contexts of unlike lengths, to first order). propagation: of the keys that the last queries see,
    the share that propagates (Bao et al. 2024, definition 1); where special tokens end every
    context ([SEP]), it is the last query before them. sink_first, sink_later: share
    of contexts with a sink at key 0, at a later key; sink_last, where special tokens end every context: at one of
    these, which are then no later key; sink_registers: likewise of the tokens between [CLS] and the patches of an
    image. sink_learned: mean mass on a learned sink column.
    previous_token: mean attention from positions 1 … T−1 to the one before. same_token: mean attention to all
    earlier equal tokens, over the queries that have one. previous_token_se, same_token_se: of these ratios of sums over
    contexts, to first order.
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


def head_arrays(attention: State) -> dict[str, Tensor]:
    """Per head and position, (L, H, T), of the contexts that have it: entropy, empirical ρ, attention received, sinks.

    And (L, T): how many keys each query sees.
    """
    readers = attention["readers"].unsqueeze(1)
    return {
        "entropy_by_position": attention["entropy"] / readers,
        "propagation_by_position": propagation_by_position(attention),
        "received_by_position": attention["received"] / readers,
        "sink_by_position": attention["sink"] / readers,
        "visible_keys": attention["visible_keys"],
    }


def propagation_by_position(attention: State) -> Float[Tensor, "layers heads positions"]:
    """Empirical ρ_i of the last query; NaN where it never sees key i (a sliding window)."""
    return attention["propagates"] / attention["last_sees"]


def sinks_table(attention: State, text: Callable[[int], str]) -> pd.DataFrame:
    """Which tokens became sinks: one row for each (layer, head, token, first or later position).

    `contexts` and `share`: in which the token is a sink at one position or more; `position`: the mean over all of them.
    """
    rows = attention["sink_tokens"]
    contexts = float(attention["contexts"].max())  # 0 of a layer that does not attend
    table = pd.DataFrame(
        {
            "layer": rows[:, 0].numpy(),
            "head": rows[:, 1].numpy(),
            "token_id": rows[:, 2].numpy(),
            "token": pd.Series([text(token) for token in rows[:, 2].tolist()], dtype="object").astype(str),
            "first": rows[:, 3].bool().numpy(),
            "contexts": rows[:, 4].numpy(),
            "share": (rows[:, 4] / contexts).numpy(),
            "position": (rows[:, 6] / rows[:, 5]).double().numpy(),
        }
    )
    order = ["layer", "head", "contexts", "token_id"]
    return table.sort_values(order, ascending=[True, True, False, True], ignore_index=True)


def examples_table(
    attention: State, ids: Int[Tensor, "examples positions"], text: Callable[[int], str]
) -> pd.DataFrame:
    """Every token of the example contexts with the most attention that any head pays it on average."""
    received, layer = attention["example_received"].max(dim=0)
    head = attention["example_head"].gather(0, layer[None])[0].long()
    context, position = places = (ids != NO_TOKEN).nonzero(as_tuple=True)
    return pd.DataFrame(
        {
            "context": context.numpy(),
            "position": position.numpy(),
            "token_id": ids[places].numpy(),
            "token": pd.Series([text(token) for token in ids[places].tolist()], dtype="object").astype(str),
            "received": received[places].numpy(),
            "layer": layer[places].numpy(),
            "head": head[places].numpy(),
            "sink": (received > SINK_THRESHOLD)[places].numpy(),
        }
    )
