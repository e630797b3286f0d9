"""Heads found by what they do on repeated random tokens, and the constituents that make them do it.

Composes passes of the model with `measure.attribution`; knows no formula.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from theodolite.attention.inputs import AttentionInputs, attend
from theodolite.corpus.corpus import repeated_random_tokens
from theodolite.errors import WorkError
from theodolite.logits.constituents import decompose_around, working_dtype
from theodolite.measure.attribution import ATTRIBUTED, Pattern, attribute, chosen_heads, pattern_scores
from theodolite.measure.head_roles import ATTENTION_PATTERNS, STRONG
from theodolite.models import OpenModel
from theodolite.models.doors.transformers import tapped
from theodolite.models.query_key_parts import LayerPass, split_queries_and_keys, watch_layers
from theodolite.models.structure import backbone
from theodolite.theory.decomposition import Decomposition

PATTERNS = tuple(ATTENTION_PATTERNS)

SCORED_CONTEXTS = 8
"""Repeated random sequences on which every head is scored."""

CONTEXTS = 16
LONGEST = 256
"""Repeated random sequences for the attribution, and their tokens at most: a fixed cost, one pass of 4096 tokens."""

BEST = 3
"""So many heads of each pattern are attributed whatever their score."""

MOST = 16
"""And those that pay the pattern at least `STRONG` of their attention, up to so many heads a pattern."""

COLUMNS = ["layer", "head", "pattern", "score", "group", "share", "only", "without", "uniform"]

Chosen = dict[int, list[tuple[int, int]]]
"""Layer → (head, number of the pattern), in order."""


def pattern_scores_of(model: OpenModel, length: int, seed: int) -> Float[Tensor, "layers patterns heads"]:
    """Scores of every head on `length` random tokens: "induction", "previous", "same".

    The sequences are random tokens, twice, with what the tokenizer puts around every context: T tokens in all, or
    one less. "induction" is mean attention from the second copy to the token after the first, "previous" from
    all but the first position to the one before, "same" from the second copy to the same token of the first.
    NaN where there is no room for two copies of two tokens.
    """
    ids, patterns = repeated_patterns(model, length, SCORED_CONTEXTS, seed)
    if not patterns:
        return torch.full((model.layers, len(PATTERNS), model.heads), torch.nan, dtype=torch.float64)
    scores: list[Tensor] = []

    def listener(_: torch.nn.Module, inputs: AttentionInputs) -> Tensor:
        scores.append(pattern_scores(inputs, patterns))
        return attend(inputs)

    with tapped(model.hf, listener), torch.inference_mode():
        backbone(model.hf)(input_ids=ids.to(model.device), use_cache=False)
    return torch.stack(scores)


def attribution_table(
    model: OpenModel,
    scores: Float[Tensor, "layers patterns heads"],
    mean: Float[Tensor, "layers_and_1 width"],
    pos: Float[Tensor, "layers_and_1 positions width"],
    seed: int,
) -> tuple[pd.DataFrame, dict[int, str]]:
    """Attribute the heads that follow a pattern most to the constituents of their logits.

    `scores` are those of `pattern_scores_of`; the heads that they choose are scored anew on sequences of the same
    kind of at most `LONGEST` tokens, whole, with each group of constituents only, and without it. `mean` and
    `pos` are μ and the positional basis of the residual layers, from a survey of another text: the means over
    repeated sequences repeat what came by chance in both copies, and would pass it off as position.

    Returns:
        One row a head, pattern and group of constituents, and by layer why its logits could not be split. There
        are no rows where there is no room for two copies of two tokens.
    """
    ids, patterns = repeated_patterns(model, min(pos.shape[1], LONGEST), CONTEXTS, seed)
    rows: list[dict[str, Any]] = []
    refused: dict[int, str] = {}
    if not patterns or scores.isnan().any():
        return pd.DataFrame(columns=COLUMNS), refused
    chosen = _choose(scores)

    def tell(seen: LayerPass) -> None:
        try:
            parts = decompose_around(seen.stream, mean[seen.layer], pos[seen.layer])
            rows.extend(_rows(seen, parts, patterns, chosen[seen.layer]))
        except WorkError as error:
            refused[seen.layer] = str(error)

    watch_layers(model, ids, sorted(chosen), tell)
    rows.sort(key=lambda row: (PATTERNS.index(row["pattern"]), -row["score"]))
    return pd.DataFrame(rows, columns=COLUMNS), refused


def repeated_patterns(
    model: OpenModel, length: int, contexts: int, seed: int
) -> tuple[Tensor, list[Pattern]]:
    """Repeated random sequences and the patterns on them; no patterns where they are too short."""
    vocabulary: Any = model.tokenizer or model.vocabulary
    ids, start, half = repeated_random_tokens(vocabulary, length, contexts, seed)
    if half < 2:
        return ids, []
    second = range(start + half, start + 2 * half)
    queries = {"induction": second, "previous": range(1, ids.shape[1]), "same": second}
    distance = {"induction": half - 1, "previous": 1, "same": half}
    return ids, [Pattern(name, distance[name], queries[name]) for name in PATTERNS]


def _choose(scores: Float[Tensor, "layers patterns heads"]) -> Chosen:
    chosen: Chosen = {}
    heads = scores.shape[-1]
    for pattern in range(scores.shape[1]):
        ordered = scores[:, pattern].flatten().sort(descending=True, stable=True)
        strong = int((ordered.values >= STRONG).sum())
        for flat in ordered.indices[: max(BEST, min(strong, MOST))].tolist():
            chosen.setdefault(flat // heads, []).append((flat % heads, pattern))
    return chosen


def _rows(
    seen: LayerPass, parts: Decomposition, patterns: list[Pattern], chosen: list[tuple[int, int]]
) -> list[dict[str, Any]]:
    split = split_queries_and_keys(seen, parts, working_dtype(seen.stream), check_all=False)
    heads = sorted({head for head, _ in chosen})
    grouped = split.query.shape[2] // split.key.shape[2]
    key = split.key[:, :, [head // grouped for head in heads]]
    found = attribute(split.query[:, :, heads], key, chosen_heads(split.inputs, heads), patterns)
    return [
        {
            "layer": seen.layer,
            "head": head,
            "pattern": patterns[pattern].name,
            "score": float(found.score[pattern, heads.index(head)]),
            "group": group,
            "share": float(found.share[number, heads.index(head)]),
            "only": float(found.only[number, pattern, heads.index(head)]),
            "without": float(found.without[number, pattern, heads.index(head)]),
            "uniform": float(found.uniform[pattern, heads.index(head)]),
        }
        for head, pattern in chosen
        for number, group in enumerate(ATTRIBUTED)
    ]
