"""Attribute a head's attention pattern to constituents: recompute it with each alone, and without it.

A causal check on attention itself: the logits of some constituents are kept or taken away, masks, caps and
learned sinks stay, and the attention that follows is scored as the head's own is. Nothing here sees a model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from theodolite.accumulate.sums import State, each_part
from theodolite.attention.inputs import BLOCK, AttentionInputs, softmax
from theodolite.measure.column import BALANCE, SHARE, Column, gives, head_places
from theodolite.measure.constituents import ADDITIVE, COARSE, GROUPS, grouped, share_sums
from theodolite.measure.head_roles import ATTENTION_PATTERNS
from theodolite.measure.publications import SONG
from theodolite.theory.decomposition import PARTS

ATTRIBUTED = (*GROUPS, ADDITIVE)
"""The groups of constituents, and the bias that a family may add to logits."""

CACHED = 1 << 17
"""Logits of a block that a core works on at once: of few heads those of several contexts, which its cache holds."""


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


def pattern_scores(inputs: AttentionInputs, patterns: list[Pattern]) -> Float[Tensor, "patterns heads"]:
    """Average attention along each pattern, over contexts and the pattern's queries."""
    return scores_by_context(inputs, patterns).mean(dim=0)


def scores_by_context(
    inputs: AttentionInputs, patterns: list[Pattern]
) -> Float[Tensor, "contexts patterns heads"]:
    """Average attention along each pattern, over the pattern's queries."""
    batch, heads, queries, _ = inputs.query.shape
    cached = max(1, CACHED // (heads * min(BLOCK, queries) * inputs.key.shape[2]))
    sums = each_part(
        lambda part: _paid(inputs.of_contexts(part), patterns), batch, inputs.query.device, cached
    )
    counts = torch.tensor([len(p.queries) for p in patterns])
    return torch.cat(sums).cpu() / counts[:, None]


def _paid(inputs: AttentionInputs, patterns: list[Pattern]) -> Float[Tensor, "contexts patterns heads"]:
    """Sum attention along each pattern over the pattern's queries."""
    device = inputs.query.device
    batch, heads = inputs.query.shape[:2]
    scores = torch.zeros(batch, len(patterns), heads, dtype=torch.float64, device=device)
    for block in inputs.blocks():
        weights = softmax(block.logits, inputs.sink)
        every = torch.arange(block.start, block.stop, device=device)
        for number, pattern in enumerate(patterns):
            key = every - pattern.distance
            inside = (every >= pattern.queries.start) & (every < pattern.queries.stop)
            inside &= (key >= block.first) & (key < block.last)
            paid = weights[:, :, every[inside] - block.start, key[inside] - block.first]
            scores[:, number] += paid.sum(dim=2, dtype=torch.float64)
    return scores


def attribute(
    query: Float[Tensor, "parts contexts heads positions head_width"],
    key: Float[Tensor, "parts contexts heads positions head_width"],
    inputs: AttentionInputs,
    patterns: list[Pattern],
) -> Attribution:
    """Attribute patterns of heads, given the parts of their queries and keys and what attention was given.

    `inputs` holds the same heads, one key head for each (see `chosen_heads`).
    """
    shares, additive = share_sums(query, key, inputs).shares()
    both = [_only_and_without(query, key, inputs, group) for group in ATTRIBUTED]
    even = replace(inputs, query=torch.zeros_like(inputs.query), bias=None, sink=None)
    return Attribution(
        score=pattern_scores(inputs, patterns),
        uniform=pattern_scores(even, patterns),
        share=torch.stack([*grouped(shares.value).values(), additive.value]),
        only=torch.stack([pattern_scores(only, patterns) for only, _ in both]),
        without=torch.stack([pattern_scores(without, patterns) for _, without in both]),
    )


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
    """Tabulate each head, pattern and group of constituents, from the state of an `AttributionPass`."""
    table = pd.DataFrame(attribution["numbers"].numpy(), columns=COLUMNS)
    table = table.sort_values(["pattern", "score"], ascending=[True, False], kind="stable", ignore_index=True)
    for name, words in (("pattern", tuple(ATTENTION_PATTERNS)), ("group", ATTRIBUTED)):
        table[name] = pd.Series([words[int(number)] for number in table[name]], dtype="str")
    return table.astype({"layer": "int64", "head": "int64"})


def chosen_heads(inputs: AttentionInputs, heads: list[int]) -> AttentionInputs:
    """Return the attention inputs of some heads, each with a key head of its own. Values are not for use."""
    grouped = inputs.query.shape[1] // inputs.key.shape[1]
    key = inputs.key[:, [head // grouped for head in heads]]

    def of_heads(tensor: Tensor | None) -> Tensor | None:
        return tensor if tensor is None or tensor.shape[1] == 1 else tensor[:, heads]

    return replace(
        inputs,
        query=inputs.query[:, heads],
        key=key,
        value=key,
        mask=of_heads(inputs.mask),
        bias=of_heads(inputs.bias),
        sink=None if inputs.sink is None else inputs.sink[heads],
    )


def _only_and_without(
    query: Tensor, key: Tensor, inputs: AttentionInputs, group: str
) -> tuple[AttentionInputs, AttentionInputs]:
    """Split attention inputs: one has the logits of one group only, the other all but those.

    A sum of products q·k is one product of vectors side by side, so both are attention inputs like any other.
    """
    own_query, own_key = inputs.query, inputs.key
    if group == ADDITIVE:
        return replace(inputs, query=torch.zeros_like(own_query)), replace(inputs, bias=None)
    query_of, key_of = ({name: parts[_members(name)].sum(dim=0) for name in COARSE} for parts in (query, key))
    only_query = [query_of[a] for a, _ in GROUPS[group]]
    only_key = [key_of[b] for _, b in GROUPS[group]]
    only = replace(inputs, query=_beside(only_query), key=_beside(only_key), bias=None)
    others = [own_query, *(-part for part in only_query)], [own_key, *only_key]
    return only, replace(inputs, query=_beside(others[0]), key=_beside(others[1]))


def _members(group: str) -> list[int]:
    return [PARTS.index(part) for part in COARSE[group]]


def _beside(vectors: list[Tensor]) -> Tensor:
    dtype = max((v.dtype for v in vectors), key=lambda dtype: torch.finfo(dtype).bits)
    return torch.cat([v.to(dtype) for v in vectors], dim=-1)
