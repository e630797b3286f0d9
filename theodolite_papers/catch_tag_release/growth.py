"""Follow massive activations through the layers: where each appears, how suddenly, and whether it stays."""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from theodolite import Corpus, OpenModel
from theodolite.models.guard import measures
from theodolite.models.hooks import Hooks, hooked
from theodolite.passes.corpus_pass import batch_of
from theodolite.sinks.outliers import Outliers

FOLLOWED_CONTEXTS = 64
"""Contexts in which massive activations are followed, at most: a fixed cost."""

MASSIVE_SHARE = 0.5
"""A followed activation is massive in a layer where at least this share of its places are."""

ANY_TOKEN = -1
"""Token id of what is followed at position 0: it is massive there whatever the token."""

LIFE = ["dimension", "token_id", "first"]
"""What tells one massive activation from another."""

GROWTH = [*LIFE[:2], "token", "first", "places", "layer", "value", "share", "appears", "vanishes", "rise"]


class _Values(Hooks):
    """Values of the residual stream at some places of a batch (context, position, dimension), layer by layer."""

    def __init__(self, places: tuple[Tensor, ...]) -> None:
        self.places = places
        self.layers: list[Tensor] = []

    def stream(self, layer: int, hidden: Tensor) -> None:
        self.layers.append(hidden[self.places].double().cpu())


@measures("model")
def follow(model: OpenModel, corpus: Corpus, found: Outliers) -> pd.DataFrame:
    """Follow every massive (dimension, token) that was found in a text through all layers.

    In `FOLLOWED_CONTEXTS` contexts at most, which hold the most frequent ones; position 0 under one name, `ANY_TOKEN`.

    Returns:
        A row for each activation and layer. places: followed; value: mean; share: of the places that are massive in
        this layer; and the columns of `life`.
    """
    if found.massive.empty:
        return pd.DataFrame(columns=GROWTH)
    marked = _marked(found)
    chosen = _chosen(marked, found.massive, len(corpus.contexts))
    followed = marked[marked["context"].isin(chosen)]
    followed = followed.assign(token_id=followed["token_id"].where(~followed["first"], ANY_TOKEN))
    places = followed[[*LIFE, "context", "position"]].drop_duplicates()
    some, row = corpus.subset(torch.tensor(chosen)), np.searchsorted(chosen, places["context"])
    values = np.empty((len(places), model.layers + 1))
    for part in some.batches(batch_of(some, None)):
        here = (part.start <= row) & (row < part.stop)
        position, dimension = (
            torch.from_numpy(places[of].to_numpy()[here]) for of in ("position", "dimension")
        )
        tap = _Values((torch.from_numpy(row[here] - part.start), position, dimension))
        with hooked(model, tap):
            model.forward(some.inputs(part))
        values[here] = torch.stack(tap.layers, dim=1).numpy()
    counts = places.groupby(LIFE).size()
    means = pd.DataFrame(values, pd.MultiIndex.from_frame(places[LIFE])).groupby(level=LIFE).mean()
    massive = followed.groupby([*LIFE, "layer"]).size().unstack(fill_value=0)
    shares = massive.reindex(columns=means.columns, fill_value=0).div(counts, axis=0)
    text = dict(zip(found.massive["token_id"], found.massive["token"], strict=True)) | {ANY_TOKEN: "any"}
    tables = []
    for key, value in means.iterrows():
        share = shares.loc[key].to_numpy()
        names = dict(zip(LIFE, key, strict=True)) | {"token": text[key[1]], "places": counts[key]}
        rows = {"layer": means.columns, "value": value.to_numpy(), "share": share}
        tables.append(pd.DataFrame(names | rows).assign(**life(value.to_numpy(), share)))
    return pd.concat(tables, ignore_index=True)[GROWTH]


def _marked(found: Outliers) -> pd.DataFrame:
    """List where values are massive: layer, dimension, token_id, first, context, position.

    Of position 0 it is known in which contexts some dimension is massive, and with which tokens each: with all of them.
    """
    columns = ["layer", "dimension", "context", "position", "token_id"]
    places = pd.DataFrame(found.places[:, :5].numpy(), columns=columns)
    at_0 = places.query("position == 0").drop(columns="dimension")
    first = found.massive.loc[found.massive["first"], ["layer", "dimension", "token_id"]]
    first = first.merge(at_0, on=["layer", "token_id"])
    return pd.concat([places.query("position > 0").assign(first=False), first.assign(first=True)])


def _chosen(marked: pd.DataFrame, massive: pd.DataFrame, contexts: int) -> list[int]:
    """Choose contexts with an example of each activation, the frequent first, filled up with evenly spread others."""
    keys = ["layer", *LIFE]
    frequent = massive.sort_values("contexts", ascending=False, kind="stable")
    examples = frequent.merge(marked.groupby(keys, as_index=False)["context"].min(), on=keys, how="left")
    examples["token_id"] = examples["token_id"].where(~examples["first"], ANY_TOKEN)
    examples = examples.drop_duplicates(LIFE)["context"]
    spread = np.linspace(0, contexts - 1, min(FOLLOWED_CONTEXTS, contexts)).round().astype(int)
    return sorted(list(dict.fromkeys([*examples.tolist(), *spread.tolist()]))[:FOLLOWED_CONTEXTS])


def life(value: np.ndarray, share: np.ndarray) -> dict[str, float]:
    """Find where an activation appears and vanishes, and how suddenly it rises: columns of `growth`, NaN for never.

    Args:
        value: mean at every layer. share: of its places that are massive there.
    """
    massive_in = np.flatnonzero(share >= MASSIVE_SHARE)
    size = np.abs(value)
    rise = float(np.diff(size, prepend=0.0).max() / max(size.max(), np.finfo(np.float64).tiny))
    if not len(massive_in):
        return {"appears": np.nan, "vanishes": np.nan, "rise": rise}
    last = int(massive_in[-1])
    return {
        "appears": float(massive_in[0]),
        "vanishes": np.nan if last == len(value) - 1 else float(last + 1),
        "rise": rise,
    }
