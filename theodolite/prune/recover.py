"""Train the low-rank parts of a pruned model on its calibration text, with the sparse parts frozen.

This is the fine-tuning of a LoRA adapter (Hu et al. 2022) that begins at the low-rank parts which pruning left, so that
zeros stay zeros. What it brings is told on contexts that neither pruning nor training has read, beside what the same
steps bring to the dense model with a fresh adapter of the same ranks: text teaches a model that was never pruned, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor, nn

from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError, WorkError
from theodolite.models import OpenModel
from theodolite.models.block_matrices import Matrix
from theodolite.models.factored import PrunedMatrix, SparseLowRankLinear
from theodolite.passes.corpus_pass import next_token_losses
from theodolite.prune.adapter import has_layer

LEARNING_RATE = 1e-4
"""At the first step of AdamW; falls on a line to 0."""

CLIP = 1.0
"""Largest norm of a gradient."""

HELD_OUT = 10
"""The last of so many contexts are held out."""

Pairs = Sequence[tuple[Matrix, PrunedMatrix]]
"""Each matrix of a model, and as it was pruned."""


@dataclass(frozen=True)
class Recovery:
    """How the low-rank parts are trained.

    Attributes:
        corpus: the whole text. steps: of AdamW. batch: contexts a step, and per forward pass. seed: of their order, and
            of the dense model's adapter.
    """

    corpus: Corpus
    steps: int
    batch: int
    seed: int

    @property
    def read(self) -> Corpus:
        """The contexts that pruning and training read."""
        return self.corpus.subset(torch.arange(self._parted))

    @property
    def held_out(self) -> Corpus:
        """The last tenth."""
        return self.corpus.subset(torch.arange(self._parted, len(self.corpus.contexts)))

    @property
    def _parted(self) -> int:
        return len(self.corpus.contexts) * (HELD_OUT - 1) // HELD_OUT

    def check(self, model: OpenModel) -> None:
        """Raise `UsageError` where the low-rank parts cannot be trained, or what it brings could not be told."""
        if len(self.corpus.contexts) < 2 * HELD_OUT or self.corpus.lengths is not None:
            raise UsageError(
                f"--recover holds out a tenth of the contexts: give {2 * HELD_OUT} or more, all of one length"
            )
        if model.source.predict is None or not model.causal:
            raise UsageError(f"{model.id} does not predict next tokens, which --recover trains")
        if model.source.dtype == torch.float16:
            raise UsageError(
                "gradients leave the range of float16: use --dtype float32 or bfloat16 with --recover"
            )


def recovered(
    model: OpenModel,
    pairs: Pairs,
    dense: Sequence[Tensor],
    recovery: Recovery,
    between: Callable[[], None],
) -> tuple[list[PrunedMatrix], dict[str, Any]]:
    """The matrices with trained low-rank parts, which are written into the model; and what that brought.

    Every loss is of a model whose matrices are the sum of both parts, rounded alike.

    Args:
        model: pruned, with both parts of its matrices added up.
        pairs, dense: the matrices as they were pruned, and as they were before, on the CPU.
        between: called after every step; it may raise to stop.

    Returns:
        The matrices; and mean losses in nats per token of the held-out contexts, and paired differences with their
        standard errors over those contexts.

    Raises:
        WorkError: a loss is not finite.
    """
    held_out, losses = recovery.held_out, {}
    losses["pruned"] = _losses(model, held_out, recovery.batch)
    pruned = [matrix for _, matrix in pairs]
    trained = _trained(model, pruned, recovery, between)
    _write(pairs, trained)
    losses["recovered"] = _losses(model, held_out, recovery.batch)
    for (own, _), matrix in zip(pairs, dense, strict=True):
        own.write(matrix)
    losses["dense"] = _losses(model, held_out, recovery.batch)
    generator = torch.Generator().manual_seed(recovery.seed)
    fresh = [_with_fresh_adapter(matrix, own, generator) for matrix, own in zip(pruned, dense, strict=True)]
    _write(pairs, _trained(model, fresh, recovery, between))
    losses["dense, trained"] = _losses(model, held_out, recovery.batch)
    _write(pairs, trained)
    differences = {
        f"{one} − {other}": _paired(losses[one] - losses[other])
        for one, other in (
            ("pruned", "dense"),
            ("recovered", "pruned"),
            ("recovered", "dense"),
            ("dense, trained", "dense"),
            ("recovered", "dense, trained"),
        )
    }
    return trained, {
        "steps": recovery.steps,
        "learning_rate": LEARNING_RATE,
        "held_out_contexts": len(held_out.contexts),
        "loss": {name: float(each.mean()) for name, each in losses.items()},
        "difference": differences,
    }


def _write(pairs: Pairs, matrices: Sequence[PrunedMatrix]) -> None:
    for (own, _), matrix in zip(pairs, matrices, strict=True):
        own.write(matrix.merged(own.holder.device))


def _paired(differences: Float64[Tensor, " contexts"]) -> dict[str, float]:
    return {"mean": float(differences.mean()), "error": float(differences.std() / len(differences) ** 0.5)}


def _with_fresh_adapter(pruned: PrunedMatrix, dense: Tensor, generator: torch.Generator) -> PrunedMatrix:
    """The dense matrix with an adapter of the same rank, as PEFT begins it: A uniform within 1/√inputs, B zero."""
    if pruned.left is None or pruned.right is None:
        return replace(pruned, sparse=dense)
    right = (
        torch.empty(pruned.right.shape).uniform_(-1, 1, generator=generator) / pruned.right.shape[1] ** 0.5
    )
    return replace(pruned, sparse=dense, left=torch.zeros_like(pruned.left), right=right.to(pruned.right))


def _trained(
    model: OpenModel, matrices: Sequence[PrunedMatrix], recovery: Recovery, between: Callable[[], None]
) -> list[PrunedMatrix]:
    """The matrices with low-rank parts trained in the model, whose own layers are back in it then."""
    parts: dict[str, list[int]] = {}
    for number, matrix in enumerate(matrices):
        if matrix.expert is None:
            parts.setdefault(matrix.parameter.removesuffix(".weight"), []).append(number)
    parts = {name: own for name, own in parts.items() if any(has_layer(matrices[number]) for number in own)}
    before: dict[str, Any] = {name: model.hf.get_submodule(name) for name in parts}
    layers = {}
    for name, numbers in parts.items():
        layers[name] = SparseLowRankLinear([matrices[number] for number in numbers], before[name].bias)
        layers[name].to(before[name].weight.device)
        model.hf.set_submodule(name, layers[name])
    try:
        _train(model, list(layers.values()), recovery, between)
    finally:
        for name, module in before.items():
            model.hf.set_submodule(name, module)
    after = list(matrices)
    for name, numbers in parts.items():
        ranks = [left.shape[1] for left in layers[name].left]
        rights = layers[name].right.detach().split(ranks)
        for number, left, right in zip(numbers, layers[name].left, rights, strict=True):
            if has_layer(matrices[number]):
                after[number] = replace(matrices[number], left=left.detach().cpu(), right=right.cpu())
    return after


def on_cpu(matrix: PrunedMatrix) -> PrunedMatrix:
    """The same, out of the way of the device's memory."""
    left, right, rows = (
        None if held is None else held.cpu() for held in (matrix.left, matrix.right, matrix.rows)
    )
    return replace(matrix, sparse=matrix.sparse.cpu(), left=left, right=right, rows=rows)


def _train(
    model: OpenModel, layers: Sequence[SparseLowRankLinear], recovery: Recovery, between: Callable[[], None]
) -> None:
    """In float32 or better, with products in the model's dtype; rounded to that at the end."""
    dtype = model.source.dtype
    factors = [factor for layer in layers for factor in (*layer.left, layer.right) if factor.numel()]
    for factor in factors:
        factor.data = factor.data.to(torch.promote_types(dtype, torch.float32))
        factor.requires_grad_(True)
    optimizer = torch.optim.AdamW(factors, lr=LEARNING_RATE, weight_decay=0.0)
    corpus, generator = recovery.read, torch.Generator().manual_seed(recovery.seed)
    device = factors[0].device.type
    order = torch.empty(0, dtype=torch.long)
    for step in range(recovery.steps):
        if len(order) < min(recovery.batch, len(corpus.contexts)):
            order = torch.cat([order, torch.randperm(len(corpus.contexts), generator=generator)])
        rows, order = order[: recovery.batch], order[recovery.batch :]
        ids = corpus.ids(rows)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * (1 - step / recovery.steps)
        with torch.enable_grad(), torch.autocast(device, dtype=dtype, enabled=dtype == torch.bfloat16):
            loss = _loss(model, ids)
        if not torch.isfinite(loss):
            raise WorkError(f"the loss of {model.id} is NaN or infinite at step {step} of --recover")
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(factors, CLIP)
        optimizer.step()
        between()
    for factor in factors:
        factor.requires_grad_(False)
        factor.data = factor.data.to(dtype)


def _loss(model: OpenModel, ids: Tensor) -> Tensor:
    assert model.source.predict is not None
    logits = model.source.predict(ids)[:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits.float(), ids[:, 1:].flatten().to(logits.device))


@torch.no_grad()
def _losses(model: OpenModel, corpus: Corpus, batch: int) -> Float64[Tensor, " contexts"]:
    """Mean loss of each context."""
    assert model.source.predict is not None
    parts = [corpus.ids(part) for part in corpus.batches(batch)]
    return torch.cat([next_token_losses(model.source.predict(ids), ids).mean(dim=1) for ids in parts])
