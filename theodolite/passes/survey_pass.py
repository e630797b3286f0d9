"""The corpus pass of a survey: all accumulators, fed by one forward pass a batch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from theodolite.accumulate.attention import AttentionStatistics, QueryKeyMoments, Tokens
from theodolite.accumulate.means import KeptStreams, Means, Sample
from theodolite.accumulate.outliers import MassiveTokens, OutlierCounts, massive_tokens, without
from theodolite.accumulate.second_moments import Centred, MomentSketches, SecondMoments
from theodolite.accumulate.sums import State, part_of
from theodolite.attention.inputs import AttentionInputs
from theodolite.corpus.corpus import Corpus
from theodolite.logits.shares import sample_of
from theodolite.measure.extra import Extra
from theodolite.models import OpenModel
from theodolite.models.guard import measures
from theodolite.passes.corpus_pass import CorpusPass, refuse_nonfinite_stream

SAMPLED_CONTEXTS, SAMPLED_BYTES = 1024, 1 << 27
"""Context vectors are kept for at most so many contexts, or as many as fit in 128 MiB."""

SAMPLED_TOKENS = 512  # single token vectors kept for the pictures of cvec
EXAMPLES = 4  # contexts shown token by token in the report


class MeansPass(CorpusPass):
    """Sum the residual stream of a text by position, the tokens with massive activations apart."""

    _keeps_sample = True

    @measures("model")
    def __init__(self, model: OpenModel, corpus: Corpus, seed: int, batch: int) -> None:
        super().__init__(model, corpus, seed, batch)
        length = corpus.contexts.shape[1]
        self.leading = corpus.leading
        self.trailing = corpus.trailing(model.tokenizer)
        self.sample = Sample(torch.full((self.total,), -1), *torch.empty(2, 0, dtype=torch.int64))
        if self._keeps_sample:
            self.sample = choose_sample(model, corpus, self.trailing, seed)
        self.means = Means(model.layers + 1, length, model.width, self.sample, self.trailing, self.leading)
        self.accumulators["means"] = self.means
        self._left_out: Tensor | None = None
        self._first = 0

    def begin(self, first: int, ids: Tensor) -> None:
        """Announce the next contexts, `first …`."""
        self._first = first

    def _text(self, hidden: Tensor) -> slice:
        return slice(self.leading, hidden.shape[1] - self.trailing)

    def stream(self, layer: int, hidden: Tensor) -> None:
        """Take in the residual stream of one layer."""
        refuse_nonfinite_stream(layer, hidden)
        self._left_out = massive_tokens(hidden, self._text(hidden), self._left_out if layer else None)
        self.means.update(layer, hidden, self._first, self._left_out)


class HeadsPass(MeansPass):
    """Sum what the table of heads needs of a text: means by position, attention's inputs, attention statistics."""

    _keeps_sample = False
    _examples = 0
    _moments: type[SecondMoments] = SecondMoments

    @measures("model")
    def __init__(self, model: OpenModel, corpus: Corpus, seed: int, batch: int) -> None:
        super().__init__(model, corpus, seed, batch)
        contexts, length = corpus.contexts.shape
        self.inputs = self._moments(model.layers, model.structure.attention_width)
        sizes = model.layers, model.heads, length, contexts, min(self._examples, contexts)
        self.attention_statistics = AttentionStatistics(
            *sizes, self.trailing, self.leading, pictured=corpus.pictured is not None
        )
        self.accumulators |= {"inputs": self.inputs, "attention": self.attention_statistics}
        self._tokens: Tokens | None = None

    @measures("self.model")
    def merge(self, state: State) -> None:
        """Take in the `state` of another pass over other contexts of the same corpus."""
        for name, accumulator in self.accumulators.items():
            accumulator.merge(part_of(state, name))

    def begin(self, first: int, ids: Tensor) -> None:
        """Announce the next contexts, `first …`."""
        super().begin(first, ids)
        keys = self.corpus.keys(slice(first, first + len(ids)), self.model.structure.cross)
        self._tokens = Tokens.of(ids, self.model.device, keys)
        if self.corpus.pictured is not None:
            self._tokens = replace(self._tokens, of_picture=ids >= self.corpus.pictured.first)

    def attention_input(self, layer: int, hidden: Tensor) -> None:
        """Take in what one attention module reads."""
        self.inputs.update_centred(layer, Centred.of(hidden[:, self._text(hidden)]))

    def attention(self, layer: int, inputs: AttentionInputs) -> Tensor:
        """Take in one layer's attention, and compute its output."""
        assert self._tokens is not None
        return self.attention_statistics.update(layer, inputs, self._tokens, self._first)


class SurveyPass(HeadsPass):
    """Sum all that a survey needs of a text, with copies of the caller's own accumulators."""

    _keeps_sample = True
    _examples = EXAMPLES

    @measures("model")
    def __init__(
        self, model: OpenModel, corpus: Corpus, seed: int, batch: int, extra: Sequence[Extra] = ()
    ) -> None:
        super().__init__(model, corpus, seed, batch)
        self.residual = self._moments(model.layers + 1, model.width)
        self.sketches = MomentSketches(model.layers + 1, model.width, self.total)
        self.outliers = OutlierCounts(model.layers + 1, model.width, self.total, self.trailing, self.leading)
        self.massive = MassiveTokens(model.layers + 1)
        self.streams = KeptStreams(
            model.layers, self.means.length, model.width, sample_of(corpus, seed), model.source.dtype
        )
        self.query_keys = QueryKeyMoments(model.layers, model.heads, model.head_width)
        self.extra = [copy.deepcopy(accumulator) for accumulator in extra]
        for name in ("residual", "sketches", "massive", "streams", "query_keys", "outliers"):
            self.accumulators[name] = getattr(self, name)
        self.accumulators |= {f"extra.{one.name}": one for one in self.extra}

    def stream(self, layer: int, hidden: Tensor) -> None:
        """Take in the residual stream of one layer."""
        super().stream(layer, hidden)
        assert self._tokens is not None
        for first, rows in without(hidden, self._left_out, self._text(hidden)):
            centred = Centred.of(rows)
            self.residual.update_centred(layer, centred)
            self.sketches.update_centred(layer, centred, self._first + first)
        if self._left_out is not None:
            self.massive.update(layer, hidden, self._left_out, self._tokens.ids, self._first)
        self.outliers.update(layer, hidden, self._first)
        self.streams.update(layer, hidden, self._first)
        for accumulator in self.extra:
            accumulator.stream(layer, hidden)

    def attention_input(self, layer: int, hidden: Tensor) -> None:
        """Take in what one attention module reads."""
        super().attention_input(layer, hidden)
        self.attention_statistics.update_input(layer, hidden)
        for accumulator in self.extra:
            accumulator.attention_input(layer, hidden)

    def attention(self, layer: int, inputs: AttentionInputs) -> Tensor:
        """Take in one layer's attention, and compute its output."""
        for accumulator in self.extra:
            accumulator.attention(layer, inputs)
        self.query_keys.update(layer, inputs, self.trailing)
        return super().attention(layer, inputs)


def choose_sample(model: OpenModel, corpus: Corpus, trailing: int, seed: int) -> Sample:
    """Draw a seeded sample of contexts whose means are kept, and of single tokens, none of `trailing` special ones."""
    contexts, length = corpus.contexts.shape
    leading = corpus.leading
    generator = torch.Generator().manual_seed(seed)
    of_context = (model.layers + 1) * model.width * torch.float64.itemsize
    size = max(1, min(contexts, SAMPLED_CONTEXTS, SAMPLED_BYTES // of_context))
    slot = torch.full((contexts,), -1, dtype=torch.int64)
    slot[torch.randperm(contexts, generator=generator)[:size].sort().values] = torch.arange(size)
    tokens = min(SAMPLED_TOKENS, len(corpus.tokens) - contexts * (leading + trailing))
    context = torch.randint(contexts, (tokens,), generator=generator)
    position = torch.randint(leading, length - trailing, (tokens,), generator=generator)
    if corpus.lengths is not None:
        position = leading + (position - leading) % (corpus.lengths[context] - trailing - leading)
    return Sample(slot, context, position)
