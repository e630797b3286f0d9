"""Tags: the vectors that sinks write into the tokens they catch, and in which layers they persist; sums over a corpus.

The tag of a sink is the difference of a head's output between the tokens that it caught and the others; its strength is
η², the share of the head's variance within contexts that the grouping explains (between over total sum of squares). The
release is the η² of the same grouping in the residual stream of every later layer. A context in which a sink catches
all tokens or none has no two groups to compare, and adds nothing to η².
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from theodolite.accumulate.sums import KeyedSums, LayerSums, Marked
from theodolite.attention.catches import LEARNED, Catches, between_and_total, sums_of_squares
from theodolite.corpus.groups import GROUPS, Groups

FIRST, LATER, LEARNED_SINK, LOCAL = 0, 1, 2, 3
"""Kinds of sinks: position 0, a later token, a learned sink, a local sink."""

SHIFTS = 4
"""By how many parts of a context, of one more, a grouping is shifted to see what one with its runs explains."""

HEAD_OUTPUT = 0  # where η² is of a head's own output; residual layer ℓ has 1 + ℓ


class Tags(LayerSums):
    """Sums of a trace by sink (layer, head, kind, token) and by head (layer, head).

    By sink: contexts (G) in which it is one; sinks; position; received attention; caught queries; weight n₁n₀/n of the
    two groups, and weighted by it the difference of their mean outputs (G, value_width); by caught queries the sink's
    value vector (value_width), its length and the mean length of others.

    By head: contexts; moment (value_width, value_width) of its output, centred within contexts.

    By both: squares (G, 2 + layers, 2), sums of squares between the groups of tokens and in total; of the head's output
    chance, the sum of squares that a random grouping explains on average, and chance_of_runs, the one that the grouping
    explains on average when it is shifted along the context.
    """

    def __init__(self, layers: int, value_width: int, contexts: int) -> None:
        self._groups = Groups(contexts)
        both = {"squares": (GROUPS, 2 + layers, 2), "chance": (), "chance_of_runs": ()}
        single = ("sinks", "position", "received", "caught", "weight", "value_length", "other_length")
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(single, ())
        shapes |= {"contexts": (GROUPS,), "difference": (GROUPS, value_width), "value": (value_width,)}
        self.by_sink = KeyedSums(4, shapes | both)
        self.by_head = KeyedSums(2, {"contexts": (), "moment": (value_width, value_width)} | both)
        self.marked = Marked()
        keyed = {"by_sink": self.by_sink, "by_head": self.by_head, "marked": self.marked}
        super().__init__(layers, {}, keyed=keyed)

    def update(
        self,
        layer: int,
        catches: Catches,
        ids: Int[Tensor, " positions"],
        sums: dict[str, Tensor],
        context: int,
    ) -> tuple[Tensor, Tensor]:
        """Add the terms of one layer of one context; returns the rows of its sinks and of its heads."""
        ids, position, head = ids.cpu(), catches.position.cpu(), catches.head.cpu()
        kind = torch.where(position == 0, FIRST, torch.where(position == LEARNED, LEARNED_SINK, LATER))
        kind = torch.where(catches.local.cpu() & (position > 0), LOCAL, kind)
        # What token stands first does not matter, and a learned column has none.
        named = (kind == LATER) | (kind == LOCAL)
        token = torch.where(named, ids[position.clamp_min(0)], -1)
        sinks = self.by_sink.rows(torch.stack([torch.full_like(head, layer), head, kind, token], dim=1))
        at, of = position[position != LEARNED], head[position != LEARNED]
        self.marked.mark(layer, of, torch.full_like(at, context), at, ids[at])
        sums, group = dict(sums), self._group_of(context)
        self.by_sink.at("difference")[:, group].index_add_(0, sinks, sums.pop("difference").cpu())
        catching = head.unique()
        heads = self.by_head.rows(torch.stack([torch.full_like(catching, layer), catching], dim=1))
        of_heads = ("contexts", "moment", "chance", "chance_of_runs")
        self.by_head.add(heads, {name: sums.pop(f"head_{name}") for name in of_heads})
        self.by_sink.add(sinks, sums)
        self.by_sink.count_contexts(sinks, torch.full_like(sinks, context), self._groups)
        return sinks, heads

    def _group_of(self, context: int) -> int:
        return int(self._groups.of(torch.tensor(context)))

    def add_place(
        self, rows: tuple[Tensor, Tensor], place: int, squares: dict[str, Tensor], context: int
    ) -> None:
        """Add one context's sums of squares at a place, HEAD_OUTPUT or 1 + residual layer."""
        group = self._group_of(context)
        for sums, of_rows, of in ((self.by_sink, rows[0], ""), (self.by_head, rows[1], "head_")):
            sums.at("squares")[:, group, place].index_add_(0, of_rows, squares[of + "squares"].cpu())


def measured(
    catches: Catches,
    output: Float[Tensor, "catching_heads positions value_width"],
    value: Float[Tensor, "catching_heads positions value_width"],
    metric: Float[Tensor, "catching_heads value_width value_width"],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Compute one layer's and context's terms of `Tags.update`, and of `Tags.add_place` at HEAD_OUTPUT.

    Of the heads that have sinks: their output before W_O, the value of every key, and W_O W_Oᵀ.
    """
    of, counted = catches.of, catches.counted.double()
    output, value = output.double(), value.double()
    caught = catches.caught.double()
    totals = torch.einsum("ht,htv->hv", counted, output)
    sums = torch.einsum("st,stv->sv", caught, output[of])
    mean = totals / counted.sum(dim=1, keepdim=True).clamp_min(1)
    centred = (output - mean.unsqueeze(1)) * counted.unsqueeze(-1)
    moment = centred.mT @ centred
    # Of a short context, all tokens may be sinks, and none is counted.
    size, all_counted = caught.sum(dim=1), counted.sum(dim=1).clamp_min(1)[of]
    # Centred sums, and centred squares: nothing is lost to a vector that is common to all tokens.
    centred_sums = sums - size.unsqueeze(1) * mean[of]
    squares = (moment * metric).sum(dim=(1, 2))
    between, total, groups, whole_total = sums_of_squares(centred_sums, squares, catches, metric)
    divided = split, more = _divided(catches)
    tokens = counted.sum(dim=1)
    weight = size * (all_counted - size) / all_counted
    runs = [
        sums_of_squares(
            torch.einsum("st,stv->sv", moved.caught.double(), centred[catches.of]), squares, moved, metric
        )
        for moved in shifted_groups(catches)
    ]
    of_runs, _, whole_of_runs, _ = (torch.stack(each).mean(dim=0) for each in zip(*runs, strict=True))
    length = torch.linalg.vecdot(value @ metric, value).clamp_min(0).sqrt()
    at = catches.position.clamp_min(0)
    sink_value = value[of, at] * (catches.position != LEARNED).unsqueeze(1)
    sink_length = length[of, at] * (catches.position != LEARNED)
    others = (length * counted).sum(dim=1)[of] / all_counted
    sums_of_sink = {
        "sinks": torch.ones_like(size),
        "position": catches.position.double(),
        "received": catches.received,
        "caught": size,
        "weight": weight,
        # n₁n₀/n · (m₁ − m₀) is the centred sum itself.
        "difference": centred_sums,
        "value": sink_value * size.unsqueeze(1),
        "value_length": sink_length * size,
        "other_length": others * size,
        # A random grouping explains (groups − 1)/(tokens − 1) of the total on average, exactly.
        "chance": total * split / (tokens - 1).clamp_min(1)[of],
        "head_contexts": torch.ones(len(counted)),
        "head_moment": moment,
        "head_chance": whole_total * more / (tokens - 1).clamp_min(1),
        "chance_of_runs": of_runs * split,  # of one group, rounding would be left
        "head_chance_of_runs": whole_of_runs,
    }
    return sums_of_sink, _squares(between, total, groups, whole_total, *divided)


def shifted_groups(catches: Catches) -> list[Catches]:
    """Shift groups of tokens cyclically along the context, by 1, 2, … parts of `SHIFTS` + 1; runs keep their length."""
    counted, number = catches.counted, catches.counted.cumsum(dim=1) - 1
    order = torch.argsort((~counted).byte(), dim=1, stable=True)
    count = counted.sum(dim=1, keepdim=True).clamp_min(1)
    moved = []
    for part in range(1, SHIFTS + 1):
        source = order.gather(1, (number + count * part // (SHIFTS + 1)).clamp_min(0) % count)
        caught = catches.caught.gather(1, source[catches.of]) & counted[catches.of]
        moved.append(replace(catches, caught=caught))
    return moved


def released(catches: Catches, hidden: Float[Tensor, "positions width"]) -> dict[str, Tensor]:
    """Compute one residual layer's and context's terms of `Tags.add_place`."""
    return _squares(*between_and_total(hidden.double(), catches), *_divided(catches))


def _squares(
    between: Tensor, total: Tensor, groups: Tensor, whole: Tensor, split: Tensor, more: Tensor
) -> dict[str, Tensor]:
    """Collect sums of squares between and in total, by sink and by head: zeros where there are no two groups."""
    return {
        "squares": torch.stack([between, total], dim=1) * split.unsqueeze(1),
        "head_squares": torch.stack([groups, whole], dim=1) * (more > 0).unsqueeze(1),
    }


def _divided(catches: Catches) -> tuple[Tensor, Tensor]:
    """Mark the sinks that catch some tokens and not all, and count the groups of each head's tokens less one."""
    tokens, size = catches.counted.sum(dim=1).double(), catches.caught.sum(dim=1).double()
    filled = torch.zeros_like(tokens).index_add_(0, catches.of, (size > 0).double())
    uncaught = tokens - torch.zeros_like(tokens).index_add_(0, catches.of, size)
    more = (filled + (uncaught > 0) - 1).clamp_min(0)
    return (size > 0) & (size < tokens[catches.of]), more
