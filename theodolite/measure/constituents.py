"""Split logits by the parts of queries and keys, and measure how much of the logits' variance each carries.

The logit of a query and a key is bilinear in them, so it splits into the products of their parts, the constituents of
Song & Zhong 2024, section 5.2 (there called QK constituents).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Float64
from numpy.typing import NDArray
from torch import Tensor

from theodolite.accumulate.sums import State, each_part
from theodolite.attention.inputs import MASKED, AttentionInputs, softmax, weigh
from theodolite.corpus.groups import one_of_each_stretch
from theodolite.errors import UsageError
from theodolite.measure.column import BALANCE, CONSTITUENTS, Column, gives, head_places
from theodolite.measure.publications import SONG
from theodolite.theory.decomposition import PARTS
from theodolite.theory.unbiased import Jackknifed, ratio

COARSE: dict[str, tuple[str, ...]] = {"constant": ("mean", "bias"), "pos": ("pos",), "cvec": ("ctx", "resid")}
"""The coarser split of the paper (position and context), with what belongs to neither."""

GROUPS: dict[str, tuple[tuple[str, str], ...]] = {
    "position": (("pos", "pos"), ("pos", "constant"), ("constant", "pos")),
    "context": (("cvec", "cvec"), ("cvec", "constant"), ("constant", "cvec")),
    "cross": (("pos", "cvec"), ("cvec", "pos")),
    "constant": (("constant", "constant"),),
    "pos-pos": (("pos", "pos"),),
    "cvec-cvec": (("cvec", "cvec"),),
}
"""Sums of constituents, each with its sides (query, key): what needs the position and nothing of the context, the
reverse, both, or neither; a mean or a bias goes with what is on the other side. The last two are the paper's own
constituents, without mean and bias."""

DISJOINT = ("position", "context", "cross", "constant")
"""Those of `GROUPS` that share nothing and leave out nothing."""

ADDITIVE, QK, ATTENTION, CONSTANT = "additive", "QK", "attention", "constant"
"""Matrices of a head besides products of its parts: a bias on its logits, the logits, attention; and the parts mean and
bias together."""


MOST_POSITIONS = 128
"""Positions shown: seven panels of so many squared are under a megabyte of page."""


WITH_CONSTANTS = {sides: name for name in ("position", "context", CONSTANT) for sides in GROUPS[name]}
"""Matrices that mean and bias are within, by what is on the other side; all others are named after their sides."""

MOST_QUERIES = 256  # whose logits are summed, one of each of as many stretches of a context


@dataclass(frozen=True)
class Constituents:
    """One layer's logits, split by the parts of the query's and of the key's hidden state.

    With part a of the query and b of the key, `logits[h, a, b, i, j] = scaling · query[a, h, i] · key[b, h, j]`, and
    over all a and b, with `additive` (ALiBi or another bias on logits), they sum to `total`, the model's own logits
    before its softmax and any cap; learned sink columns are left out. Logits of pairs that `visible` hides are given
    too. All are computed when asked for, in float64, and lead with contexts, where there are several, then heads;
    `logits` takes parts² · T² numbers a head, so ask `logits_of(head)` where that is much.

    Attributes:
        names: of the parts; "mean", "pos", "ctx", "resid" and "bias" unless made coarser.
        query, key: parts of queries and keys after rotation, grouped keys repeated for their query heads.
        inputs: what the model's attention was given.
        rounding: relative difference of the parts from the model's own queries and keys, which is now in "resid".
    """

    names: tuple[str, ...]
    query: Float64[Tensor, "parts contexts heads positions head_width"]
    key: Float64[Tensor, "parts contexts heads positions head_width"]
    inputs: AttentionInputs
    rounding: float

    @property
    def logits(self) -> Float64[Tensor, "*contexts heads query_parts key_parts queries keys"]:
        """([contexts,] heads, parts, parts, positions, positions): query part, key part, query, key."""
        return self._squeezed(torch.einsum("achid,bchjd->chabij", self.query, self.key) * self.inputs.scaling)

    def logits_of(self, head: int) -> Float64[Tensor, "*contexts query_parts key_parts queries keys"]:
        """Compute the constituents of one head: ([contexts,] parts, parts, positions, positions)."""
        query, key = self.query[:, :, head], self.key[:, :, head]
        return self._squeezed(torch.einsum("acid,bcjd->cabij", query, key) * self.inputs.scaling)

    @property
    def additive(self) -> Float64[Tensor, "*contexts heads queries keys"]:
        """The bias added to a logit whatever query and key are: ([contexts,] heads, positions, positions)."""
        _, contexts, heads, length, _ = self.query.shape
        bias = self.inputs.bias
        values = self.query.new_zeros(1) if bias is None else bias.to(self.query)
        return self._squeezed(values.expand(contexts, heads, length, length))

    @property
    def total(self) -> Float64[Tensor, "*contexts heads queries keys"]:
        """The model's own logits, before a cap: ([contexts,] heads, positions, positions)."""
        query, key = self.inputs.query.to(self.query), self.inputs.key.to(self.query)
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        return self._squeezed(query @ key.transpose(-1, -2) * self.inputs.scaling) + self.additive

    @property
    def visible(self) -> Bool[Tensor, "*contexts heads queries keys"]:
        """The keys that each query sees: ([contexts,] heads, positions, positions)."""
        return self._squeezed(self.inputs.logits() > MASKED / 2)

    @property
    def attention(self) -> Float64[Tensor, "*contexts heads queries keys"]:
        """The attention weights, with cap, mask and sink: ([contexts,] heads, positions, positions)."""
        inputs = replace(self.inputs, query=self.inputs.query.double(), key=self.inputs.key.double())
        return self._squeezed(softmax(inputs.logits(), inputs.sink))

    def coarse(self, groups: Mapping[str, Iterable[str]] = COARSE) -> Constituents:
        """Merge parts into fewer, each the sum of some of these; every part is in one group.

        Raises:
            UsageError: a part is in no group or in two, or there is no such part.
        """
        members = {name: tuple(parts) for name, parts in groups.items()}
        if sorted(part for parts in members.values() for part in parts) != sorted(self.names):
            raise UsageError(f"each of the parts {', '.join(self.names)} must be in one group")

        def summed(parts: Tensor) -> Tensor:
            index = [[self.names.index(part) for part in group] for group in members.values()]
            return torch.stack([parts[i].sum(dim=0) for i in index])

        return replace(self, names=tuple(members), query=summed(self.query), key=summed(self.key))

    def _squeezed(self, values: Tensor) -> Tensor:
        return values[0] if self.query.shape[1] == 1 else values


def shares_of(sums: State) -> tuple[Jackknifed, Jackknifed]:
    """Compute shares (…, H, parts, parts) and the additive bias's (…, H), which sum to 1, from `share_sums`.

    NaN where logits are constant.
    """
    total = sums["total"].movedim(-2, 0)
    of_pairs = ratio(sums["products"].movedim(-4, 0), total[..., None, None])
    return of_pairs, ratio(sums["additive"].movedim(-2, 0), total)


def share_sums(
    query: Float[Tensor, "parts contexts heads positions head_width"],
    key: Float[Tensor, "parts contexts key_heads positions head_width"],
    inputs: AttentionInputs,
    trailing: int = 0,
    leading: int = 1,
) -> State:
    """Sum what each constituent adds to the variance of the logits, by context; softmax-invariant.

    Returns products (contexts, H, query parts, key parts), additive and total (contexts, H): shares are Σ products / Σ
    total over some contexts.

    Each row of logits is centred over the keys that its query sees; a constituent's product with the centred whole,
    summed over keys and rows, then adds up over constituents to the sum of squares of the whole. Logits are those
    before a cap. The first `leading` positions are left out as queries and as keys, whose tokens are outliers in most
    models, and so are `trailing` special tokens at the end. Of longer contexts `MOST_QUERIES` queries are summed, and
    all their keys.
    """
    end = inputs.key.shape[2] - trailing
    at_least, width = torch.promote_types(query.dtype, torch.float32), query.shape[-1]

    def work(part: slice) -> tuple[Tensor, Tensor, Tensor]:
        # Others of each context, so that the jackknife over contexts knows what choosing them does.
        chosen = leading + one_of_each_stretch(end - leading, MOST_QUERIES, part.start)
        own, some = inputs.of_contexts(part).of_queries(chosen), query[:, part, :, chosen]
        parts, contexts, heads = some.shape[:3]
        # The parts of a key side by side, so that one product with the centred logits serves them all.
        beside = key[:, part].to(at_least).permute(1, 2, 3, 0, 4).flatten(-2)
        products = torch.zeros(contexts, heads, parts, parts, dtype=torch.float64, device=query.device)
        additive, total = products.new_zeros(2, contexts, heads)
        for block in replace(own, softcap=None).blocks():
            visible = block.logits > MASKED / 2
            visible[..., : max(leading - block.first, 0)] = False
            visible[..., max(end - block.first, 0) :] = False
            logits = block.logits.masked_fill_(~visible, 0)
            mean = logits.sum(dim=-1, keepdim=True) / visible.sum(dim=-1, keepdim=True).clamp_min(1)
            centred = logits.sub_(mean).masked_fill_(~visible, 0)
            summed = weigh(centred, beside[:, :, block.first : block.last]).unflatten(-1, (parts, width))
            rows = some[:, :, :, block.start : block.stop].to(at_least) * inputs.scaling
            products += torch.einsum("achid,chibd->chab", rows, summed).double()
            total += torch.linalg.vector_norm(centred, dim=(-2, -1), dtype=torch.float64).square()
            if own.bias is not None:
                bias = own.bias[:, :, block.start : block.stop] if own.bias.shape[2] > 1 else own.bias
                bias = bias[..., block.first : block.last].to(at_least)
                additive += (centred * bias).sum(dim=(-2, -1), dtype=torch.float64)
        return products.cpu(), additive.cpu(), total.cpu()

    products, additive, total = zip(*each_part(work, query.shape[1], query.device), strict=True)
    return {"products": torch.cat(products), "additive": torch.cat(additive), "total": torch.cat(total)}


_SHARES = (
    (
        "position",
        "Share of the logits' variance across keys that depends on position only: pos on one side or both, mean or "
        "bias on the other. Negative: it cancels other constituents.",
        "",
    ),
    (
        "context",
        "The share that depends on context only, with mean or bias on the other side.",
        "Context is ctx and resid together, cvec.",
    ),
    ("cross", "The share with position on one side and context on the other.", "pos × cvec and cvec × pos."),
    (
        "constant",
        "The share with mean or bias on both sides: it depends on no token; with RoPE, on relative distance.",
        "It varies along a row by the norm's scale of each token.",
    ),
    (
        "additive",
        "The share of a bias that the model adds to its logits, such as ALiBi.",
        "The five shares add up to 1.",
    ),
)


@gives(
    *(
        Column(
            "heads",
            f"share_{part}",
            meaning,
            formula,
            f"{SONG}, section 5.2",
            f"logit share: {'both' if part == 'cross' else part}",
            range=BALANCE,
            group=CONSTITUENTS,
            rare=part == ADDITIVE,
            error="each context of the sample left out in turn (jackknife)",
        )
        for part, meaning, formula in _SHARES
    )
)
def share_columns(shares: State, refused: Collection[str]) -> dict[str, Jackknifed]:
    """Return shares of the disjoint groups, and of a bias, L · H values each, from the state of a `SharesPass`.

    They sum to 1; of layers that were `refused` (as text), whose logits could not be split, they are NaN.
    """
    of_pairs, additive = shares_of(shares)
    values, without = grouped(of_pairs.value), grouped(of_pairs.without)
    columns = {name: Jackknifed(values[name], without[name]) for name in DISJOINT} | {ADDITIVE: additive}
    split = torch.tensor([str(layer) not in refused for layer in range(len(additive.value))])
    known = {name: column.where(split[:, None]) for name, column in columns.items()}
    return {
        f"share_{name}": Jackknifed(of.value.flatten(), of.without.flatten(1)) for name, of in known.items()
    }


_constituent = partial(Column, "constituents")


@gives(
    *head_places("constituents"),
    _constituent(
        "query",
        "The part of the query.",
        "`mean`, `pos`, `ctx`, `resid` or `bias`; or `additive` and no key part: ALiBi or another bias on logits.",
        title="query part",
        names=(*PARTS, ADDITIVE),
    ),
    _constituent("key", "The part of the key.", "As the query's.", title="key part", names=(*PARTS, "")),
    _constituent(
        "share",
        "Share of the variance of the head's logits that the product of these parts carries.",
        "Rows centred over the keys that they see, Σ constituent · logit / Σ logit²; before any cap, without position "
        "0. Shares of a head sum to 1; one may be negative.",
        f"{SONG}, section 5.2",
    ),
    _constituent("standard_error", "Of the share, from leaving out one context at a time (jackknife)."),
)
def constituents_table(shares: State, refused: Collection[str], heads_of: Sequence[int]) -> pd.DataFrame:
    """Tabulate each layer, head and pair of parts, and the additive bias, of the layers that are not `refused`."""
    parts = [(query, key) for query in PARTS for key in PARTS] + [(ADDITIVE, "")]
    layers = [layer for layer in range(len(heads_of)) if str(layer) not in refused]
    places = [(layer, head) for layer in layers for head in range(heads_of[layer])]
    rows = [(*place, *names) for place in places for names in parts]
    table = pd.DataFrame(rows, columns=["layer", "head", "query", "key"])
    index = tuple(torch.tensor(places, dtype=torch.int64).reshape(-1, 2).T)
    of_pairs, additive = shares_of(shares)
    for name, values in (
        ("share", (of_pairs.value, additive.value)),
        ("standard_error", (of_pairs.error, additive.error)),
    ):
        both = torch.cat([values[0].flatten(-2), values[1][..., None]], dim=-1)
        table[name] = both[index].flatten().numpy()
    return table


def grouped(shares: Float[Tensor, "*heads query_parts key_parts"]) -> dict[str, Float[Tensor, "*heads"]]:
    """Sum the shares of each of `GROUPS` over its pairs of parts."""
    return {
        name: torch.stack([shares[..., query, key] for query, key in pairs]).sum(dim=0)
        for name, pairs in paired_groups().items()
    }


def paired_groups() -> dict[str, list[tuple[int, int]]]:
    """Return the pairs (query part, key part), indices into `PARTS`, of each of `GROUPS`."""
    return {
        name: [
            (PARTS.index(a), PARTS.index(b))
            for query, key in sides
            for a in COARSE[query]
            for b in COARSE[key]
        ]
        for name, sides in GROUPS.items()
    }


@dataclass(frozen=True)
class HeadMatrix:
    """A matrix of a head: values (n, n) of queries by keys, NaN where the query does not see the key.

    `share`: of the variance of the logits that the softmax sees; NaN for attention, and where logits do not vary.
    """

    name: str
    values: NDArray[np.float64]
    share: float


def head_matrices(
    split: Constituents, head: int, *, context: int = 0, first: int = 1, raw: bool = False
) -> list[HeadMatrix]:
    """Compute a head's four constituents, what is in neither, their sum, and the attention.

    "position" is pos × pos with the pairs of pos and a constant part (mean or bias), "context" the same of cvec;
    "constant" has the pairs of constant parts, "additive" is there where the family adds a bias to its logits. They sum
    to "QK", the model's own logits before a cap. Shares are those of a survey, whatever is shown.

    Args:
        split: from `constituents`, or made coarser into "pos", "cvec" and "constant".
        head, context: which.
        first: the first position shown, as query and key; `MOST_POSITIONS` are shown at most.
        raw: the logits as they are, with "pos-pos" and "cvec-cvec" as published, and pairs with a constant part in
            "constant"; else every row less its mean over the keys that the query sees (without position 0, unless it is
            shown), which the softmax does not notice.

    Raises:
        UsageError: no such head, context or position, or a split into other parts.
    """
    _, contexts, heads, length, _ = split.query.shape
    for what, number, of, count in (
        ("head", head, "layer has heads", heads),
        ("context", context, "split has contexts", contexts),
        ("position", first, "context has positions", length),
    ):
        if not 0 <= number < count:
            raise UsageError(f"{what} {number} does not exist: this {of} 0 to {count - 1}")
    if split.names == PARTS:
        split = split.coarse()
    if set(split.names) != {"pos", "cvec", CONSTANT}:
        raise UsageError(
            f"the parts are {', '.join(split.names)}: give all of them, or pos, cvec and constant"
        )
    own = slice(context, context + 1)
    inputs = split.inputs.of_heads([head]).of_contexts(own)
    inputs = replace(inputs, query=inputs.query.double(), key=inputs.key.double())
    queries, keys = (side[:, own, head : head + 1] for side in (split.query, split.key))
    of_head = replace(split, query=queries, key=keys, inputs=inputs)
    sums = share_sums(of_head.query, of_head.key, of_head.inputs)
    shares, additive_share = (of.value for of in shares_of(sums))
    matrices: dict[str, Tensor] = {}
    share_of: dict[str, float] = {}
    logits = of_head.logits_of(0).cpu()
    for a, query in enumerate(of_head.names):
        for b, key in enumerate(of_head.names):
            name = f"{query}-{key}"
            if not raw:
                name = WITH_CONSTANTS.get((query, key), name)
            elif CONSTANT in (query, key):
                name = CONSTANT
            matrices[name] = matrices.get(name, 0) + logits[a, b]
            share_of[name] = share_of.get(name, 0.0) + float(shares[0, a, b])
    if of_head.inputs.bias is not None:
        matrices[ADDITIVE], share_of[ADDITIVE] = of_head.additive[0].cpu(), float(additive_share[0])
    matrices[QK], share_of[QK] = of_head.total[0].cpu(), float(sum(share_of.values()))
    visible = of_head.visible[0].cpu()
    if not raw:
        over = visible.clone()
        over[:, : min(first, 1)] = False
        seen = over.sum(-1, keepdim=True).clamp_min(1)
        matrices = {name: of - (of * over).sum(-1, keepdim=True) / seen for name, of in matrices.items()}
    matrices[ATTENTION] = of_head.attention[0].cpu()
    window = slice(first, first + MOST_POSITIONS)
    return [
        HeadMatrix(
            name, of.masked_fill(~visible, math.nan)[window, window].numpy(), share_of.get(name, math.nan)
        )
        for name, of in matrices.items()
    ]
