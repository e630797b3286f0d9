"""Attribute a head's attention pattern to constituents: recompute it with each alone, and without it.

A causal check on attention itself: the logits of some constituents are kept or taken away, masks, caps and
learned sinks stay, and the attention that follows is scored as the head's own is. Nothing here sees a model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from theodolite.accumulate.sums import State, contexts_in_cache, each_part
from theodolite.attention.inputs import BLOCK, MASKED, AttentionInputs
from theodolite.measure.column import BALANCE, SHARE, Column, gives, head_places
from theodolite.measure.constituents import ADDITIVE, COARSE, GROUPS, grouped, share_sums
from theodolite.measure.head_roles import ATTENTION_PATTERNS
from theodolite.measure.publications import SONG
from theodolite.theory.decomposition import PARTS

ATTRIBUTED = (*GROUPS, ADDITIVE)
"""The groups of constituents, and the bias that a family may add to logits."""

Result = TypeVar("Result")


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
        sums = _nothing_paid(own, patterns)
        for block in own.blocks():
            _Along(block.start, block.stop, block.first, block.last, patterns).pay(
                block.logits, own.sink, sums
            )
        return sums

    return _mean_of(_each_part(work, inputs), patterns)


def attribute(
    query: Float[Tensor, "parts contexts heads positions head_width"],
    key: Float[Tensor, "parts contexts heads positions head_width"],
    inputs: AttentionInputs,
    patterns: list[Pattern],
) -> Attribution:
    """Attribute patterns of heads, given the parts of their queries and keys and what attention was given.

    `inputs` holds the same heads, one key head for each (`of_heads` of a list).
    """
    shares, additive = share_sums(query, key, inputs).shares()
    parts = _each_part(
        lambda part: _scores_of_groups(query[:, part], key[:, part], inputs.of_contexts(part), patterns),
        inputs,
    )
    score, uniform, *of_groups = (
        _mean_of([scores[variant] for scores in parts], patterns).mean(dim=0)
        for variant in range(len(parts[0]))
    )
    return Attribution(
        score=score,
        uniform=uniform,
        share=torch.stack([*grouped(shares.value).values(), additive.value]),
        only=torch.stack(of_groups[0::2]),
        without=torch.stack(of_groups[1::2]),
    )


def _scores_of_groups(
    query: Tensor, key: Tensor, inputs: AttentionInputs, patterns: list[Pattern]
) -> list[Float[Tensor, "contexts patterns heads"]]:
    """Sum attention along each pattern: of the head, of uniform attention, and of each group only and without it."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    query_of, key_of = (
        {name: parts[_members(name)].sum(dim=0, dtype=dtype) for name in COARSE} for parts in (query, key)
    )
    own_query, own_key = inputs.query.to(dtype), inputs.key.to(dtype)
    unbiased = replace(inputs, bias=None)
    sums = [_nothing_paid(inputs, patterns) for _ in range(2 + 2 * len(ATTRIBUTED))]
    for start, stop, first, last in inputs.spans():
        along = _Along(start, stop, first, last, patterns)

        def logits(
            left: Tensor, right: Tensor, rows: slice = slice(start, stop), keys: slice = slice(first, last)
        ) -> Tensor:
            return left[:, :, rows] @ right[:, :, keys].transpose(-1, -2) * inputs.scaling

        whole = logits(own_query, own_key)
        pairs = {(a, b): logits(query_of[a], key_of[b]) for a in COARSE for b in COARSE}
        nothing = torch.zeros_like(whole)
        variants = [(inputs, whole.clone(), inputs.sink), (unbiased, nothing.clone(), None)]
        for sides in GROUPS.values():
            only = torch.stack([pairs[pair] for pair in sides]).sum(dim=0)
            variants += [(unbiased, only, inputs.sink), (inputs, whole - only, inputs.sink)]
        variants += [(inputs, nothing, inputs.sink), (unbiased, whole, inputs.sink)]
        for of_variant, (rules, products, sink) in zip(sums, variants, strict=True):
            along.pay(rules.finished(products, start, first), sink, of_variant)
    return sums


class _Along:
    """The pairs of a block's queries and keys that are along each pattern."""

    def __init__(self, start: int, stop: int, first: int, last: int, patterns: list[Pattern]) -> None:
        every = torch.arange(start, stop)
        self.pairs = []
        for pattern in patterns:
            key = every - pattern.distance
            inside = (
                (every >= pattern.queries.start)
                & (every < pattern.queries.stop)
                & (key >= first)
                & (key < last)
            )
            self.pairs.append((every[inside] - start, key[inside] - first))

    def pay(
        self,
        logits: Float[Tensor, "contexts heads rows keys"],
        sink: Float[Tensor, " heads"] | None,
        sums: Float[Tensor, "contexts patterns heads"],
    ) -> None:
        """Add the attention that is paid along each pattern to `sums`."""
        normaliser = logits.logsumexp(dim=-1)
        if sink is not None:
            normaliser = torch.logaddexp(normaliser, sink.to(normaliser).view(1, -1, 1))
        for number, (row, key) in enumerate(self.pairs):
            own = logits[:, :, row, key]
            paid = (own - normaliser[:, :, row]).exp().masked_fill(own <= MASKED / 2, 0)
            sums[:, number] += paid.sum(dim=2, dtype=torch.float64)


def _each_part(work: Callable[[slice], Result], inputs: AttentionInputs) -> list[Result]:
    contexts, heads, queries, _ = inputs.query.shape
    at_once = contexts_in_cache(heads * min(BLOCK, queries) * inputs.key.shape[2])
    return each_part(work, contexts, inputs.query.device, at_once)


def _nothing_paid(
    inputs: AttentionInputs, patterns: list[Pattern]
) -> Float[Tensor, "contexts patterns heads"]:
    contexts, heads = inputs.query.shape[:2]
    return torch.zeros(contexts, len(patterns), heads, dtype=torch.float64, device=inputs.query.device)


def _mean_of(sums: list[Tensor], patterns: list[Pattern]) -> Float[Tensor, "contexts patterns heads"]:
    return torch.cat(sums).cpu() / torch.tensor([len(pattern.queries) for pattern in patterns])[:, None]


_share = partial(Column, "attribution", range=SHARE)
_COLUMNS = (
    *head_places("attribution"),
    Column(
        "attribution",
        "pattern",
        "The pattern that the head follows, on random tokens, twice.",
        "`induction`: from the second copy to the token after the first; `previous`: to the token before; `same`: from "
        "the second copy to the same token of the first.",
        names=tuple(ATTENTION_PATTERNS),
    ),
    _share("score", "Mean attention paid along the pattern."),
    Column(
        "attribution",
        "group",
        "A group of constituents of the logits.",
        "`position`, `context`, `cross`, `constant`, `additive`, as in the columns `share_…` of heads; and within the "
        "first two the paper's own constituents `pos-pos` and `cvec-cvec`, without mean and bias.",
        f"{SONG}, section 5.2",
        names=ATTRIBUTED,
    ),
    _share(
        "share", "Share of the logits' variance on these sequences that the group carries.", range=BALANCE
    ),
    *(
        _share(
            name,
            f"The score of attention recomputed from the logits {of} this group.",
            "Masks, caps and learned sinks stay.",
        )
        for name, of in (("only", "of only"), ("without", "without"))
    ),
    _share("uniform", "The score of uniform attention over the visible keys."),
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


def _members(group: str) -> list[int]:
    return [PARTS.index(part) for part in COARSE[group]]
