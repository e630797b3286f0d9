"""One pass of a model over a corpus that can be interrupted at any moment, and what it ends in.

What is summed on the way is a subclass's business; here are the loop, the progress that is saved at intervals, and
the fit of a corpus to a model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from theodolite.accumulate.sums import State
from theodolite.attention.inputs import AttentionInputs
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError, WorkError
from theodolite.models import OpenModel
from theodolite.models.hooks import watched
from theodolite.models.structure import backbone
from theodolite.passes.provenance import versions
from theodolite.passes.run import SCHEMA_VERSION, Run, Workspace

TOKENS_A_BATCH = 4096
"""Default batch: as many contexts as give this many tokens."""

LEAST_LENGTH = 4
"""Tokens of a context, position 0 included."""

ShowProgress = Callable[[int, int], None]
"""Told (contexts done, contexts in all) after every batch."""


class Accumulator(Protocol):
    """What can be saved and gone on with."""

    def state(self) -> State:
        """Everything seen so far."""

    def restore(self, state: State) -> None:
        """Continue from what `state` gave."""


class Reading:
    """A `Watcher` of a model's forward passes over a corpus, and the loop that makes them."""

    def __init__(self, model: OpenModel, corpus: Corpus, seed: int) -> None:
        self.model = model
        self.corpus = corpus
        self.seed = seed

    @property
    def accumulators(self) -> Mapping[str, Accumulator]:
        """The accumulators by name."""
        raise NotImplementedError

    def begin(self, first: int, ids: Tensor) -> None:
        """Contexts `first …`, a batch of ids, come next."""
        raise NotImplementedError

    def stream(self, layer: int, hidden: Tensor) -> None:
        """As `Watcher.stream`."""
        raise NotImplementedError

    def attention_input(self, layer: int, hidden: Tensor) -> None:
        """As `Watcher.attention_input`."""
        raise NotImplementedError

    def attention(self, layer: int, inputs: AttentionInputs) -> Tensor:
        """As `Watcher.attention`."""
        raise NotImplementedError

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

    def read(self, batch: int, first: int, last: int) -> None:
        """Read the contexts `first … last − 1` only, in batches that begin at `first`."""
        with watched(self.model, self):
            for start in range(first, last, batch):
                self._read(start, min(start + batch, last))

    def _read(self, first: int, last: int) -> None:
        ids = self.corpus.contexts[first:last]
        self.begin(first, ids)
        with torch.inference_mode():
            self.forward(ids)

    def forward(self, ids: Tensor) -> None:
        """Run the model on a batch."""
        backbone(self.model.hf)(input_ids=ids.to(self.model.device), use_cache=False)


Pass = TypeVar("Pass", bound=Reading)


def read_into_run(
    make_pass: Callable[[], Pass],
    result: Callable[[Pass, dict[str, Any], float], Run],
    out: str | Path | None,
    *,
    batch: int,
    fingerprint: dict[str, Any],
    checkpoint_seconds: float,
    show_progress: ShowProgress,
) -> Run:
    """Make the pass and its result; with a run folder `out`, go on from what an interrupted call left there.

    Args:
        make_pass: the pass, before anything is read.
        result: the run from a finished pass, the fingerprint, and the seconds that it took.
        out: the run folder to write; None keeps the run in memory.
        batch: contexts a forward pass.
        fingerprint: what decides every byte of the result.
        checkpoint_seconds: how often progress is saved.
        show_progress: told (done, total) contexts; it may raise to stop, and progress is saved then.

    Raises:
        UsageError: `out` holds something else.
        WorkError: hidden states became NaN or infinite, or the disk refused.
    """
    if out is None:
        started, done_pass = time.monotonic(), make_pass()
        done_pass.run(batch, 0, show_progress, lambda done, must: None)
        return result(done_pass, fingerprint, time.monotonic() - started)
    workspace = Workspace(Path(out), fingerprint)
    with workspace.locked():
        finished = workspace.finished()
        if finished is not None:
            return finished
        one_pass = make_pass()
        seconds = _resumed(workspace, one_pass, batch, checkpoint_seconds, show_progress)
        return workspace.finish(result(one_pass, fingerprint, seconds))


def _resumed(
    workspace: Workspace,
    one_pass: Reading,
    batch: int,
    checkpoint_seconds: float,
    show_progress: ShowProgress,
) -> float:
    """Run the pass to its end; the seconds that it took, in this process and before."""
    started, done = time.monotonic(), 0
    progress = workspace.load_progress()
    if progress is not None:
        notes, tensors = progress
        done = notes["contexts"]
        started -= notes["seconds"]
        try:
            one_pass.restore(tensors)
        except (KeyError, RuntimeError) as error:  # a sum that was not kept then, or of another shape
            raise UsageError(
                f"{workspace.folder} holds what another version of theodolite left unfinished, with other sums: remove "
                "it to start afresh"
            ) from error
    saved = time.monotonic()

    def save(contexts: int, must: bool) -> None:
        nonlocal saved
        if must or time.monotonic() - saved >= checkpoint_seconds:
            notes = {"contexts": contexts, "seconds": time.monotonic() - started}
            workspace.save_progress(notes, one_pass.state())
            saved = time.monotonic()

    one_pass.run(batch, done, show_progress, save)
    return time.monotonic() - started


def check_fit(model: OpenModel, corpus: Corpus, least_contexts: int = 2) -> None:
    """Refuse a corpus that the model cannot read.

    Raises:
        UsageError: why.
    """
    if not isinstance(model, OpenModel):
        raise UsageError(f"this needs a model from open_model(NAME), not {type(model).__name__}")
    if not isinstance(corpus, Corpus):
        raise UsageError(f"this needs a Corpus, such as Corpus.from_path(…), not {type(corpus).__name__}")
    contexts, length = corpus.contexts.shape
    if model.vocabulary is None:
        raise UsageError(
            f"{model.id} reads {model.hf.main_input_name}, not text: only `theodolite spectra` can measure it"
        )
    if model.longest is not None and length > model.longest:
        raise UsageError(
            f"contexts of {length} tokens are longer than the {model.longest} that {model.id} has positions "
            f"for: use --length {model.longest} or less"
        )
    if length < LEAST_LENGTH:
        raise UsageError(f"contexts of {length} tokens are too short: use --length {LEAST_LENGTH} or more")
    if contexts < least_contexts:
        raise UsageError(
            f"{contexts} {'context is' if contexts == 1 else 'contexts are'} too few: give at least {least_contexts}"
        )
    smallest, largest = (int(end) for end in corpus.contexts.aminmax())
    if smallest < 0 or largest >= model.vocabulary:
        raise UsageError(
            f"token id {min(smallest, 0) or largest} does not fit the {model.vocabulary} tokens of {model.id}: "
            "the tokenizer belongs to another model"
        )


def fingerprint_of(model: OpenModel) -> dict[str, Any]:
    """What decides every byte of the result, but for the text and how it is read."""
    return {
        "versions": versions(),
        "schema_version": SCHEMA_VERSION,
        "model": model.sha256 or model.revision or model.id,
        "dtype": str(model.hf.dtype),
        "device": model.device.type,
        **({"edits": list(model.edits)} if model.edits else {}),
    }


def batch_of(corpus: Corpus, batch: int | None) -> int:
    """The contexts of a forward pass: as asked for, or 4096 tokens' worth.

    Raises:
        UsageError: none would be read.
    """
    if batch is not None and batch < 1:
        raise UsageError(f"a batch of {batch} contexts reads nothing: use --batch 1 or more")
    return batch or max(1, TOKENS_A_BATCH // corpus.contexts.shape[1])


def refuse_bad_numbers(layer: int, hidden: Tensor) -> None:
    """Stop where hidden states are no numbers any more.

    Raises:
        WorkError: they hold NaN or infinite values.
    """
    if not torch.isfinite(hidden.sum(dtype=torch.float32)):
        raise WorkError(f"hidden states of layer {layer} hold NaN or infinite values: try --dtype float32")


def next_token_losses(logits: Tensor, ids: Tensor) -> Float[Tensor, "contexts positions"]:
    """Nats for each next token, in float32 or better, one context at a time."""
    losses = [
        torch.nn.functional.cross_entropy(
            row[:-1].to(torch.promote_types(row.dtype, torch.float32)),
            own[1:].to(row.device),
            reduction="none",
        )
        for row, own in zip(logits, ids, strict=True)
    ]
    return torch.stack(losses).double().cpu()
