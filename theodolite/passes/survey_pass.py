"""One pass of a model over a corpus: all accumulators, fed by one forward pass a batch.

Nothing is measured here; `tabulate.py` turns the accumulators into tables.
"""

from __future__ import annotations

import torch
from torch import Tensor

from theodolite.accumulate.attention import AttentionStatistics, Tokens
from theodolite.accumulate.means import Means, Sample
from theodolite.accumulate.outliers import OutlierCounts
from theodolite.accumulate.second_moments import Centred, MomentSketches, SecondMoments
from theodolite.accumulate.sums import Kept, LayerSums
from theodolite.attention.inputs import AttentionInputs
from theodolite.corpus.corpus import Corpus
from theodolite.models import OpenModel
from theodolite.passes.corpus_pass import Reading, refuse_bad_numbers

SAMPLED_CONTEXTS = 1024
SAMPLED_BYTES = 1 << 27
"""Context vectors are kept for at most so many contexts, or as many as fit in 128 MiB."""

SAMPLED_TOKENS = 512
"""Single token vectors kept for the pictures of cvec."""

EXAMPLES = 4
"""Contexts shown token by token in the report."""


class AttentionPass(Reading):
    """What is summed of attention itself, and of what its modules read; a subclass sums the streams."""

    def __init__(self, model: OpenModel, corpus: Corpus, seed: int, examples: int) -> None:
        super().__init__(model, corpus, seed)
        length = corpus.contexts.shape[1]
        self.inputs = SecondMoments(model.layers, model.width)
        self.attention_statistics = AttentionStatistics(model.layers, model.heads, length, examples)
        self._tokens: Tokens | None = None
        self._first = 0

    def begin(self, first: int, ids: Tensor) -> None:
        """Contexts `first …` come next."""
        self._first = first
        self._tokens = Tokens.of(ids, self.model.device)

    def attention_input(self, layer: int, hidden: Tensor) -> None:
        """Take in what one attention module reads."""
        self.inputs.update_centred(layer, Centred.of(hidden[:, 1:]))

    def attention(self, layer: int, inputs: AttentionInputs) -> Tensor:
        """Take in one layer's attention, and compute its output."""
        assert self._tokens is not None
        return self.attention_statistics.update(layer, inputs, self._tokens, self._first)


class OnePass(AttentionPass):
    """All accumulators of a survey."""

    def __init__(self, model: OpenModel, corpus: Corpus, seed: int) -> None:
        super().__init__(model, corpus, seed, min(EXAMPLES, len(corpus.contexts)))
        layers, width = model.layers, model.width
        contexts, length = corpus.contexts.shape
        self.sample = choose_sample(contexts, length, (layers + 1) * width, seed)
        self.means = Means(layers + 1, length, width, self.sample)
        self.residual = SecondMoments(layers + 1, width)
        self.sketches = MomentSketches(layers + 1, width, contexts)
        self.outliers = OutlierCounts(layers + 1, width, contexts)

    @property
    def accumulators(self) -> dict[str, LayerSums]:
        """The accumulators by name."""
        return {
            "means": self.means,
            "residual": self.residual,
            "inputs": self.inputs,
            "sketches": self.sketches,
            "outliers": self.outliers,
            "attention": self.attention_statistics,
        }

    def merge(self, tensors: dict[str, Tensor]) -> None:
        """Take in the `state` of another pass over other contexts of the same corpus."""
        for name, accumulator in self.accumulators.items():
            prefix = name + "."
            accumulator.merge(
                Kept({k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)})
            )

    def stream(self, layer: int, hidden: Tensor) -> None:
        """Take in the residual stream of one layer."""
        refuse_bad_numbers(layer, hidden)
        self.means.update(layer, hidden, self._first)
        centred = Centred.of(hidden[:, 1:])
        self.residual.update_centred(layer, centred)
        self.sketches.update_centred(layer, centred, self._first)
        self.outliers.update(layer, hidden, self._first)

    def attention_input(self, layer: int, hidden: Tensor) -> None:
        """Take in what one attention module reads."""
        super().attention_input(layer, hidden)
        self.attention_statistics.update_input(layer, hidden)


def choose_sample(contexts: int, length: int, vector: int, seed: int) -> Sample:
    """A seeded sample of contexts whose means are kept (`vector` numbers each), and of single tokens."""
    generator = torch.Generator().manual_seed(seed)
    size = max(1, min(contexts, SAMPLED_CONTEXTS, SAMPLED_BYTES // (vector * 8)))
    slot = torch.full((contexts,), -1, dtype=torch.int64)
    slot[torch.randperm(contexts, generator=generator)[:size].sort().values] = torch.arange(size)
    tokens = min(SAMPLED_TOKENS, contexts * (length - 1))
    return Sample(
        slot,
        torch.randint(contexts, (tokens,), generator=generator),
        torch.randint(1, length, (tokens,), generator=generator),
    )
