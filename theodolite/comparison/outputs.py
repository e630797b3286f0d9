"""Read what each head adds to the residual stream, where sinks are, and the next-token loss, in a pass of its own.

Sinks, entropies, head types and W_QK depend on queries and keys alone: they cannot tell whether a head's output
o_h W_O[h] still reaches the stream.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from theodolite.accumulate.sums import State
from theodolite.attention.catches import attend_and_catch
from theodolite.attention.inputs import AttentionInputs
from theodolite.corpus.corpus import Corpus
from theodolite.estimates import Estimate
from theodolite.evaluate.scores import mean_and_error
from theodolite.jobs.job import Rows, Stage, States
from theodolite.judging import Criterion, Verdict, judge
from theodolite.models import OpenModel
from theodolite.models.guard import measures
from theodolite.models.source import Inputs
from theodolite.passes import corpus_pass
from theodolite.passes.run import Run, describe_corpus, describe_model, describe_pass, run_into
from theodolite.passes.weights_pass import OUTPUT_TITLE, widest_output_weights
from theodolite.report.data import evenly
from theodolite.system.progress import ShowStage
from theodolite.system.wording import number, with_error

TOKENS = 512  # at which outputs are kept, equally many per context; of more contexts, one in each of so many
# Random ones along which wider streams' outputs are kept: ‖·‖² is off by √(2/128) = 1/8 at most.
DIRECTIONS = 128
AS_GOOD = Criterion("at most", math.log(1.05), "a perplexity that is 5 % higher (ours)")

SINK_PLACES, PLACE = "sink_places", ["context", "layer", "head", "position"]  # an array and its columns
SEED = 0  # of the tokens and of the directions, the same for all models


def _tokens(corpus: Corpus) -> tuple[Int[Tensor, " tokens"], Int[Tensor, " tokens"]]:
    """Return the context and position of each token at which outputs are kept."""
    contexts, length = corpus.contexts.shape
    lengths = torch.full((contexts,), length) if corpus.lengths is None else corpus.lengths
    per_context = max(1, min(int(lengths.min()) - 1, TOKENS // contexts))
    generator = torch.Generator().manual_seed(SEED)
    chosen = torch.tensor(evenly(contexts, TOKENS))
    positions = [
        1 + torch.randperm(tokens - 1, generator=generator)[:per_context].sort().values
        for tokens in lengths[chosen].tolist()
    ]
    return chosen.repeat_interleave(per_context), torch.cat(positions)


class OutputsPass(corpus_pass.CorpusPass):
    """Keep every head's output at chosen tokens of a corpus, and the loss and the places of sinks of every context.

    `weights`: W_O of every head, along the directions in which the stream is seen.
    """

    def __init__(
        self,
        model: OpenModel,
        corpus: Corpus,
        batch: int,
        weights: Float[Tensor, "layers heads value_width directions"],
    ) -> None:
        super().__init__(model, corpus, SEED, batch)
        self._context, self._position = _tokens(corpus)
        self._written: Float[Tensor, "layers heads tokens directions"] = torch.zeros(
            model.layers, model.heads, len(self._context), weights.shape[-1]
        )
        self._loss: Float[Tensor, " contexts"] = torch.full((self.total,), torch.nan, dtype=torch.float64)
        self._predicts = model.causal and model.source.predict is not None and corpus.text_alone
        self._weights = weights
        self._places: list[Int[Tensor, "sinks place"]] = [torch.empty(0, len(PLACE), dtype=torch.int64)]

    def state(self) -> State:
        """Return what was read so far."""
        return {"written": self._written, "loss": self._loss, SINK_PLACES: torch.cat(self._places)}

    def restore(self, state: State) -> None:
        """Restore a state that `state` returned."""
        self._written, self._loss = state["written"], state["loss"]
        self._places = [state[SINK_PLACES]]

    def begin(self, first: int, ids: Tensor) -> None:
        """Start a batch with contexts `first …`."""
        self._first, self._last = first, first + len(ids)

    def stream(self, layer: int, hidden: Tensor) -> None:
        """Refuse NaN and infinite hidden states; nothing of them is kept."""
        corpus_pass.refuse_nonfinite_stream(layer, hidden)

    def attention(self, layer: int, inputs: AttentionInputs) -> Tensor:
        """Compute one layer's attention; keep where its sinks are and what its heads write at the chosen tokens."""
        output, contexts = attend_and_catch(inputs)
        for place, catches in enumerate(contexts):
            position, head = catches.position.cpu(), catches.head.cpu()
            context, of_layer = (torch.full_like(head, value) for value in (self._first + place, layer))
            places = torch.stack([context, of_layer, head, position], dim=1)
            self._places.append(places[position >= 0])
        chosen = ((self._context >= self._first) & (self._context < self._last)).nonzero().squeeze(1)
        rows = output[self._context[chosen] - self._first, self._position[chosen]].double()
        heads, width = rows.shape[1:]  # of other layers they may be more, or wider
        weights = self._weights[layer, :heads, :width].to(rows.device)
        self._written[layer, :heads][:, chosen] = torch.einsum("thv,hvd->htd", rows, weights).float().cpu()
        return output

    def forward(self, inputs: Inputs) -> None:
        """Run the model, with its head where it predicts next tokens."""
        if self._predicts and isinstance(inputs, Tensor):
            losses = corpus_pass.next_token_losses(self.model.logits(inputs), inputs)
            self._loss[self._first : self._last] = losses.mean(dim=1)
        else:
            self.model.forward(inputs)


def _directions(width: int) -> Float[Tensor, "width directions"]:
    """Return the identity, or Gaussian directions R with mean ‖xR‖² = ‖x‖² (Johnson & Lindenstrauss 1984)."""
    if width <= DIRECTIONS:
        return torch.eye(width, dtype=torch.float64)
    generator = torch.Generator().manual_seed(SEED)
    return torch.randn(width, DIRECTIONS, generator=generator, dtype=torch.float64) / DIRECTIONS**0.5


@measures("model")
def read_outputs(
    model: OpenModel,
    corpus: Corpus,
    out: str | Path | None = None,
    *,
    batch: int | None = None,
    show_progress: ShowStage = lambda what, done, total: None,
) -> Run:
    """Read what every head writes on a text, and how well the model predicts it, for `compare`.

    Args:
        out: the run folder to write; None keeps the run in memory. Interrupted, the same call resumes.
        batch: contexts a forward pass; None: 4096 tokens' worth.
        show_progress: told (what is being done, steps done, steps in all); it may raise to stop, and progress is
            saved then.

    Returns:
        A run with the arrays `written` (layers, heads, tokens, directions), `context` and `position`
        (of each token), `loss` (of each context; NaN of a model that predicts no next tokens) and `sink_places` (a row
        per sink: context, layer, head, position), and no tables.

    Raises:
        UsageError: the corpus does not fit the model, or `out` holds something else.
        WorkError: a layer has no fixed output weights, hidden states became NaN or infinite, or the disk refused.
    """
    corpus_pass.check_fit(model, corpus, least_contexts=1)
    model.check_weights()
    batch = corpus_pass.batch_of(corpus, batch)
    of_pass = {"outputs": True, "corpus": corpus.sha256, "batch": batch}
    fingerprint = {**corpus_pass.fingerprint_of(model), **of_pass}
    provenance = describe_model(model) | describe_pass(model, corpus, SEED, fingerprint)
    directions = _directions(model.width)

    def weights(states: States) -> Rows[int]:
        return Rows(
            range(model.layers),
            lambda layer: {"directed": (widest_output_weights(model, layer) @ directions)[None]},
        )

    def reading(states: States) -> OutputsPass:
        return OutputsPass(model, corpus, batch, states.of("weights")["directed"])

    def tables(states: States) -> Run:
        arrays = states.of("outputs") | dict(zip(("context", "position"), _tokens(corpus), strict=True))
        return Run(arrays=arrays, provenance=provenance | {"wall_seconds": states.seconds})

    stages = [Stage("weights", OUTPUT_TITLE, weights), Stage("outputs", "reading outputs", reading)]
    described = describe_corpus(corpus)
    return run_into(stages, tables, out, fingerprint, corpus=described, show_progress=show_progress)


@dataclass(frozen=True)
class Loss:
    """Next-token loss of two models on the same contexts, in nats per token; `se` of the difference, by context."""

    before: float
    after: float
    difference: float
    se: float
    contexts: int

    def verdict(self) -> Verdict:
        """Judge whether the other model predicts as well."""
        what = f"next-token loss less that before ({number(self.before)} nats), paired by context"
        estimate = Estimate(self.difference, self.se, self.contexts, "contexts")
        return judge("the text is predicted as well", what, estimate, AS_GOOD)

    def __str__(self) -> str:
        difference = f"difference {with_error(self.difference, self.se)} (paired by context)"
        times = f"perplexity times {number(corpus_pass.perplexity_of(self.difference))}"
        return f"Next-token loss: {number(self.before)} → {number(self.after)} nats, {difference}, {times}"


def loss(reference: Run, other: Run) -> Loss | None:
    """Compare the losses of two models; None where one predicts no next tokens."""
    old, new = (run.arrays["loss"].numpy() for run in (reference, other))
    if not np.isfinite([old, new]).all():
        return None
    return Loss(float(old.mean()), float(new.mean()), *mean_and_error(new - old), len(old))
