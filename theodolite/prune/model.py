"""`prune_model`: prune all matrices in place, block by block, each calibrated on the outputs of the pruned ones.

What is asked is checked in `plan.py` and done in `pruning_run.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from theodolite.corpus.corpus import Corpus
from theodolite.models import OpenModel
from theodolite.models.guard import measures
from theodolite.models.streamed import instead_of_offloaded
from theodolite.prune.checkpoint import WriteExtras
from theodolite.prune.plan import planned
from theodolite.prune.pruned import Pruned
from theodolite.prune.pruning_run import PruningRun, in_this_process
from theodolite.system.progress import ShowProgress
from theodolite.system.pruning_options import (
    DAMPING,
    GROUP,
    ITERATIONS,
    RANK_RATIO,
    PruningOptions,
    RankRatio,
    Sparsity,
)


@measures
def prune_model(
    model: OpenModel,
    corpus: Corpus,
    method: str,
    sparsity: Sparsity = None,
    *,
    sparsity_by: str | None = None,
    pattern: str | None = None,
    rank_ratio: RankRatio = RANK_RATIO,
    iterations: int = ITERATIONS,
    seed: int = 0,
    damping: float = DAMPING,
    exact: bool = False,
    skip: Sequence[str] = (),
    recipe: str | Path | None = None,
    bits: int | None = None,
    group: int = GROUP,
    recover: int | None = None,
    out: str | Path | None = None,
    form: str = "merged",
    batch: int | None = None,
    devices: Sequence[str] = (),
    errors: bool = False,
    write_extras: WriteExtras = lambda pruned, folder: None,
    show_progress: ShowProgress = lambda done, total: None,
) -> Pruned:
    """Prune a model in place, and write it as a checkpoint where `out` says.

    Of a model from `open_streamed`, a block is in memory while it is pruned, and its pruned matrices are written to
    `out` only. So it is with a model that `device_map` has offloaded: its files are read, and it stays as it is.

    Every linear layer inside the blocks is pruned, W_Q, W_K and W_V separately where they are fused, and the matrices
    of every expert on the tokens routed to it; embeddings, head, norms, biases and routers are not.

    Args:
        model: from `open_model`, and left half pruned by an interrupt; or from `open_streamed`.
        corpus: the calibration text; all its tokens count.
        method: "oats", "sparsegpt", "wanda" or "magnitude"; with `bits`, "oats", "gptq" or "round".
        sparsity: share of entries removed, strictly between 0 and 1; one number for all blocks, or one per block, or a
            function of (block, name of the matrix). For OATS, the low-rank part counts among the kept entries. None:
            the sparsity of the pattern, or with `bits`.
        sparsity_by: "owl": blocks with more outliers keep more, and `sparsity` is the mean (Yin et al. 2024). "tags":
            those whose heads' outputs are more of what sinks write (ours).
        pattern: "2:4" keeps at most 2 of every 4 consecutive inputs of an output, in the sparse part.
        rank_ratio: for OATS: the share of the kept parameters (with `bits`: of the bytes) in the low-rank part, from 0
            to 1; or a function of (block, name of the matrix): `lambda layer, name: 0.5 if name in "qk" else 0.25`.
        iterations: for OATS.
        seed: for OATS: of the random start, and of the probes that check whether its subspace is still the leading one.
        damping: for SparseGPT, as in `sparsegpt`; with `bits`, for GPTQ and OATS.
        exact: for OATS: a full SVD in every iteration, as published, of large matrices too.
        skip: globs of names of matrices that stay dense, in their block ("mlp.down_proj", "q") or in the model
            ("model.layers.0.*").
        recipe: a YAML file with sparsities, rank ratios and what to skip by matrix (`recipe.py`).
        bits: 8, 4 or 3: put weights on a grid of so many bits instead of removing some; what is not pruned stays.
        group: inputs that share a scale there; 0: all inputs of an output.
        recover: for "adapter": steps of AdamW in which the low-rank parts are trained on the text, whose last tenth is
            held out from pruning and training, and says what they brought (`pruning.json`).
        out: folder of the checkpoint, which a streamed model needs; to resume an interrupted call, repeat it on a newly
            opened model. Where it holds this same pruning already, that is read instead.
        form: "merged" (`transformers` opens it), "factored" (`open_model` opens it), "adapter" (`transformers` opens
            the sparse parts, PEFT the low-rank ones), or "compressed" (as "adapter", with packed bits).
        batch: contexts per forward pass; None: 4096 tokens' worth.
        devices: of one kind ("cuda:0", "cuda:1"), which share the matrices of a block; those with the same inputs stay
            together where a method needs full moments. The result does not depend on how many there are.
        errors: of "magnitude" and "round", which weigh no inputs: run the text all the same, for the errors of outputs
            in the table; else these are of the weights alone.
        write_extras: writes further files, given the result and the temporary folder that becomes `out`.
        show_progress: told (done, total) matrices, also after every batch; it may raise to stop.

    Raises:
        UsageError: settings out of range, a text that does not fit or is too short, a model that is already pruned,
            quantised or under an intervention, or `out` holds something else.
        WorkError: the family cannot be run block by block, NaN occurred, or a file cannot be written.
    """
    options = PruningOptions.among(locals())  # a test says that they agree
    plan = planned(instead_of_offloaded(model), corpus, options)
    return PruningRun(plan, in_this_process, show_progress).finished(write_extras)
