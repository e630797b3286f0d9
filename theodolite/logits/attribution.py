"""Find heads by their attention on repeated random tokens, and the constituents of their logits that cause it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from theodolite.accumulate.sums import State
from theodolite.corpus.special_tokens import repeated_random_tokens
from theodolite.errors import WorkError
from theodolite.logits.shares import contexts_within, working_dtype
from theodolite.measure.attribution import ATTRIBUTED, COLUMNS, Pattern, attribute, scores_by_context
from theodolite.measure.head_roles import ATTENTION_PATTERNS, STRONG
from theodolite.models import OpenModel
from theodolite.models.guard import measures
from theodolite.models.query_key_parts import LayerPass, split_queries_and_keys, visit_layers
from theodolite.system.progress import Progress
from theodolite.theory.decomposition import decompose_by_groups

PATTERNS = tuple(ATTENTION_PATTERNS)

SEQUENCES, SEQUENCE_TOKENS = 16, 1536
LONGEST = 256
"""Repeated random sequences, of at most so many tokens each: 16, or at least 4 where these are more tokens. Six of 256
tokens give SmolLM2's scores to 0.03. A model that turns positions by the length of a pass turns these by theirs."""

ATTRIBUTED_SEQUENCES = 4  # of them the first, on which heads are attributed
BEST = 3  # so many heads of each pattern are attributed whatever their score
MOST = 16  # and those that pay the pattern at least `STRONG` of their attention, up to so many a pattern


def repeated_sequences(length: int) -> int:
    """Return the number of repeated random sequences on which heads are scored."""
    return contexts_within(SEQUENCE_TOKENS, min(length, LONGEST), 4, SEQUENCES)


class PatternPass:
    """Scores of every head on repeated random tokens, and the causes of the attention of those that follow a pattern.

    The sequences are random tokens, twice, with what the tokenizer puts around every context: T tokens in all, or one
    less, but `LONGEST` at most. "induction" is mean attention from the second copy to the token after the first,
    "previous" from all but the first position to the one before, "same" from the second copy to the same token of the
    first. A head is attributed as its layer is read if it is among the best so far.

    State: scores (L, patterns, H), means over the sequences, and without (L, patterns, H, sequences), what they are
    without each, NaN where there is no room for two copies of two tokens, and of heads that are not; with `means`
    numbers (rows, 9), the columns of `measure.attribution.COLUMNS`. Notes: `refused`, layer → why its logits could not
    be split.

    `length` is T, that of the text's contexts. `means` gives μ (2, d) and the positional basis (2, T, d) of a residual
    layer, of either half of another text, for queries and for keys: what came by chance in both copies of a sequence
    would pass for position.
    """

    def __init__(
        self,
        model: OpenModel,
        length: int,
        seed: int,
        means: Callable[[int], tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        self.model = model
        self.means = means
        sequences = repeated_sequences(length)
        self.ids, self.patterns = repeated_patterns(model, min(length, LONGEST), sequences, seed)
        self.total = model.layers
        self.notes: dict[str, Any] = {"refused": {}}
        size = (model.layers, len(PATTERNS), model.heads)
        self._scores = torch.full(size, torch.nan, dtype=torch.float64)
        self._without = self._scores.unsqueeze(-1).repeat(1, 1, 1, sequences)
        self._rows: list[list[float]] = []

    def state(self) -> State:
        """Return the scores, of all sequences and without each, and the numbers of the attributed heads."""
        scores = {"scores": self._scores, "without": self._without}
        numbers = torch.tensor(self._rows, dtype=torch.float64).reshape(-1, len(COLUMNS))
        return scores if self.means is None else scores | {"numbers": numbers}

    def restore(self, state: State) -> None:
        """Restore a state that `state` returned."""
        self._scores.copy_(state["scores"])
        self._without.copy_(state["without"])
        self._rows = state["numbers"].tolist() if "numbers" in state else []

    @measures("self.model")
    def run(self, progress: Progress) -> None:
        """Run one forward pass; nothing of it is saved until all layers are scored."""
        progress.checkpoint(progress.done)
        if self.patterns and progress.done < self.total:

            def visit(layer_pass: LayerPass) -> None:
                self._take(layer_pass)
                progress.report(layer_pass.layer + 1)

            visit_layers(self.model, self.ids, list(self.model.attending), visit)
            best = _choose(self._scores)
            self._rows = [row for row in self._rows if (row[1], row[2]) in best.get(int(row[0]), [])]
        progress.checkpoint(self.total)

    def _take(self, layer_pass: LayerPass) -> None:
        layer, h = layer_pass.layer, layer_pass.stream
        scores = scores_by_context(layer_pass.inputs, self.patterns)
        sequences, _, heads = scores.shape
        without = (scores.sum(dim=0) - scores) / (sequences - 1)
        self._scores[layer, :, :heads] = scores.mean(dim=0)
        self._without[layer, :, :heads] = without.permute(1, 2, 0)
        chosen = _choose(self._scores).get(layer, [])
        if self.means is None or not chosen:
            return
        first = torch.zeros(len(h), dtype=torch.int64)
        parts = decompose_by_groups(h, *self.means(layer), first, first + 1)
        try:
            split = split_queries_and_keys(layer_pass, parts, working_dtype(h))
        except WorkError as error:
            self.notes["refused"][str(layer)] = str(error)
            return
        places = sorted({head for head, _ in chosen})
        grouped = split.query.shape[2] // split.key.shape[2]
        key, some = split.key[:, :, [head // grouped for head in places]], slice(ATTRIBUTED_SEQUENCES)
        inputs = split.inputs.of_heads(places).of_contexts(some)
        of = attribute(split.query[:, some, places], key[:, some], inputs, self.patterns)
        for head, pattern in chosen:
            at = (pattern, places.index(head))
            for group in range(len(ATTRIBUTED)):
                numbers = of.share[group, at[1]], of.only[group][at], of.without[group][at], of.uniform[at]
                row = [layer, head, pattern, float(of.score[at]), group, *map(float, numbers)]
                self._rows.append(row)  # in the order of `COLUMNS`


def repeated_patterns(
    model: OpenModel, length: int, contexts: int, seed: int
) -> tuple[Tensor, list[Pattern]]:
    """Draw repeated random sequences and their patterns; none where they are too short, or images are read."""
    if model.vocabulary is None:
        return torch.empty(0, length, dtype=torch.int64), []
    ids, start, half = repeated_random_tokens(
        model.required_vocabulary(), length, contexts, seed, below=model.vocabulary
    )
    model.check_tokens(ids)
    second = range(start + half, start + 2 * half)
    patterns = {
        "induction": (half - 1, second),
        "previous": (1, range(1, ids.shape[1])),
        "same": (half, second),
    }
    return ids, [Pattern(name, *patterns[name]) for name in PATTERNS] if half >= 2 else []


def _choose(scores: Float[Tensor, "layers patterns heads"]) -> dict[int, list[tuple[int, int]]]:
    """Choose the heads to attribute: layer → (head, number of the pattern), in order."""
    chosen: dict[int, list[tuple[int, int]]] = {}
    heads = scores.shape[-1]
    for pattern in range(scores.shape[1]):
        known = scores[:, pattern].flatten().nan_to_num(-torch.inf)  # last: heads that a layer does not have
        ordered = known.sort(descending=True, stable=True)
        strong = int((ordered.values >= STRONG).sum())
        count = min(max(BEST, min(strong, MOST)), int(known.isfinite().sum()))
        for flat in ordered.indices[:count].tolist():
            chosen.setdefault(flat // heads, []).append((flat % heads, pattern))
    return chosen
