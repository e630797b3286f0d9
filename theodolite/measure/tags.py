"""Tables of a trace from its sums: what each sink catches, the tag that it writes, in which layers the tag persists."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from theodolite.accumulate.sums import State, part_of
from theodolite.accumulate.tags import HEAD_OUTPUT, LATER, LOCAL
from theodolite.corpus.groups import GROUPS, Groups
from theodolite.measure import column
from theodolite.measure.column import Array, Column, array_without, gives, head_places, table_of
from theodolite.measure.publications import ZHANG
from theodolite.theory.outliers import MAD_TO_SD
from theodolite.theory.unbiased import Jackknifed, combined, ratio

KINDS = ("first", "later", "learned", "local")  # names of `FIRST`, `LATER`, `LEARNED_SINK`, `LOCAL`
NAMED = (KINDS[LATER], KINDS[LOCAL])  # kinds whose rows are of a token


OUTLIER_RATIO = 6.0
"""A dimension of a tag is an outlier from so many robust standard deviations on: 2e-9 of a Gaussian's."""

SHOWN_DIMENSIONS = 5
STRONGEST = 256  # so many sinks, those that tag most tokens, keep their tags by group of contexts
TRACED_HEADS = "heads of a trace"  # what declarations call the heads table of a trace


def _tag_columns(table: str) -> tuple[Column, ...]:
    """Declare the columns that sinks and heads both have: how strong a tag is in each layer."""
    declare = partial(Column, table)
    return (
        *head_places(table),
        declare("contexts", "Contexts with a sink."),
        declare("share", "Their share of all contexts."),
        declare(
            "tag",
            "Share of the variance of the head's output that lies between the tokens that it caught and all others "
            "(η²).",
            "Within contexts; empty where a sink catches every token or none.",
            f"{ZHANG}; η² is ours",
            error=column.LEFT_OUT,
            floor="tag_chance",
        ),
        declare(
            "tag_chance", "η² of a random grouping of as many tokens.", "1/(tokens − 1).", title="tag, chance"
        ),
        declare(
            "tag_shifted",
            "η² of the same grouping when shifted along the context by one to four fifths.",
            title="tag, shifted",
        ),
        declare("before", "η² in the residual stream that enters the head's block."),
        declare("after", "η² in the residual stream that leaves the head's block."),
        declare("released", "The largest η² of all later layers.", error=column.LEFT_OUT),
        declare("released_layer", "The layer of that η²; −1 where there is none.", title="released in"),
        declare(
            "gain",
            "`released` less `before`.",
            "Its error is for that layer alone; that it is the largest of several, the page of a trace accounts for.",
            error=column.LEFT_OUT,
        ),
    )


def layers_with_sinks(state: State) -> list[int]:
    """List the layers whose W_O `written` needs; layer 0 where none has a sink, for the shapes of nothing."""
    return state["by_head.keys"][:, 0].long().unique().tolist() or [0]


def written(state: State, layer: int, w_o: Float[Tensor, "heads value_width width"]) -> State:
    """Compute what the sinks and heads of one layer write into the residual stream, float64; layers join along rows.

    direction, value (sinks, d): each sink's tag and value vector through W_O; by_group (≤ 256, G, d): sums that are
    along the direction of `STRONGEST` sinks in each group of contexts, over the length of all, and by_group_row, which
    sinks these are; principal (heads, d): the leading direction of each head's output.
    """
    sinks, heads = part_of(state, "by_sink"), part_of(state, "by_head")
    weights = torch.stack([sinks["weight"], sinks["caught"]]).unsqueeze(2)
    sums = torch.stack([sinks["difference"].sum(dim=1), sinks["value"]])
    means = sums / torch.where(weights > 0, weights, torch.nan)
    w_o = w_o.double().cpu()
    of_layer, of_head = sinks["keys"][:, 0] == layer, sinks["keys"][:, 1].long()
    # One head at a time, in the order of keys: it may have many sinks.
    through = [means[:, of_layer & (of_head == head)] @ w_head for head, w_head in enumerate(w_o)]
    direction, value = torch.cat(through, dim=1)
    strongest = _by_strength(sinks)[:STRONGEST].sort().values
    strongest = strongest[of_layer[strongest]]
    by_group = sinks["difference"][strongest] @ w_o[of_head[strongest]]
    # The moment is A Aᵀ, so W_Oᵀ A Aᵀ W_O has the squared singular values of Aᵀ W_O.
    in_layer = heads["keys"][:, 0] == layer
    values, vectors = torch.linalg.eigh(heads["moment"][in_layer])
    root = values.clamp_min(0).sqrt().unsqueeze(-1) * vectors.mT
    principal = torch.linalg.svd(root @ w_o[heads["keys"][in_layer, 1].long()], full_matrices=False).Vh[:, 0]
    return {
        "direction": direction,
        "by_group": by_group / torch.linalg.vector_norm(by_group, dim=(1, 2), keepdim=True),
        "by_group_row": strongest,
        "value": value,
        "principal": principal,
    }


def _by_strength(sinks: State) -> Tensor:
    """Order the rows of sinks by the share of queries that they catch and tag."""
    between, total = sinks["squares"][:, :, HEAD_OUTPUT].sum(dim=1).unbind(dim=1)
    return (sinks["caught"] * between / total).nan_to_num(nan=-1.0).argsort(descending=True, stable=True)


_trace = partial(Column, "traces")


@gives(
    *_tag_columns("traces"),
    _trace(
        "kind",
        "What kind of sink it is.",
        "`first` (position 0), `later`, `learned`, or `local` (local) where asked for; a special token at the end "
        "([SEP]) is `later`, and is itself never counted as caught.",
        names=KINDS,
    ),
    _trace("token_id", "Of a later or local sink; −1 for the others."),
    _trace("token", "Its text; empty for the others.", kind="text"),
    _trace("position", "Its mean position."),
    _trace("received", "The attention that it receives on average.", title="attention received"),
    _trace("caught", "Share of all queries that it catches."),
    _trace(
        "alignment",
        "Cosine of the tag's direction and the sink's value vector.",
        "Both through W_O; below 1 where a head has several sinks.",
    ),
    _trace("value_ratio", "Length of the sink's value vector over the mean length of others."),
    _trace("dimension", "The largest dimension of the tag; −1: it has none."),
    _trace(
        "outlier_dimensions",
        "Dimensions beyond six robust standard deviations of the tag's components, five at most.",
        kind="text",
    ),
    _trace("tagged", "`caught` · `tag`, by which rows are ordered."),
    Array(
        "tag_direction",
        "(rows of traces, d)",
        "The mean difference in the residual stream between what the head gives the tokens that the sink caught and "
        "the others.",
    ),
    Array(
        "tag_by_group",
        "(≤ 256, 8, d)",
        "Of the first rows, the same by group of contexts, over the length of all, in float16.",
    ),
    *(array_without("traces", name) for name in ("share", "tag", "released")),
    Array(
        "release",
        "(rows of traces, L + 1)",
        "η² by residual layer, from what enters the block on; NaN before.",
    ),
    Array(
        "sink_places",
        "(places, 7)",
        "Where the sinks stand: layer, head (−1 at position 0, for any), context, position, token id, how often that "
        "token stands in the text after position 0, and the key by which the context is known again.",
    ),
)
def traces(
    state: State, written: State, contexts: int, length: int, text: Callable[[int], str]
) -> tuple[pd.DataFrame, dict[str, Tensor]]:
    """Tabulate the sinks (layer, head, kind, token), those that tag most tokens first, with their arrays."""
    sums = part_of(state, "by_sink")
    keys = sums["keys"].long()
    layer, head, kind, token = keys.T
    numbers, columns_of_tags, release = _tagged(sums, contexts)
    sinks, in_contexts = sums["sinks"], sums["contexts"]
    group = torch.bincount(Groups(contexts).of(torch.arange(contexts)), minlength=GROUPS)
    numbers["share"] = ratio(in_contexts.T, group[:, None])
    direction, value = written["direction"], written["value"]
    lengths = torch.linalg.vector_norm(direction, dim=1) * torch.linalg.vector_norm(value, dim=1)
    caught = sums["caught"] / (contexts * (length - 1))
    columns = {
        "layer": layer,
        "head": head,
        "kind": [KINDS[k] for k in kind.tolist()],
        "token_id": token,
        "token": [text(t) if KINDS[k] in NAMED else "" for k, t in keys[:, 2:].tolist()],
        "contexts": in_contexts.sum(dim=1).long(),
        "share": numbers["share"].value,
        "position": sums["position"] / sinks,
        "received": sums["received"] / sinks,
        "caught": caught,
        **columns_of_tags,
        "alignment": torch.where(lengths > 0, (direction * value).sum(dim=1) / lengths, torch.nan),
        "value_ratio": sums["value_length"] / sums["other_length"],
        **_dimensions(direction),
        "tagged": caught * columns_of_tags["tag"],
    }
    order = _by_strength(sums)
    strongest = torch.searchsorted(written["by_group_row"], order[:STRONGEST])
    arrays = {
        "tag_direction": direction[order].float(),
        "tag_by_group": written["by_group"][strongest].half(),
        "release": release[order],
    }
    arrays |= {
        f"traces.{name}{column.WITHOUT}": one[order].if_known(contexts >= GROUPS).without.float()
        for name, one in numbers.items()
    }
    return table_of(columns).iloc[order.numpy()].reset_index(drop=True), arrays


@gives(
    *_tag_columns(TRACED_HEADS),
    Array("principal_direction", "(rows of heads, d)", "The leading direction of the head's output."),
)
def traced_heads(state: State, written: State, contexts: int) -> tuple[pd.DataFrame, dict[str, Tensor]]:
    """Tabulate the heads that have a sink anywhere; η² is of the tokens of each sink, and those that none caught."""
    sums = part_of(state, "by_head")
    keys = sums["keys"].long()
    columns = {
        "layer": keys[:, 0],
        "head": keys[:, 1],
        "contexts": sums["contexts"].long(),
        "share": sums["contexts"] / contexts,
        **_tagged(sums, contexts)[1],
    }
    return table_of(columns), {"principal_direction": written["principal"].float()}


def _tagged(sums: State, contexts: int) -> tuple[dict[str, Jackknifed], dict[str, Tensor], Tensor]:
    """Compute `tag` and `released`, all columns of η² in the head's output and after it, and η² by residual layer."""
    layers = sums["keys"][:, 0].long()
    rows = torch.arange(len(layers))
    between, total = sums["squares"].transpose(0, 1).unbind(dim=3)
    eta = ratio(between, total).if_known(contexts >= GROUPS)
    stream = eta.value[:, 1 + HEAD_OUTPUT :]
    residual = torch.arange(stream.shape[1])
    release = torch.where(residual >= layers[:, None], stream, torch.nan)
    later = residual > layers[:, None]
    best = torch.where(later, release.nan_to_num(nan=-1.0), -torch.inf).argmax(dim=1)
    tag = eta[rows, torch.full_like(layers, HEAD_OUTPUT)]
    before, after, released = (eta[rows, 1 + HEAD_OUTPUT + at] for at in (layers, layers + 1, best))
    numbers = {"tag": tag, "before": before, "after": after, "released": released}
    numbers["gain"] = combined(torch.sub, released, before)
    whole = total.sum(dim=0)[:, HEAD_OUTPUT]
    columns = {name: of.value for name, of in numbers.items()}
    columns |= {f"{name}_se": numbers[name].error for name in ("tag", "released", "gain")}
    columns |= {
        "tag_chance": sums["chance"] / whole,
        "tag_shifted": sums["chance_of_runs"] / whole,
        "released_layer": torch.where(released.value.isnan(), -1, best),
    }
    return {"tag": tag, "released": released}, columns, release


def _dimensions(direction: Tensor) -> dict[str, Tensor | list[str]]:
    """Find the largest dimension of each tag (−1: it has none), and its outliers."""
    size = torch.nan_to_num(direction).abs()
    limit = OUTLIER_RATIO * MAD_TO_SD * size.median(dim=1, keepdim=True).values
    order = size.argsort(dim=1, descending=True, stable=True)[:, :SHOWN_DIMENSIONS]
    outliers = [
        " ".join(str(d) for d in dims.tolist() if value[d] > bound)
        for dims, value, bound in zip(order, size, limit, strict=True)
    ]
    largest = torch.where(size.amax(dim=1) > 0, order[:, 0], -1)
    return {"dimension": largest, "outlier_dimensions": outliers}
