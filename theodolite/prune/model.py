"""Prune all matrices of a model in place, block by block, each calibrated on the outputs of the pruned ones."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

import theodolite.prune.checkpoint as checkpoint
import theodolite.prune.methods as methods
from theodolite.accumulate.second_moments import SecondMoments
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError, WorkError
from theodolite.models import OpenModel, open_model
from theodolite.models.guard import measures, without_autocast
from theodolite.models.stored.factored import PrunedMatrix
from theodolite.models.stored.loading import RUNNING_ERRORS, reason_of
from theodolite.models.structure import first_output, removed_on_leaving
from theodolite.models.sweep import Sweep
from theodolite.models.weights import block_matrices
from theodolite.models.weights.block_matrices import Matrix
from theodolite.passes.corpus_pass import batch_of, check_fit, fingerprint_of, refuse_nonfinite_stream
from theodolite.passes.run import describe_corpus, describe_model, describe_pass
from theodolite.prune.checkpoint import Pruned, UnfinishedPruning
from theodolite.prune.options import TOKENS_A_BATCH, PruningOptions, RankRatio, Sparsity
from theodolite.prune.sparse_low_rank import oats, rank_and_entries
from theodolite.system.checkpoint_folders import ADAPTER, SETTINGS, refuse_inside
from theodolite.system.choices import wider_than
from theodolite.system.processor import multiplies_bfloat16_faster
from theodolite.system.progress import ShowProgress

SCHEMA_VERSION = 1
WIDE = 512  # width from which products are most of the time that it takes to read the text
NO_TOKENS = "no token of the text reached it: all inputs weighted equally"

MAX_ROUNDINGS = 16  # between block-by-block and whole passes, in machine epsilons of the largest entry
WITNESS = 64  # tokens of the first context that go block by block and in a whole pass, to be compared
SUMMED_AT_ONCE = 256  # squares summed in float32, in a tenth of the time, before they are added up in float64


@measures("model")
def prune_model(
    model: OpenModel,
    corpus: Corpus,
    method: str,
    sparsity: Sparsity = None,
    *,
    pattern: str | None = None,
    rank_ratio: RankRatio = PruningOptions.rank_ratio,
    iterations: int = PruningOptions.iterations,
    seed: int = 0,
    damping: float = PruningOptions.damping,
    exact: bool = False,
    skip: Sequence[str] = (),
    out: str | Path | None = None,
    form: str = "merged",
    batch: int | None = None,
    show_progress: ShowProgress = lambda done, total: None,
) -> Pruned:
    """Prune a model in place, and write it as a checkpoint where `out` says.

    Every linear layer inside the blocks is pruned, W_Q, W_K and W_V separately, and the matrices of every expert on the
    tokens routed to it; embeddings, head, norms, biases and routers are not.

    Args:
        model: from `open_model`, and left half pruned by an interrupt; or from `open_streamed`: then a block is in
            memory while it is pruned, and its pruned matrices are written to `out` only.
        corpus: the calibration text; all its tokens count.
        method: "oats", "sparsegpt", "wanda" or "magnitude".
        sparsity: share of entries removed, in (0, 1); one number for all blocks, or one per block, or a function of
            (block, name of the matrix). OATS counts its low-rank part among the kept entries. None: the pattern's.
        pattern: "2:4" keeps at most 2 of every 4 consecutive inputs of an output, in the sparse part.
        rank_ratio: for OATS: the share of the kept parameters in the low-rank part, in [0, 1]; or a function of
            (block, name of the matrix): `lambda layer, name: 0.5 if name in "qk" else 0.25`.
        iterations, seed: for OATS, as in `oats`; damping: for SparseGPT, as in `sparsegpt`.
        exact: read the text in the model's own precision, also where bfloat16 is faster; for OATS a full SVD in every
            iteration, as published.
        skip: globs of names of matrices that stay dense, in their block ("mlp.down_proj", "q") or in the model
            ("model.layers.0.*").
        out: folder of the checkpoint, which a streamed model needs; to resume an interrupted call, repeat it on a newly
            opened model. Where it holds this same pruning already, that is read instead.
        form: "merged" (`transformers` opens it), "factored" (smaller; `open_model` opens it), or "adapter"
            (`transformers` opens the sparse parts, PEFT the low-rank ones).
        batch: contexts per forward pass; None: 1024 tokens' worth.
        show_progress: told (done, total) matrices, also after every batch; it may raise to stop.

    Raises:
        UsageError: settings out of range, a text that does not fit or is too short, a model that is already pruned,
            quantised or under an intervention, or `out` holds something else.
        WorkError: the family cannot be run block by block, NaN occurred, or a file cannot be written.
    """
    of_oats = pattern, rank_ratio, iterations, seed
    options = PruningOptions(method, sparsity, *of_oats, damping, exact, skip, out, form, batch)
    pruning = _Pruning(model, corpus, options, show_progress)
    if options.out is None:
        return pruning.run(None)
    described = describe_corpus(corpus) if options.reads_text else None
    unfinished = UnfinishedPruning(Path(options.out), pruning.fingerprint, described)
    with unfinished.claimed():
        written = unfinished.finished(options.form)
        if written is None:
            pruned = pruning.run(unfinished)
            return unfinished.finish(model, pruning.matrices, pruned, options.form)
        if model.streamed is None:
            pruning.restore(Path(options.out))
        return written


def check_shares(sparsity: Sparsity, blocks: int) -> None:
    """Raise `UsageError` where shares are of other blocks."""
    if isinstance(sparsity, Sequence) and len(sparsity) != blocks:
        raise UsageError(f"{len(sparsity)} sparsities for {blocks} blocks: give one, or one per block")


class _Pruning:
    """A pruning of a model, every argument checked before anything is pruned."""

    def __init__(
        self, model: OpenModel, corpus: Corpus, options: PruningOptions, show_progress: ShowProgress
    ) -> None:
        check_fit(model, corpus, least_contexts=1, text_alone="pruning")
        options = options.checked(streamed=model.streamed is not None)
        self.model, self.corpus, self.options, self.show_progress = model, corpus, options, show_progress
        self.batch = batch_of(corpus, options.batch, TOKENS_A_BATCH)
        if options.out is not None:
            refuse_inside(Path(options.out), model.id)
            _ = model.hf  # or it refuses: a checkpoint is one of transformers
        self.matrices = _without_skipped(model, options)
        self.every = list(chain(*self.matrices))
        self._set_shares()
        widest = max(matrix.shape[1] for matrix in self.every)
        if options.moments_damping is not None and len(corpus.tokens) < widest:
            raise UsageError(
                f"{len(corpus.tokens)} tokens do not calibrate SparseGPT for matrices of {widest} inputs: give more "
                "text, or more --contexts"
            )
        in_float32 = (model.source.dtype, torch.device(model.device).type) == (torch.float32, "cpu")
        may_round = options.reads_text and not options.exact and in_float32 and model.width >= WIDE
        self.rounded = may_round and multiplies_bfloat16_faster()
        self.fingerprint: dict[str, Any] = fingerprint_of(model) | {"pruning": self._settings()}
        if options.reads_text:  # else it decides nothing, and is not named in the result
            self.fingerprint |= {"corpus": corpus.sha256, "batch": self.batch}

    def _set_shares(self) -> None:
        """Set the sparsity and the rank ratio of each matrix, and refuse those that do not work."""
        options = self.options
        check_shares(options.sparsity, len(self.matrices))
        self.sparsity: dict[tuple[int, str], float | None] = {}
        self.rank_ratio: dict[tuple[int, str], float] = {}
        fills_adapter = False
        for matrix in self.every:
            share, ratio = options.shares(matrix.layer, matrix.name)
            self.sparsity[matrix.layer, matrix.key] = share
            self.rank_ratio[matrix.layer, matrix.key] = ratio
            if options.method == "oats":
                rank = rank_and_entries(matrix.shape, share, ratio, options.pattern).rank
                fills_adapter |= rank > 0 and matrix.expert is None
            else:
                methods.share_removed(share, options.pattern, matrix.shape[1])
        if options.form == ADAPTER and not fills_adapter:
            raise UsageError(
                "every matrix gets rank 0, which leaves no low-rank part that an adapter could hold: choose a larger "
                "rank ratio, or another --format"
            )

    def _settings(self) -> dict[str, Any]:
        """Describe what decides the result, as plain values."""
        options = self.options
        settings: dict[str, Any] = {"method": options.method, "sparsity": _plain(self.sparsity)}
        settings["pattern"] = options.pattern
        if options.method == "oats":
            settings |= {"rank_ratio": _plain(self.rank_ratio), "iterations": options.iterations}
            settings["seed"] = options.seed
        if options.moments_damping is not None:
            settings["damping"] = options.moments_damping
        if options.exact:
            settings["exact"] = True
        if self.rounded:
            settings["products"] = "bfloat16"
        return settings | ({"skip": sorted(set(options.skip))} if options.skip else {})

    def run(self, unfinished: UnfinishedPruning | None) -> Pruned:
        """Prune every unfinished block, and write the result of every block into the model."""
        model, options = self.model, self.options
        started = time.monotonic()
        rows: checkpoint.TableRows = []
        low_rank: list[checkpoint.LowRank] = []  # where no file has them
        described: dict[str, Any] = {"seed": options.seed, "fingerprint": self.fingerprint}
        if options.reads_text:
            described = describe_pass(model, self.corpus, options.seed, self.fingerprint)
        pruning = {"schema_version": SCHEMA_VERSION, **self.fingerprint["pruning"]}
        pruning["left_dense"] = block_matrices.left_dense(model, self.every)
        provenance = describe_model(model) | described | {"pruning": pruning}
        folder = unfinished.folder if unfinished and model.streamed is not None else None

        def between() -> None:
            self.show_progress(len(rows), len(self.every))

        with block_matrices.one_expert_at_a_time(model.root):
            text = None
            if options.reads_text:
                text = BlockByBlock(model, self.corpus, self.batch, between, folder, rounded=self.rounded)
            if model.streamed is None:
                self._record()
            for layer, matrices in enumerate(self.matrices):
                with model.block_present(layer):
                    done = unfinished.block(layer) if unfinished else None
                    pruned, block_rows = done or self._pruned_block(text, layer, matrices, len(rows))
                    checkpoint.write_block(matrices, pruned)
                    if unfinished and not done:
                        unfinished.save_block(layer, pruned, block_rows)
                    rows += block_rows
                    if not unfinished:
                        low_rank.append(checkpoint.low_rank_of(layer, pruned))
                    del done, pruned  # a block's worth of memory, before the next one is read
                    if text and layer + 1 < model.layers:
                        text.advance(layer)
        self.show_progress(len(self.every), len(self.every))
        provenance |= {"wall_seconds": time.monotonic() - started}
        return Pruned(pd.DataFrame(rows), provenance, low_rank.__getitem__)

    def _pruned_block(
        self, text: BlockByBlock | None, layer: int, matrices: Sequence[Matrix], before: int
    ) -> tuple[list[PrunedMatrix], checkpoint.TableRows]:
        """Return a block's matrices, pruned, with their rows of the table; `before`: how many came before."""
        moments = InputMoments(matrices, self.options.moments_damping)
        if text:
            text.read(layer, moments)
        pruned: list[PrunedMatrix] = []
        rows: checkpoint.TableRows = []
        for matrix in matrices:
            # Not after the last matrix: a finished block is saved before an interrupt can stop the work.
            self.show_progress(before + len(rows), len(self.every))
            approximation, row = self.prune(matrix, moments.of(matrix))
            pruned.append(approximation)
            rows.append(row)
        return pruned, rows

    def prune(self, matrix: Matrix, moments: Moments) -> tuple[PrunedMatrix, dict[str, Any]]:
        """Return one matrix, pruned in its own dtype, and its row of the table; `WorkError` if nothing entered it."""
        options = self.options
        if not moments.count and not matrix.is_of_expert and options.reads_text:
            raise WorkError(
                f"{matrix.parameter} got no input while its block read the text, so {options.method} cannot weigh its "
                "inputs: use --method magnitude, which weighs none"
            )
        share, ratio = self.sparsity[matrix.layer, matrix.key], self.rank_ratio[matrix.layer, matrix.key]
        weight = matrix.read()
        (sparse, *low_rank), damping, fallback = self._approximated(weight, moments, share, ratio)
        sparse.masked_fill_(sparse == 0, 0)  # a negative zero would not outlive packing
        place = matrix.key, matrix.parameter, matrix.expert, matrix.dimension, matrix.rows
        pruned = PrunedMatrix(*place, sparse, *low_rank)
        difference = weight.to(methods.precision_of(weight))
        whole = moments.squared_norm(difference)
        lost = moments.squared_norm(difference.sub_(pruned.merged()))
        nonzeros = int((sparse != 0).sum())
        parameters = nonzeros + sum(factor.numel() for factor in low_rank)
        return pruned, {
            "layer": matrix.layer,
            "matrix": matrix.name,
            "expert": -1 if matrix.expert is None else matrix.expert,
            "parameter": matrix.parameter,
            "outputs": matrix.shape[0],
            "inputs": matrix.shape[1],
            "method": options.method,
            "asked": math.nan if share is None else share,
            "sparsity": 1 - parameters / sparse.numel(),
            "rank": len(low_rank[1]) if low_rank else 0,
            "nonzeros": nonzeros,
            "error_scaled": math.sqrt(lost / whole) if whole > 0 else math.nan,
            "damping": damping,
            "tokens": moments.count,
            "fallback": fallback if moments.count or not options.reads_text else NO_TOKENS,
        }

    def _approximated(
        self, weight: Tensor, moments: Moments, sparsity: float | None, ratio: float
    ) -> tuple[tuple[Tensor, ...], float, str]:
        """Return the parts of a pruned weight, sparse and if any low-rank, the damping, and what else was done."""
        options, pattern = self.options, self.options.pattern
        if options.method == "magnitude":
            return (methods.magnitude(weight, sparsity, pattern),), math.nan, ""
        if options.method == "wanda":
            return (methods.wanda(weight, moments.diagonal.sqrt(), sparsity, pattern),), math.nan, ""
        if options.method == "sparsegpt":
            assert moments.factor is not None
            damping = moments.factor.damping
            raised = f"damping raised to {damping:g}" if damping > options.damping else ""
            return (methods.sparsegpt(weight, moments.factor, sparsity, pattern),), damping, raised
        parts = sparsity, ratio, options.iterations, pattern
        split = oats(weight, moments.diagonal, *parts, seed=options.seed, exact=options.exact)
        stalled = f"full SVD in {split.stalls} of {split.iterations} iterations" if split.stalls else ""
        low_rank = (split.left, split.right) if split.left.numel() else ()
        return (split.sparse, *low_rank), math.nan, stalled

    def restore(self, folder: Path) -> None:
        """Put the matrices of this same pruning, finished in `folder`, into the model."""
        source: Any = self.model.source
        opened = open_model(folder, dtype=source.dtype, device="cpu", attention=source.attention)
        theirs = {(each.layer, each.key): each for each in chain(*block_matrices.block_matrices(opened))}
        for matrix in self.every:
            matrix.write(theirs[matrix.layer, matrix.key].read())
        self._record()

    def _record(self) -> None:
        digest = hashlib.sha256(json.dumps(self.fingerprint).encode()).hexdigest()
        self.model.record_intervention(f"pruned({self.options.method}, sha256:{digest[:16]})")


def _without_skipped(model: OpenModel, options: PruningOptions) -> list[list[Matrix]]:
    """Find the matrices of each block but those that `options.skip` names, themselves or a module; or `UsageError`."""
    if model.interventions:
        raise UsageError(f"the opened model was modified ({model.interventions[-1]}): open it anew")
    if (Path(model.id) / SETTINGS).is_file():
        raise UsageError(f"{model.id} is pruned already ({SETTINGS} is next to its weights): give another")
    matrices = block_matrices.block_matrices(model)
    if not any(matrices):
        raise UsageError(f"{model.source.name} has no linear layers in its blocks that could be pruned")
    name_of = {module: name for name, module in model.root.named_modules()}
    blocks = [name_of[block] for block in model.structure.blocks]

    def is_of(glob: str, matrix: Matrix) -> bool:
        path = matrix.parameter
        names = (path, path.removeprefix(f"{blocks[matrix.layer]}."), matrix.key, matrix.name)
        return any(fnmatchcase(f"{name}.", f"{glob}.*") for name in names)

    for glob in options.skip:
        if not any(is_of(glob, matrix) for matrix in chain(*matrices)):
            known = ", ".join(matrix.key for matrix in next(filter(None, matrices)))
            raise UsageError(
                f"--skip {glob}: no matrix of {model.id} is called so, and none is in a module of that name; "
                f"those of a block are {known}"
            )
    left = [[each for each in block if not any(is_of(g, each) for g in options.skip)] for block in matrices]
    if not any(left):
        raise UsageError(f"--skip {','.join(options.skip)}: nothing is left to prune")
    parts, kept = (Counter(each.parameter for each in chain(*of)) for of in (matrices, left))
    for parameter, count in kept.items():
        if options.form == "factored" and count < parts[parameter]:
            raise UsageError(
                f"--format factored keeps {parameter} as a whole: skip all of its {parts[parameter]} parts, or none"
            )
    return left


def _plain(values: Mapping[tuple[int, str], float | None]) -> Any:
    """Return one value if all matrices agree, else all by name."""
    if len(set(values.values())) == 1:
        return next(iter(values.values()))
    return {f"{layer}/{key}": value for (layer, key), value in values.items()}


class BlockByBlock:
    """The calibration contexts on their way through the blocks, which may be changed between calls.

    `between` is called after every batch, and may raise; `folder`: as of `Sweep`; `rounded`: products in bfloat16.
    """

    def __init__(
        self,
        model: OpenModel,
        corpus: Corpus,
        batch: int,
        between: Callable[[], None],
        folder: Path | None = None,
        *,
        rounded: bool = False,
    ) -> None:
        self._model, self._between = model, between
        self._rounding = partial(torch.autocast, model.device.type, torch.bfloat16, enabled=rounded)
        self._batches = [corpus.ids(part) for part in corpus.batches(batch)]
        self._sweep = Sweep(model.structure.blocks, folder, beside=True)
        self._sweep.others = _run_block_by_block(model, corpus.ids(slice(0, 1))[:, :WITNESS])

    def read(self, layer: int, moments: InputMoments) -> None:
        """Run a block on all contexts for the moments of what enters its matrices."""

        @contextmanager
        def collecting() -> Iterator[None]:
            with self._rounding(), moments.collecting():
                yield

        with self._sweep.block(layer, collecting, keep=False):
            for ids in self._batches:
                self._model.forward(ids)
                self._between()

    def advance(self, layer: int) -> None:
        """Run a block on all contexts; its outputs become the inputs of the next one."""
        with self._sweep.block(layer, self._rounding):
            for number, ids in enumerate(self._batches):
                self._model.forward(ids)
                refuse_nonfinite_stream(layer + 1, self._sweep.carried[number])
                self._between()


def _run_block_by_block(model: OpenModel, ids: Int[Tensor, "contexts positions"]) -> int | None:
    """Run the blocks one by one, and return `Sweep.others`; `WorkError` unless it gives what a whole pass does."""
    family, sweep = model.source.name, Sweep(model.structure.blocks, beside=True)
    try:
        for layer in range(model.layers):
            with model.block_present(layer), sweep.block(layer):
                model.forward(ids)
    except (WorkError, *RUNNING_ERRORS) as error:
        raise WorkError(f"{family} cannot be pruned block by block: {reason_of(error)}") from error
    outputs: list[Tensor] = []
    last = model.structure.blocks[-1]
    hook = last.register_forward_hook(lambda _, args, output: outputs.append(first_output(output)))
    with removed_on_leaving([hook]):
        model.forward(ids)
    ours, whole = sweep.carried[0].double(), outputs[0].double()
    differs = float((ours - whole).abs().max() / whole.abs().max().clamp_min(1e-300))
    if not differs <= MAX_ROUNDINGS * torch.finfo(outputs[0].dtype).eps:
        raise WorkError(
            f"{family}: running its blocks one by one differs from the model's own pass by {differs:.1e}, so it "
            "cannot be pruned block by block"
        )
    return sweep.others


@dataclass(frozen=True)
class Moments:
    """Second moments of the `count` input vectors x of a matrix: mean of x_i², and if requested of x xᵀ, factored."""

    count: int
    diagonal: Float64[Tensor, " inputs"]
    factor: methods.HessianFactor | None

    def squared_norm(self, matrix: Float[Tensor, "outputs inputs"]) -> float:
        """Compute ‖M D‖², the mean of ‖M x‖² where inputs are uncorrelated."""
        norms = [rows.square() @ self.diagonal.to(matrix.dtype) for rows in matrix.split(methods.ROWS)]
        return float(torch.cat(norms).double().sum())


class _AllInputsSeen(Exception):
    """Raised to leave a block that has nothing left to show."""


class InputMoments:
    """Sums over a block's inputs, one for matrices with the same ones; without a damping, of their squares alone."""

    def __init__(self, matrices: Sequence[Matrix], damping: float | None = None) -> None:
        self._damping = damping
        self._widths = {matrix.holder.data_ptr(): matrix.shape[1] for matrix in matrices}
        self._sums: dict[int, SecondMoments | tuple[int, Tensor]] = {}
        self._moments: dict[int, Moments] = {}
        self._first: dict[int, int] = {}
        self._last: tuple[int, Tensor | None] = (0, None)
        self._uses: Counter[int] = Counter()  # in this run of the block
        self._may_leave = False

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect the inputs of products with the matrices in one run of the block."""
        # Where the first run used each matrix once, the others are left before the last product: of a gated MLP that
        # saves a quarter of the work.
        self._uses.clear()
        with suppress(_AllInputsSeen), block_matrices.TappedProducts(self._add):
            yield
        self._may_leave = all(self._uses[at] == 1 for at in self._widths)

    @torch.inference_mode()  # as the pass in which sums were made, which are changed in place
    def of(self, matrix: Matrix) -> Moments:
        """Return the moments of a matrix's inputs, those of the identity if it had none; `WorkError` if infinite."""
        at, device = matrix.holder.data_ptr(), matrix.holder.device
        first = self._first.get(at, at)
        if first in self._moments:
            return self._moments[first]
        sums, full = self._sums.pop(first, None), None
        if sums is None:
            count, diagonal = 0, torch.ones(matrix.shape[1], dtype=torch.float64, device=device)
            full = None if self._damping is None else diagonal.diag()
        elif isinstance(sums, tuple):
            count, diagonal = sums[0], sums[1].to(device) / sums[0]
        else:  # mean(x xᵀ) = covariance + x̄ x̄ᵀ takes the place of the sums
            total, mean, moment = (sums.at(name, 0, device) for name in ("count", "mean", "moment"))
            full = moment.div_(total).addr_(mean, mean)
            count, diagonal = int(total), full.diagonal().clone()
        if not torch.isfinite(diagonal).all():
            raise WorkError(
                f"the input of {matrix.parameter} is NaN, infinite or too large: {wider_than(matrix.holder.dtype)}"
            )
        factor = None
        if full is not None and self._damping is not None:
            factor = methods.factor_hessian(full, self._damping, overwrite=True)
        moments = Moments(count, diagonal, factor)
        if count:
            self._moments[first] = moments
        return moments

    def _add(self, inputs: Tensor, matrix: Tensor) -> None:
        at = matrix.data_ptr()
        if self._widths.get(at) != inputs.shape[-1]:
            return
        self._uses[at] += 1
        last, tensor = self._last
        first = self._first.setdefault(at, last if inputs is tensor else at)
        if first == at:
            self._last = (at, inputs)
            with without_autocast():
                self._sum(at, inputs)
        elif inputs is not tensor:
            raise WorkError("two matrices share their inputs in one batch and not in another")
        if self._may_leave and len(self._uses) == len(self._widths):
            raise _AllInputsSeen

    def _sum(self, at: int, inputs: Tensor) -> None:
        rows = inputs.detach().reshape(-1, inputs.shape[-1])
        if not len(rows):  # an expert may be run on none
            return
        sums = self._sums.get(at)
        if self._damping is not None:
            if sums is None:
                sums = self._sums[at] = SecondMoments(1, rows.shape[1])
            assert isinstance(sums, SecondMoments)
            sums.update(0, rows)
        else:
            assert not isinstance(sums, SecondMoments)
            count, squares = sums or (0, rows.new_zeros(rows.shape[1], dtype=torch.float64))
            for chunk in rows.split(SUMMED_AT_ONCE):
                squares = squares + chunk.to(methods.precision_of(chunk)).square().sum(dim=0)
            self._sums[at] = count + len(rows), squares
