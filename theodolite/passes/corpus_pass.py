"""One pass of a model over a corpus, in batches of contexts, and the fit of a corpus to a model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from theodolite.accumulate.sums import LayerSums, State, joined, part_of
from theodolite.corpus.corpus import Corpus
from theodolite.corpus.cutting import NO_TOKEN
from theodolite.corpus.images import Images
from theodolite.corpus.sampling import check_length, check_seed
from theodolite.errors import UsageError, WorkError, first_line
from theodolite.measure.column import checksum
from theodolite.models import OpenModel
from theodolite.models.calls import capture_current_calls
from theodolite.models.guard import guarded, measures
from theodolite.models.hooks import Hooks, hooked, positions_read
from theodolite.models.source import Inputs
from theodolite.passes.run import SCHEMA_VERSION, versions
from theodolite.system.choices import check_whole, wider_than
from theodolite.system.progress import Progress

TOKENS_A_BATCH = 4096
"""Default batch: as many contexts as give this many tokens."""


class CorpusPass(Hooks):
    """Hooks into a model's forward passes over a corpus, `batch` contexts each; a subclass may draw by the seed.

    What a subclass sums is in its `accumulators`, by name.
    """

    @measures("model")
    def __init__(self, model: OpenModel, corpus: Corpus, seed: int, batch: int) -> None:
        check_seed(seed)
        self.model, self.corpus, self.seed, self.batch = model, corpus, seed, batch
        self.total = len(corpus.contexts)
        self.notes: dict[str, Any] = {}
        self.accumulators: dict[str, LayerSums] = {}

    def begin(self, first: int, ids: Tensor) -> None:
        """Announce the next contexts, `first …`, a batch of ids."""
        raise NotImplementedError

    @measures("self.model")
    def state(self) -> State:
        """Return all sums so far, as `accumulator.tensor` → tensor."""
        return joined({name: accumulator.state() for name, accumulator in self.accumulators.items()})

    @measures("self.model")
    def restore(self, state: State) -> None:
        """Continue from what `state` gave."""
        for name, accumulator in self.accumulators.items():
            accumulator.restore(part_of(state, name))

    @measures("self.model")
    def run(self, progress: Progress) -> None:
        """Read every context from `progress.done` on.

        In the middle of a batch its sums are half there: between batches progress is saved, and an interrupt heard.
        """
        progress.checkpoint(progress.done)
        self.read(progress.done, self.total, progress.checkpoint)

    @measures("self.model")
    def read(self, first: int, last: int, after: Callable[[int], object] = lambda done: None) -> None:
        """Read the contexts `first … last − 1` in batches that begin at `first`; after each `after` is told its end."""
        with hooked(self.model, self):
            for start in range(first, last, self.batch):
                stop = min(start + self.batch, last)
                for part in self.corpus.of_one_length(start, stop):
                    self.begin(part.start, self.corpus.ids(part))
                    self.forward(self.corpus.inputs(part))
                after(stop)

    def forward(self, inputs: Inputs) -> None:
        """Run the model on a batch."""
        self.model.forward(inputs)


def check_fit(
    model: OpenModel, corpus: Corpus, least_contexts: int = 2, *, text_alone: str | None = None
) -> None:
    """Raise `UsageError` where the model cannot read the corpus, or it has too few contexts.

    `text_alone` says what it is for, where nothing but token ids is read: no images, and no sources.
    """
    if not isinstance(model, OpenModel):
        raise UsageError(
            f"this needs a model from open_model, not {type(model).__name__}: give open_model(it)"
        )
    if not isinstance(corpus, Corpus):
        raise UsageError(f"this needs a Corpus, such as Corpus.from_path(…), not {type(corpus).__name__}")
    if text_alone is not None and not corpus.text_alone:
        raise UsageError(f"{text_alone} reads a text alone: give a corpus without images or sources")
    contexts, length = corpus.contexts.shape
    if corpus.images is not None:
        _check_images(model, corpus.images)
    elif model.vocabulary is None:
        raise UsageError(f"{model.id} reads {model.source.reads}, not text: give it images (--corpus FOLDER)")
    elif not model.has_positions(length):
        raise UsageError(
            f"contexts of {length} tokens are longer than the {model.longest} that {model.id} has positions "
            f"for: use --length {model.longest} or less"
        )
    check_length(length)
    if contexts < least_contexts:
        raise UsageError(
            f"{contexts} {'context is' if contexts == 1 else 'contexts are'} too few: give at least {least_contexts}"
        )
    if corpus.images is None:
        tokens = corpus.tokens
        model.check_tokens(tokens if corpus.pictured is None else tokens[tokens < corpus.pictured.first])
    if corpus.pictured is not None:
        _check_pictured(model, corpus)
    if corpus.sources is not None:
        _ = model.source.target_start  # or it reads no sources
        model.check_tokens(corpus.sources[corpus.sources != NO_TOKEN])
        if model.structure.cross and not torch.equal(corpus.contexts == NO_TOKEN, corpus.sources == NO_TOKEN):
            raise UsageError(
                "keys are counted by the positions of queries: give Corpus.from_pairs(…, alike=True)"
            )


def _check_images(model: OpenModel, images: Images) -> None:
    """Raise `UsageError` unless the model makes as many tokens of an image as its grid has."""
    if model.vocabulary is not None:
        raise UsageError(f"{model.id} reads {model.source.reads}, not images: give it text")
    blank = torch.zeros(1, *images.pixels(slice(0, 1)).shape[1:])
    size = "{} × {}".format(*images.size)
    try:
        tokens = positions_read(model, blank)
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"{model.id} cannot read images of {size}: {first_line(error)}") from error
    if tokens != images.grid.length:
        raise UsageError(
            f"{model.id} makes {tokens} tokens of an image of {size} pixels, not the {images.grid.length} of its grid "
            "of patches"
        )


def _check_pictured(model: OpenModel, corpus: Corpus) -> None:
    """Raise `UsageError` unless the model attends to a picture's tokens as to those of a text, one after the other."""
    assert corpus.pictured is not None
    if getattr(getattr(model.root, "config", None), "image_token_id", None) != corpus.pictured.reader.token:
        raise UsageError(f"{model.id} reads no images in a text, or by another token: give a text alone")
    if not model.calls:
        return  # described before its weights were read
    first = next(corpus.batches(1))
    ids = corpus.ids(first)
    among_text = ids.masked_fill(ids >= corpus.pictured.first, int(ids[ids < corpus.pictured.first][-1]))
    with guarded(model.root):
        try:
            of_both, of_text = (
                capture_current_calls(model.structure, functools.partial(model.source.run, inputs))
                for inputs in (corpus.inputs(first), among_text)
            )
        except (ValueError, RuntimeError, TypeError, IndexError) as error:
            raise UsageError(f"{model.id} cannot read the pictures: {first_line(error)}") from error
    for layer in model.attending:
        if not of_both[layer].called_as(of_text[layer]):
            raise UsageError(
                f"{model.id} sees or counts an image's tokens otherwise than those of a text (each sees later ones, "
                "or has a place in the image): such models are surveyed on text alone"
            )


def fingerprint_of(model: OpenModel) -> dict[str, Any]:
    """Return what decides every byte of the result, except the text and how it is read."""
    weights = model.weights()
    return {
        "versions": versions(),
        "schema_version": SCHEMA_VERSION,
        "model": weights.sha256 or weights.revision or model.id,
        "dtype": str(model.source.dtype),
        "device": model.device.type,
        **({"attention": model.source.attention} if model.source.attention else {}),
        **({"chosen_layers": list(model.chosen)} if model.chosen else {}),
        **({"interventions": list(model.interventions)} if model.interventions else {}),
    }


def fingerprint_of_tables(model: OpenModel) -> dict[str, Any]:
    """Return what `fingerprint_of` does, and which columns the tables have."""
    return {**fingerprint_of(model), "columns": checksum()}


def batch_of(corpus: Corpus, batch: int | None, tokens: int = TOKENS_A_BATCH) -> int:
    """Return the contexts per forward pass, as asked or so many tokens' worth; `UsageError` for no whole number."""
    if batch is not None:
        check_whole(batch=batch)
    if batch is not None and batch < 1:
        raise UsageError(f"a batch of {batch} contexts reads nothing: use --batch 1 or more")
    return int(batch) if batch else max(1, tokens // corpus.contexts.shape[1])


def refuse_nonfinite_stream(layer: int, hidden: Tensor) -> None:
    """Raise `WorkError` where a layer's residual stream (batch, positions, d) holds NaN or infinite values."""
    if not hidden.sum(dtype=torch.promote_types(hidden.dtype, torch.float32)).isfinite():
        raise WorkError(
            f"hidden states of layer {layer} hold NaN or infinite values: {wider_than(hidden.dtype)}"
        )


def next_token_losses(
    logits: Float[Tensor, "contexts positions vocabulary"], ids: Int[Tensor, "contexts positions"]
) -> Float[Tensor, "contexts predicted"]:
    """Return the loss of each next token in nats (T − 1 per context, from position 1), in float32 or better."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    losses = [
        functional.cross_entropy(row[:-1].to(wide), row_ids[1:].to(row.device), reduction="none")
        for row, row_ids in zip(logits, ids, strict=True)
    ]
    return torch.stack(losses).double().cpu()


def perplexity_of(loss: float) -> float:
    """Compute exp of a mean loss in nats, or of a difference of two; infinite on overflow."""
    return float(torch.tensor(loss, dtype=torch.float64).exp())
