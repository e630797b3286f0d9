"""What rounding of activations costs, with outlier dimensions of a trace in the model's own precision or without.

Rounding is simulated: values are rounded to the steps of int8, and products are taken as ever. Weights are as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn

from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.evaluate.perplexity import Perplexity, perplexity
from theodolite.evaluate.scores import mean_and_error
from theodolite.models import OpenModel
from theodolite.models.block_matrices import block_matrices
from theodolite.models.guard import measures
from theodolite.models.structure import removed_on_leaving
from theodolite.sinks.exclusions import Exclusions
from theodolite.system.choices import check_whole
from theodolite.system.progress import ShowProgress

BITS = 8
SEEDS = 5
"""Draws of random dimensions, whose losses are averaged for each context."""

AS_IT_IS, ROUNDED, OUTLIERS, RANDOM = (
    "as it is",
    "rounded",
    "outlier dimensions kept",
    "random dimensions kept",
)


def rounded(values: Float[Tensor, "*tokens width"], kept: Sequence[int] = (), bits: int = BITS) -> Tensor:
    """Each token's values on a grid of 2^bits − 1 steps, symmetric about 0, as wide as its largest value.

    Args:
        values: activations. bits: 2 or more.
        kept: dimensions that stay as they are, and do not widen the grid: LLM.int8() (Dettmers et al. 2022) takes them
            apart in the same way.
    """
    levels = 2 ** (bits - 1) - 1
    apart = torch.zeros(values.shape[-1], dtype=torch.bool, device=values.device)
    apart[list(kept)] = True
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    step = wide.masked_fill(apart, 0).abs().amax(dim=-1, keepdim=True) / levels
    on_grid = torch.round(wide / step.clamp(min=torch.finfo(wide.dtype).tiny)) * step
    return torch.where(apart, values, on_grid.to(values.dtype))


@dataclass(frozen=True)
class _Reader:
    """A linear layer of a block, and whether it reads the stream: its input's dimensions are then the stream's."""

    layer: int
    module: nn.Module
    reads_stream: bool


@contextmanager
def rounded_activations(
    model: OpenModel, kept: Sequence[Sequence[int]] | None = None, bits: int = BITS
) -> Iterator[None]:
    """While open, the inputs of all linear layers of the blocks are rounded, by token.

    Args:
        model: a model of transformers without experts that share a parameter.
        kept: for each block the dimensions of the stream that are not rounded where a layer reads the stream, through
            a norm (W_q, W_k, W_v and what the MLP begins with); None: none. Inputs of W_o and of the MLP's end have
            other dimensions, and are rounded whole.
        bits: of the grid, 2 or more.

    Raises:
        UsageError: the model has no such layers, the dimensions are not its own, or the bits are none.
    """
    check_whole(bits=bits)
    if not 2 <= bits <= 16:
        raise UsageError(f"activations of {bits} bits: give 2 to 16")
    kept = [()] * model.layers if kept is None else kept
    if len(kept) != model.layers or any(not 0 <= d < model.width for of in kept for d in of):
        raise UsageError(f"give dimensions 0 to {model.width - 1} for each of the {model.layers} blocks")
    readers = _readers(model)

    @contextmanager
    def hooked() -> Iterator[None]:
        handles = [
            reader.module.register_forward_pre_hook(
                partial(_round, kept=kept[reader.layer] if reader.reads_stream else (), bits=bits)
            )
            for reader in readers
        ]
        with removed_on_leaving(handles):
            yield

    named = f"rounded_activations(bits={bits}, kept={[sorted(of) for of in kept]})"
    with model.intervention(named, hooked()):
        yield


def _round(module: nn.Module, args: tuple[Any, ...], *, kept: Sequence[int], bits: int) -> tuple[Any, ...]:
    return (rounded(args[0], kept, bits), *args[1:])


def _readers(model: OpenModel) -> list[_Reader]:
    """The linear layers of the blocks; those whose input is what a norm gave read the stream."""
    matrices = [matrix for block in block_matrices(model) for matrix in block]
    if any(matrix.expert is not None for matrix in matrices):
        raise UsageError(f"{model.id} has experts that share a parameter: inputs of each are not rounded")
    layers = {matrix.module: matrix.layer for matrix in matrices}
    normed: set[int] = set()
    held, reading = [], set()

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor) and "norm" in type(module).__name__.lower():
            held.append(output)  # so that no other tensor gets its address
            normed.add(output.data_ptr())

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        if module in layers and args[0].data_ptr() in normed:
            reading.add(module)

    handles = [
        handle
        for module in model.root.modules()
        for handle in (module.register_forward_hook(after), module.register_forward_pre_hook(before))
    ]
    with removed_on_leaving(handles), torch.no_grad():
        model.sample_pass()
    return [_Reader(layer, module, module in reading) for module, layer in layers.items()]


@measures
def int8_activations(
    model: OpenModel,
    corpus: Corpus,
    exclusions: Exclusions,
    *,
    bits: int = BITS,
    seeds: int = SEEDS,
    batch: int | None = None,
    show_progress: ShowProgress = lambda done, total: None,
) -> pd.DataFrame:
    """The loss with rounded activations: all of them, without the outlier dimensions, without as many random ones.

    Args:
        model: a causal model with an output head, as of `rounded_activations`.
        corpus: the text; not the one that the exclusions are from.
        exclusions: whose dimensions of the residual layer that enters a block are kept.
        bits: of the grid. seeds: draws of random dimensions, none of them outliers where there are enough others.
        batch: contexts a forward pass; None: 4096 tokens' worth.
        show_progress: told (done, total) passes over the corpus; it may raise to stop.

    Returns:
        Four rows: `what dimensions loss loss_se perplexity cost cost_se difference difference_se`: the mean number of
        dimensions kept a block, the loss in nats per token, `cost` what it is above the model as it is, `difference`
        to `rounded`. Errors are standard errors over contexts, of differences paired ones. Losses of random dimensions
        are means over the draws for each context.

    Raises:
        UsageError: there is no outlier dimension, no draw, or as `perplexity` and `rounded_activations`.
    """
    outliers = [exclusions.dimensions(layer) for layer in range(model.layers)]
    if not any(outliers):
        raise UsageError(
            "the exclusions name no outlier dimension of a layer that enters a block: nothing is kept"
        )
    if seeds < 1:
        raise UsageError(f"{seeds} draws of random dimensions: ask for 1 or more")
    drawn = [_drawn(outliers, model.width, seed) for seed in range(seeds)]
    keeping = [None, [()] * model.layers, outliers, *drawn]
    found: list[Perplexity] = []
    for done, kept in enumerate(keeping):
        show_progress(done, len(keeping))
        if kept is None:
            found.append(perplexity(model, corpus, batch=batch))
            continue
        with rounded_activations(model, kept, bits):
            found.append(perplexity(model, corpus, batch=batch))
    show_progress(len(keeping), len(keeping))
    random = replace(found[3], losses=np.mean([one.losses for one in found[3:]], axis=0))
    measured = dict(zip((AS_IT_IS, ROUNDED, OUTLIERS, RANDOM), (*found[:3], random), strict=True))
    mean_kept = sum(map(len, outliers)) / model.layers
    return pd.DataFrame([_row(what, mean_kept, measured) for what in measured])


def _drawn(outliers: Sequence[Sequence[int]], width: int, seed: int) -> list[list[int]]:
    """As many dimensions of each block as it has outliers; others than these where there are enough."""
    random = np.random.default_rng(seed)
    drawn = []
    for of in outliers:
        others = np.setdiff1d(np.arange(width), of)
        pool = others if len(others) >= len(of) else np.arange(width)
        drawn.append(sorted(random.choice(pool, len(of), replace=False).tolist()))
    return drawn


def _row(what: str, kept: float, measured: dict[str, Perplexity]) -> dict[str, Any]:
    own = measured[what]
    row: dict[str, Any] = {"what": what, "dimensions": kept if what in (OUTLIERS, RANDOM) else 0.0}
    row |= {"loss": own.loss, "loss_se": own.loss_se, "perplexity": own.perplexity}
    for name, other, nothing in (
        ("cost", AS_IT_IS, (AS_IT_IS,)),
        ("difference", ROUNDED, (AS_IT_IS, ROUNDED)),
    ):
        pair = (math.nan, math.nan) if what in nothing else mean_and_error(own.each - measured[other].each)
        row[name], row[f"{name}_se"] = pair
    return row
