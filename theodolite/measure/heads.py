"""From attention statistics to what each head does: entropy, propagation, head scores and sinks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from theodolite.accumulate.sums import State


def heads_that_are(columns: Mapping[str, Sequence[Any]], heads_of: Sequence[int]) -> pd.DataFrame:
    """A table with `layer` and `head`, without rows of heads that a layer does not have.

    Args:
        columns: as many values a layer as the one with most heads has, layer by layer.
        heads_of: how many heads each layer has; 0 where it does not attend.
    """
    most = max(heads_of)
    places = [(layer, head) for layer, heads in enumerate(heads_of) for head in range(heads)]
    rows = pd.DataFrame(columns).iloc[[layer * most + head for layer, head in places]]
    return pd.DataFrame(places, columns=["layer", "head"]).join(rows.reset_index(drop=True))


def head_columns(attention: State) -> dict[str, list[float]]:
    """Measured columns of the heads table, L · H values each, layer by layer.

    entropy: mean over contexts and queries, nats; entropy_se: its standard error, contexts taken as independent
    (NaN for one). propagation: mean over the keys that the last query sees of
    the share of contexts in which they propagate (Bao et al. 2024, definition 1); where special tokens end every
    context ([SEP]), it is the last query before them. sink_first, sink_later: share
    of contexts with a sink at key 0, at a later key; sink_last, where special tokens end every context: at one of
    these, which are then no later key; sink_registers: likewise of the tokens between [CLS] and the patches of an
    image. sink_learned: mean mass on a learned sink column.
    previous_token: mean attention from positions 1 … T−1 to the one before. same_token: mean attention to all
    earlier equal tokens, over the queries that have one.
    """
    contexts = attention["contexts"].view(-1, 1)
    length = attention["entropy"].shape[-1]
    entropy = attention["entropy"].sum(dim=-1) / (contexts * length)
    spread = attention["entropy_spread"] / contexts
    columns = {
        "entropy": entropy,
        "entropy_se": (spread / torch.where(contexts > 1, contexts - 1, torch.nan)).sqrt(),
        "propagation": propagation_by_position(attention).nanmean(dim=-1),
        "sink_first": attention["sink"][:, :, 0] / contexts,
        "sink_later": attention["sink_later"] / contexts,
        "sink_learned": attention["learned"] / (contexts * length),
        "previous_token": attention["previous"] / (contexts * (length - 1)),
        "same_token": attention["same"] / attention["repeated"].view(-1, 1),  # 0/0 = NaN: no token came twice
    }
    for name in ("sink_last", "sink_registers"):
        if name in attention:
            columns[name] = attention[name] / contexts
    return {name: value.flatten().tolist() for name, value in columns.items()}


def head_arrays(attention: State) -> dict[str, Tensor]:
    """Per head and position, (L, H, T): entropy, empirical ρ, mean attention received, share of sinks.

    And (L, T): how many keys each query sees.
    """
    contexts = attention["contexts"].view(-1, 1, 1)
    return {
        "entropy_by_position": attention["entropy"] / contexts,
        "propagation_by_position": propagation_by_position(attention),
        "received_by_position": attention["received"] / contexts,
        "sink_by_position": attention["sink"] / contexts,
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
    attention: State, ids: Int[Tensor, "examples positions"], threshold: float, text: Callable[[int], str]
) -> pd.DataFrame:
    """Every token of the example contexts with the most attention that any head pays it on average."""
    received, layer = attention["example_received"].max(dim=0)
    head = attention["example_head"].gather(0, layer[None])[0].long()
    context, position = torch.meshgrid(*(torch.arange(n) for n in ids.shape), indexing="ij")
    return pd.DataFrame(
        {
            "context": context.flatten().numpy(),
            "position": position.flatten().numpy(),
            "token_id": ids.flatten().numpy(),
            "token": pd.Series([text(token) for token in ids.flatten().tolist()], dtype="object").astype(str),
            "received": received.flatten().numpy(),
            "layer": layer.flatten().numpy(),
            "head": head.flatten().numpy(),
            "sink": (received > threshold).flatten().numpy(),
        }
    )
