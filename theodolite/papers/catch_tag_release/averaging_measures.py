"""What a trained averaging model is measured by: its error, the sink, the tag, and what ablating each costs.

Every ablation is measured on sequences not used in training, and that of the tag is compared with random directions.
Nothing
here trains, judges or draws.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from theodolite.judging import Criterion
from theodolite.papers.catch_tag_release.averaging_construction import SINK
from theodolite.papers.catch_tag_release.averaging_training import (
    LENGTH,
    ForwardPass,
    Numbers,
    Places,
    TrainedModels,
    TwoLayers,
    attention_to_separator,
    draw,
)
from theodolite.papers.training.training_loop import threads
from theodolite.theory.averaging import mean_after

HELD_OUT_SEQUENCES = 2000
"""Sequences that a trained model is measured on."""

HELD_OUT_SEED = 1 << 31
"""Added to a seed for sequences not used in training."""

DIRECTIONS = 64
"""Random directions that the tag's own is compared with."""

RANK_TOLERANCE = 1e-6
"""Of the largest singular value of what a layer writes: directions below it are not written along."""

SOLVED = Criterion("at most", 0.1, "a tenth of the target's variance (ours)")


@dataclass(frozen=True)
class HeldOutSequences:
    """The sequences of every seed, which tokens come after [SEP], which is [SEP], and the averages that are targets."""

    numbers: Numbers
    places: Places
    after: Bool[Tensor, "seeds batch length"]
    is_separator: Bool[Tensor, "seeds batch length"]
    targets: Float[Tensor, "seeds batch"]

    def unexplained(self, output: Tensor) -> Float[Tensor, " seeds"]:
        """The mean square error over the target's variance."""
        return (output - self.targets).square().mean(-1) / self.targets.square().mean(-1)

    def separator_attention(self, forward_pass: ForwardPass) -> Float[Tensor, "seeds batch length"]:
        """Attention of the tokens after [SEP] to it, 0 for the others."""
        return attention_to_separator(forward_pass, self.places) * self.after

    def sink(self, forward_pass: ForwardPass) -> Float[Tensor, " seeds"]:
        """Its mean over those tokens."""
        return self.separator_attention(forward_pass).sum((1, 2)) / self.after.sum((1, 2))


def measured(trained: TrainedModels) -> pd.DataFrame:
    """One row per seed, on sequences not used in training.

    error is the mean square, left the same over the target's variance, which predicting 0 would leave (1).
    sink: mean attention of tokens after [SEP] to it; sinks: share of sequences where it exceeds SINK. outlier: RMS of
    the residual stream's largest coordinate over the median of the others, over tokens after [SEP]. tag_share: share of
    the tag direction (difference of means of what the first layer writes after and before [SEP]) in its largest
    coordinate. eta: between over total sum of squares of what it writes, tokens grouped by before and after [SEP];
    eta_chance the same with the places of another sequence. second_…: second over first singular value. …_begun: the
    same before training. left_blind, left_untagged: error with [SEP] hidden from later tokens in the first layer, and
    with the tag direction projected out of what it writes; left_random, left_random_sd: mean and standard deviation of
    the latter over `DIRECTIONS` random directions of what it writes; as_costly: share of these that leave as much.
    """
    test = _sequences(trained)
    after, is_separator = test.after, test.is_separator
    with torch.no_grad(), threads(1):
        forward_pass, initial_pass = (
            model(test.numbers, test.places) for model in (trained.model, trained.initial)
        )
        tag = torch.stack(
            [
                w[a].mean(0) - w[~a & ~h].mean(0)
                for w, a, h in zip(forward_pass.written, after, is_separator, strict=True)
            ]
        )
        tag = tag / tag.norm(dim=-1, keepdim=True)
        sink_by_sequence = test.separator_attention(forward_pass).sum(-1) / after.sum(-1)
        columns = {
            "seed": torch.tensor(trained.seeds),
            "error": (forward_pass.output - test.targets).square().mean(-1),
            "left": test.unexplained(forward_pass.output),
            "left_mean_of_all": test.unexplained(
                torch.where(is_separator, 0.0, test.numbers).sum(-1) / (LENGTH - 1)
            ),
            "sink": test.sink(forward_pass),
            "sink_begun": test.sink(initial_pass),
            "sinks": (sink_by_sequence > SINK.limit).double().mean(-1),
            "outlier": _outlier(forward_pass, after),
            "tag_share": tag.square().amax(-1),
            "eta": _eta(forward_pass.written, after, ~is_separator),
            "eta_chance": _eta(forward_pass.written, after.roll(1, 1), ~is_separator),
            "left_blind": test.unexplained(
                trained.model(test.numbers, test.places, hide_separator=True).output
            ),
            **_without(trained.model, test, tag, forward_pass.written),
            **_spectra(trained),
        }
    table = pd.DataFrame({name: values.numpy() for name, values in columns.items()})
    table.insert(0, "kind", trained.recipe.name)
    return table.assign(solved=np.asarray(SOLVED.met(table["left"].to_numpy(dtype=np.float64))))


def _sequences(trained: TrainedModels) -> HeldOutSequences:
    generators = [torch.Generator().manual_seed(HELD_OUT_SEED + seed) for seed in trained.seeds]
    numbers, places = draw(generators, HELD_OUT_SEQUENCES)
    place = torch.arange(LENGTH)
    targets = mean_after(numbers, places)
    return HeldOutSequences(numbers, places, place > places[..., None], place == places[..., None], targets)


def _without(model: TwoLayers, test: HeldOutSequences, tag: Tensor, written: Tensor) -> dict[str, Tensor]:
    """What is left of the variance without the tag's direction, and without random ones of the same space."""

    def unexplained(direction: Tensor) -> Tensor:
        return test.unexplained(model(test.numbers, test.places, ablated=direction).output)

    without_tag = unexplained(tag)
    random = torch.stack([unexplained(direction) for direction in random_directions(written, DIRECTIONS)])
    return {
        "left_untagged": without_tag,
        "left_random": random.mean(0),
        "left_random_sd": random.std(0),
        "as_costly": (random >= without_tag).double().mean(0),
    }


def random_directions(
    written: Float[Tensor, "seeds batch length width"], count: int
) -> Float[Tensor, "count seeds width"]:
    """Random unit vectors, uniform in the space that a layer's output spans, of each seed: the same every time.

    Of all directions of the stream, most would take nothing: at width 16 the models write along three.
    """
    _, sizes, spanned = torch.linalg.svd(written.double().flatten(1, 2), full_matrices=False)
    normal = torch.randn(
        count, *sizes.shape, generator=torch.Generator().manual_seed(HELD_OUT_SEED), dtype=torch.float64
    )
    normal = normal * (sizes > RANK_TOLERANCE * sizes[:, :1])
    directions = torch.einsum("csk,skw->csw", normal, spanned)
    return (directions / directions.norm(dim=-1, keepdim=True)).to(written.dtype)


def _spectra(trained: TrainedModels) -> dict[str, Tensor]:
    ratios = {}
    for when, model in (("", trained.model), ("_begun", trained.initial)):
        for name, matrix in (("value", model.value_output()), ("query_key", model.query_key())):
            values = torch.linalg.svdvals(matrix.double())
            ratios[f"second_{name}{when}"] = values[:, 1] / values[:, 0]
            ratios[f"stable_rank_{name}{when}"] = values.square().sum(-1) / values[:, 0].square()
    return ratios


def _outlier(forward_pass: ForwardPass, after: Tensor) -> Tensor:
    """RMS of the largest coordinate over the median RMS of the others, over tokens after [SEP], (seeds,)."""
    sizes = (forward_pass.hidden.square() * after[..., None]).sum((1, 2)) / after.sum((1, 2))[:, None]
    ordered = sizes.sqrt().sort(-1).values
    return ordered[:, -1] / ordered[:, :-1].median(-1).values


def _eta(written: Tensor, after: Tensor, counted: Tensor) -> Tensor:
    """η² of grouping the counted tokens by `after`, (seeds,)."""
    shares = []
    for vectors, group, chosen in zip(written.double(), after, counted, strict=True):
        vectors, group = vectors[chosen], group[chosen]
        mean = vectors.mean(0)
        between = sum(
            float(part.sum()) * (vectors[part].mean(0) - mean).square().sum() for part in (group, ~group)
        )
        shares.append(between / (vectors - mean).square().sum())
    return torch.stack([torch.as_tensor(value) for value in shares])
