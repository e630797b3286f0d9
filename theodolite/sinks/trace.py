"""Catch, tag, release (Zhang, Khan & Papyan 2025): every sink of a corpus traced through the model.

The survey says which tokens are sinks. This pass says what they catch, what they write there, and where that is
still to be seen.
"""

from __future__ import annotations

from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from theodolite.accumulate.sums import State, each_part, marked_places, part_of
from theodolite.accumulate.tags import HEAD_OUTPUT, Tags, measured, released
from theodolite.attention.catches import Catches, attend_and_catch
from theodolite.attention.inputs import AttentionInputs
from theodolite.corpus.corpus import Corpus
from theodolite.jobs.job import Rows, Stage, States
from theodolite.measure.tags import layers_with_sinks, traced_heads, traces, written
from theodolite.models import OpenModel
from theodolite.models.guard import measures
from theodolite.models.texts import text_of_tokens
from theodolite.passes import corpus_pass
from theodolite.passes.run import Run, describe_corpus, describe_model, describe_pass, run_into
from theodolite.passes.weights_pass import OUTPUT_TITLE, widest_output_weights
from theodolite.system.progress import ShowStage

ONE_BY_ONE = torch.device("cpu")  # a context at a time, on every device: each has sinks of its own
# Of a context, and their rows in sums by sink and by head.
_LayerCatch = tuple[Catches, tuple[Tensor, Tensor]]


class TracePass(corpus_pass.CorpusPass):
    """Sum a trace over a corpus; what a context's sinks caught is kept only until its forward pass is over.

    `metric`: W_O W_Oᵀ of every head, lengths in the residual stream.
    """

    def __init__(
        self,
        model: OpenModel,
        corpus: Corpus,
        batch: int,
        metric: Float[Tensor, "layers heads value_width value_width"],
        local_sinks: bool = False,
    ) -> None:
        super().__init__(model, corpus, 0, batch)
        self._local_sinks = local_sinks
        self._metric = metric
        self._trailing = corpus.trailing(model.tokenizer)
        self.accumulators["tags"] = self.tags = Tags(model.layers, metric.shape[-1], self.total)
        self._caught: list[list[_LayerCatch]] = []

    def begin(self, first: int, ids: Tensor) -> None:
        """Start a batch with contexts `first …`."""
        self._keys = self.corpus.keys(slice(first, first + len(ids)), self.model.structure.cross)
        self._first = first
        self._caught = [[] for _ in ids]

    def stream(self, layer: int, hidden: Tensor) -> None:
        """Measure what is left of the tags of all earlier layers."""
        corpus_pass.refuse_nonfinite_stream(layer, hidden)
        self._entering = hidden

        def work(part: slice) -> dict[str, Tensor] | None:
            if not (caught := self._caught[part.start]):
                return None
            so_far = Catches.joined([catches for catches, _ in caught])
            return released(so_far.to(hidden.device), hidden[part.start])

        for context, sums in enumerate(each_part(work, len(self._keys), ONE_BY_ONE)):
            if sums is not None:
                sinks, heads = map(torch.cat, zip(*(rows for _, rows in self._caught[context]), strict=True))
                self.tags.add_place((sinks, heads), 1 + layer, sums, self._first + context)

    def attention(self, layer: int, inputs: AttentionInputs) -> Tensor:
        """Compute one layer's attention, and sum what its sinks catch and write."""
        metric = self._metric[layer].to(inputs.value.device)
        groups = inputs.query.shape[1] // inputs.value.shape[1]

        def work(part: slice) -> tuple[Tensor, Catches, tuple[dict[str, Tensor], ...] | None]:
            output, (catches,) = attend_and_catch(
                inputs.of_contexts(part), local_sinks=self._local_sinks, trailing=self._trailing
            )
            if not len(catches.head):
                return output, catches, None
            heads = catches.head.unique()
            wider = (0, metric.shape[-1] - output.shape[-1])  # as wide as those of the widest layer
            of_heads = functional.pad(output[0, :, heads].transpose(0, 1), wider)
            value = functional.pad(inputs.value[part.start, heads // groups], wider)
            before = released(catches, self._entering[part.start].to(output.device))
            return output, catches, (*measured(catches, of_heads, value, metric[heads]), before)

        results = each_part(work, len(self._keys), ONE_BY_ONE)
        for context, (_, catches, numbers) in enumerate(results):
            if numbers is not None:
                sums, tag, before = numbers
                number = self._first + context
                rows = self.tags.update(layer, catches, self._keys[context], sums, number)
                self.tags.add_place(rows, HEAD_OUTPUT, tag, number)
                self.tags.add_place(rows, 1 + layer, before, number)
                self._caught[context].append((catches, rows))
        return torch.cat([output for output, _, _ in results])


@measures("model")
def trace_sinks(
    model: OpenModel,
    corpus: Corpus | Tensor,
    out: str | Path | None = None,
    *,
    local_sinks: bool = False,
    batch: int | None = None,
    show_progress: ShowStage = lambda what, done, total: None,
) -> Run:
    """Find every sink of a corpus, what it catches, the tag that it writes, and where the tag lives on.

    A key is a sink of a head where the queries that see it pay it more than `SINK_THRESHOLD` of their attention
    on average; a query is caught by the sink that it pays most, if that is more than the threshold too. Position 0,
    the sinks themselves and special tokens at the end ([SEP]) are left out of all that is measured of tags. η² is the
    between-group over the total sum of squares, within contexts; NaN where no context has tokens of two groups.

    Args:
        corpus: from a `Corpus` constructor, or token ids (contexts, positions) or (positions).
        out: the run folder to write; None keeps the run in memory. Interrupted, the same call resumes.
        local_sinks: count local sinks as well, of kind `local` (at position 0 `first`, as any): a key that dominates a
            contiguous span, at least min(16, T/4) queries, below the threshold on average, as a line break may its
            line. The other sinks of its head then catch fewer queries.
        batch: contexts a forward pass; None: 4096 tokens' worth.
        show_progress: told (what is being done, steps done, steps in all); it may raise to stop, and progress is
            saved then.

    Returns:
        A run with `traces` (one row per layer, head and sink, the strongest first), `heads`, and the arrays
        `tag_direction`, `release` (rows of `traces`), `tag_by_group` (the first of them, by group of contexts),
        `principal_direction` (rows of `heads`).

    Raises:
        UsageError: the corpus does not fit the model, or `out` holds something else.
        WorkError: a layer has no fixed output weights, hidden states became NaN or infinite, or the disk refused.
    """
    if isinstance(corpus, Tensor):
        corpus = Corpus.from_ids(corpus)
    corpus_pass.check_fit(model, corpus, least_contexts=1)
    model.check_weights()
    batch = corpus_pass.batch_of(corpus, batch)
    of_pass = {"trace": True, "corpus": corpus.sha256, "batch": batch}
    fingerprint = {**corpus_pass.fingerprint_of_tables(model), **of_pass}
    if local_sinks:
        fingerprint["local_sinks"] = True
    provenance = describe_model(model) | describe_pass(model, corpus, 0, fingerprint)
    text = text_of_tokens(model, corpus)

    # Of W_O itself nothing is kept between the stages: all layers' would be as large as a part of the model.
    def squared(layer: int) -> State:
        w_o = widest_output_weights(model, layer)
        return {"metric": (w_o @ w_o.mT)[None]}

    def trace(states: States) -> TracePass:
        return TracePass(model, corpus, batch, states.of("metric")["metric"], local_sinks)

    def write(states: States) -> Rows[int]:
        tags = states.of("trace.tags")
        return Rows(
            layers_with_sinks(tags), lambda layer: written(tags, layer, widest_output_weights(model, layer))
        )

    def tabulated(states: States) -> Run:
        described = provenance["corpus"]
        length = described["length"] - described.get("trailing_special_tokens", 0)
        state, in_stream = states.of("trace.tags"), states.of("written")
        table, arrays = traces(state, in_stream, described["contexts"], length, text)
        heads, head_arrays = traced_heads(state, in_stream, described["contexts"])
        places = marked_places(part_of(state, "marked"), corpus.rows(model.structure.cross))
        return Run(
            heads=heads,
            traces=table,
            arrays=arrays | head_arrays | {"sink_places": places},
            provenance=provenance | {"wall_seconds": states.seconds},
        )

    stages = [
        Stage("metric", OUTPUT_TITLE, lambda states: Rows(range(model.layers), squared)),
        Stage("trace", "tracing sinks", trace),
        Stage("written", "projecting tags", write),
    ]
    described = describe_corpus(corpus)
    return run_into(stages, tabulated, out, fingerprint, corpus=described, show_progress=show_progress)
