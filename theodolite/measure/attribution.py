"""Attribute a head's attention pattern to constituents: recompute it with each alone, and without it.

A causal check on attention itself: the logits of some constituents are kept or taken away, masks, caps and learned
sinks stay, and the attention that follows is scored as the head's own is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from theodolite.accumulate.sums import State, each_part
from theodolite.attention.inputs import MASKED, AttentionInputs
from theodolite.measure.column import Column, gives, head_places
from theodolite.measure.constituents import ADDITIVE, COARSE, GROUPS, grouped, share_sums, shares_of
from theodolite.measure.head_roles import ATTENTION_PATTERNS
from theodolite.measure.publications import SONG
from theodolite.theory.decomposition import PARTS

ATTRIBUTED = (*GROUPS, ADDITIVE)
"""The groups of constituents, and the bias that a family may add to logits."""


@dataclass(frozen=True)
class Pattern:
    """Attention from each query i of `queries` to key i − `distance`; its mean is a head's score."""

    name: str
    distance: int
    queries: range


@dataclass(frozen=True)
class Attribution:
    """Scores of some heads, and of each of `ATTRIBUTED` the share of logit variance, and the scores with it
    only and without it. `uniform` are the scores of uniform attention over the keys that a query sees.
    """

    score: Float[Tensor, "patterns heads"]
    uniform: Float[Tensor, "patterns heads"]
    share: Float[Tensor, "groups heads"]
    only: Float[Tensor, "groups patterns heads"]
    without: Float[Tensor, "groups patterns heads"]


def scores_by_context(
    inputs: AttentionInputs, patterns: list[Pattern]
) -> Float[Tensor, "contexts patterns heads"]:
    """Average attention along each pattern, over the pattern's queries."""

    def work(part: slice) -> Tensor:
        own = inputs.of_contexts(part)
        return _along(own.logits(), own.sink, patterns)

    return torch.cat(each_part(work, len(inputs.query), inputs.query.device)).cpu()


def attribute(
    query: Float[Tensor, "parts contexts heads positions head_width"],
    key: Float[Tensor, "parts contexts heads positions head_width"],
    inputs: AttentionInputs,
    patterns: list[Pattern],
) -> Attribution:
    """Attribute patterns of heads, given the parts of their queries and keys and what attention was given.

    `inputs` holds the same heads, one key head for each (`of_heads` of a list).
    """
    shares, additive = shares_of(share_sums(query, key, inputs))

    def work(part: slice) -> Tensor:
        variants = _variants(query[:, part], key[:, part], inputs.of_contexts(part))
        return torch.stack([_along(logits, sink, patterns) for logits, sink in variants])

    parts = each_part(work, len(inputs.query), inputs.query.device)
    score, uniform, *of_groups = torch.cat(parts, dim=1).mean(dim=1).cpu()
    share = torch.stack([*grouped(shares.value).values(), additive.value])
    only, without = (torch.stack(of_groups[start::2]) for start in (0, 1))
    return Attribution(score, uniform, share, only, without)


def _variants(query: Tensor, key: Tensor, inputs: AttentionInputs) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield masked logits and sink: the head's, those of uniform attention, of each group only, and without it."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    query_of, key_of = (
        {
            name: sides[[PARTS.index(part) for part in parts]].sum(dim=0, dtype=dtype)
            for name, parts in COARSE.items()
        }
        for sides in (query, key)
    )

    def products(left: Tensor, right: Tensor) -> Tensor:
        return left @ right.transpose(-1, -2) * inputs.scaling

    whole = products(inputs.query.to(dtype), inputs.key.to(dtype))
    pairs = {(a, b): products(query_of[a], key_of[b]) for a in COARSE for b in COARSE}
    unbiased, sink = replace(inputs, bias=None), inputs.sink
    yield inputs.finished(whole.clone(), 0, 0), sink
    yield unbiased.finished(torch.zeros_like(whole), 0, 0), None
    for sides in GROUPS.values():
        only = torch.stack([pairs[pair] for pair in sides]).sum(dim=0)
        without = whole - only
        yield unbiased.finished(only, 0, 0), sink
        yield inputs.finished(without, 0, 0), sink
    yield inputs.finished(torch.zeros_like(whole), 0, 0), sink
    yield unbiased.finished(whole, 0, 0), sink


def _along(logits: Tensor, sink: Tensor | None, patterns: list[Pattern]) -> Tensor:
    """Average the attention that is paid along each pattern, (contexts, patterns, heads)."""
    normaliser = logits.logsumexp(dim=-1)
    if sink is not None:
        normaliser = torch.logaddexp(normaliser, sink.to(normaliser).view(1, -1, 1))
    scores = []
    for pattern in patterns:
        query = torch.tensor(pattern.queries, device=logits.device)
        own = logits[:, :, query, query - pattern.distance]
        paid = (own - normaliser[:, :, query]).exp().masked_fill(own <= MASKED / 2, 0)
        scores.append(paid.mean(dim=-1, dtype=torch.float64))
    return torch.stack(scores, dim=1)


_column = partial(Column, "attribution")
_COLUMNS = (
    *head_places("attribution"),
    _column(
        "pattern",
        "The pattern that the head follows, on random tokens, twice.",
        "`induction`: from the second copy to the token after the first; `previous`: to the token before; `same`: from "
        "the second copy to the same token of the first.",
        names=tuple(ATTENTION_PATTERNS),
    ),
    _column("score", "Mean attention paid along the pattern."),
    _column(
        "group",
        "A group of constituents of the logits.",
        "`position`, `context`, `cross`, `constant`, `additive`, as in the columns `share_…` of heads; and within the "
        "first two the paper's own constituents `pos-pos` and `cvec-cvec`, without mean and bias.",
        f"{SONG}, section 5.2",
        names=ATTRIBUTED,
    ),
    _column("share", "Share of the logits' variance on these sequences that the group carries."),
    *(
        _column(
            name,
            f"The score of attention recomputed from the logits {of} this group.",
            "Masks, caps and learned sinks stay.",
        )
        for name, of in (("only", "of only"), ("without", "without"))
    ),
    _column("uniform", "The score of uniform attention over the visible keys."),
)
COLUMNS = [column.name for column in _COLUMNS]


@gives(*_COLUMNS)
def attribution_table(attribution: State) -> pd.DataFrame:
    """Tabulate each head, pattern and group of constituents, from the state of a `PatternPass`."""
    table = pd.DataFrame(attribution["numbers"].numpy(), columns=COLUMNS)
    table = table.sort_values(["pattern", "score"], ascending=[True, False], kind="stable", ignore_index=True)
    for name, words in (("pattern", tuple(ATTENTION_PATTERNS)), ("group", ATTRIBUTED)):
        table[name] = pd.Series([words[int(number)] for number in table[name]], dtype="str")
    return table.astype({"layer": "int64", "head": "int64"})
