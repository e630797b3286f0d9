"""One pass of a model over a corpus: all accumulators, fed by one forward pass a batch.

Nothing is measured here; `result.py` turns the accumulators into tables.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from theodolite.accumulate.attention import AttentionStatistics, Tokens
from theodolite.accumulate.means import Means, Sample
from theodolite.accumulate.outliers import Outliers
from theodolite.accumulate.second_moments import Centred, MomentSketches, SecondMoments
from theodolite.accumulate.sums import LayerSums
from theodolite.corpus import Corpus
from theodolite.errors import WorkError
from theodolite.models import OpenModel
from theodolite.models.structure import backbone
from theodolite.models.watch import watched
from theodolite.theory.attention import AttentionInputs

SAMPLED_CONTEXTS = 1024
SAMPLED_BYTES = 1 << 27
"""Context vectors are kept for at most so many contexts, or as many as fit in 128 MiB."""

SAMPLED_TOKENS = 512
"""Single token vectors kept for the pictures of cvec."""

EXAMPLES = 4
"""Contexts shown token by token in the report."""

ShowProgress = Callable[[int, int], None]
"""Told (contexts done, contexts in all) after every batch."""


class OnePass:
    """All accumulators of a survey; a `Watcher` of the model's forward passes."""

    def __init__(self, model: OpenModel, corpus: Corpus, seed: int) -> None:
        layers, width = model.layers, model.width
        contexts, length = corpus.contexts.shape
        self.model = model
        self.corpus = corpus
        self.seed = seed
        self.sample = choose_sample(contexts, length, (layers + 1) * width, seed)
        self.means = Means(layers + 1, length, width, self.sample)
        self.residual = SecondMoments(layers + 1, width)
        self.inputs = SecondMoments(layers, width)
        self.sketches = MomentSketches(layers + 1, width, contexts)
        self.outliers = Outliers(layers + 1, width, contexts)
        examples = min(EXAMPLES, contexts)
        self.attention_statistics = AttentionStatistics(layers, model.heads, length, examples)
        self._tokens: Tokens | None = None
        self._first = 0

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

    def state(self) -> dict[str, Tensor]:
        """Everything seen so far, as `accumulator.tensor` → tensor."""
        return {
            f"{name}.{key}": tensor
            for name, accumulator in self.accumulators.items()
            for key, tensor in accumulator.state().items()
        }

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Continue from what `state` gave."""
        for name, accumulator in self.accumulators.items():
            prefix = name + "."
            accumulator.restore(
                {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
            )

    def run(
        self, batch: int, done: int, show_progress: ShowProgress, save: Callable[[int, bool], None]
    ) -> None:
        """Read every context from `done` on; `save(done, must)` is called between batches only.

        An interrupt may strike in the middle of a batch, whose sums are then half there. So progress is saved
        between batches, where it is whole; `show_progress` may raise there to stop, and nothing is lost.
        """
        total = len(self.corpus.contexts)
        with watched(self.model, self):
            while done < total:
                try:
                    show_progress(done, total)
                except BaseException:
                    save(done, True)
                    raise
                self._read(done, min(done + batch, total))
                done = min(done + batch, total)
                save(done, False)
        show_progress(total, total)

    def _read(self, first: int, last: int) -> None:
        ids = self.corpus.contexts[first:last]
        self._first = first
        self._tokens = Tokens.of(ids, self.model.device)
        with torch.inference_mode():
            backbone(self.model.hf)(input_ids=ids.to(self.model.device), use_cache=False)

    def stream(self, layer: int, hidden: Tensor) -> None:
        """Take in the residual stream of one layer."""
        if not torch.isfinite(hidden.sum(dtype=torch.float32)):
            raise WorkError(
                f"hidden states of layer {layer} hold NaN or infinite values: try --dtype float32"
            )
        self.means.update(layer, hidden, self._first)
        centred = Centred.of(hidden[:, 1:])
        self.residual.update_centred(layer, centred)
        self.sketches.update_centred(layer, centred, self._first)
        self.outliers.update(layer, hidden, self._first)

    def attention_input(self, layer: int, hidden: Tensor) -> None:
        """Take in what one attention module reads."""
        self.inputs.update_centred(layer, Centred.of(hidden[:, 1:]))
        self.attention_statistics.update_input(layer, hidden)

    def attention(self, layer: int, inputs: AttentionInputs) -> Tensor:
        """Take in one layer's attention, and compute its output."""
        assert self._tokens is not None
        return self.attention_statistics.update(layer, inputs, self._tokens, self._first)


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
