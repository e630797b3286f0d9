"""What a trained averaging model is measured by: its error, the sink, the tag, and what taking each away costs.

Every disturbance is on sequences that no training has seen, and the tag's has random directions beside it. Nothing
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
from theodolite.papers.training.loop import threads
from theodolite.theory.averaging import mean_after

TESTED = 2000
"""Sequences that a trained model is measured on."""

EVALUATED = 1 << 31
"""Added to a seed for sequences that no training has seen."""

DIRECTIONS = 64
"""Random directions beside the tag's own."""

WRITTEN = 1e-6
"""Of the largest singular value of what a layer writes: directions below it are not written along."""

SOLVED = Criterion("at most", 0.1, "a tenth of the target's variance left (ours)")


@dataclass(frozen=True)
class _Tested:
    """The sequences of every seed, which tokens come after [SEP], which is [SEP], and the averages that are wanted."""

    numbers: Numbers
    places: Places
    after: Bool[Tensor, "seeds batch length"]
    here: Bool[Tensor, "seeds batch length"]
    wanted: Float[Tensor, "seeds batch"]

    def left(self, output: Tensor) -> Float[Tensor, " seeds"]:
        """The mean square error over the target's variance."""
        return (output - self.wanted).square().mean(-1) / self.wanted.square().mean(-1)

    def paid(self, look: ForwardPass) -> Float[Tensor, "seeds batch length"]:
        """Attention of the tokens after [SEP] to it, 0 for the others."""
        return attention_to_separator(look, self.places) * self.after

    def sink(self, look: ForwardPass) -> Float[Tensor, " seeds"]:
        """Its mean over those tokens."""
        return self.paid(look).sum((1, 2)) / self.after.sum((1, 2))


def measured(trained: TrainedModels) -> pd.DataFrame:
    """One row per seed, on sequences that no training has seen.

    error is the mean square, left the same over the target's variance, which predicting 0 would leave (1).
    sink: mean attention of tokens after [SEP] to it; sinks: share of sequences in which it exceeds 0.3. outlier: RMS of
    the residual stream's largest coordinate over the median of the others, tokens after [SEP]. tag_share: share of
    the tag direction (difference of means of what the first layer writes after and before [SEP]) in its largest
    coordinate. eta: between over total sum of squares of what it writes, tokens grouped by before and after [SEP];
    eta_chance the same with the places of another sequence. second_…: second over first singular value. …_begun: the
    same before training. left_blind, left_untagged: error with [SEP] hidden from later tokens in the first layer, and
    with the tag direction projected out of what it writes; left_random, left_random_sd: mean and standard deviation of
    the latter over `DIRECTIONS` random directions of what it writes; as_costly: share of these that leave as much.
    """
    tested = _sequences(trained)
    after, here = tested.after, tested.here
    with torch.no_grad(), threads(1):
        look, begun = (model(tested.numbers, tested.places) for model in (trained.model, trained.begun))
        tag = torch.stack(
            [w[a].mean(0) - w[~a & ~h].mean(0) for w, a, h in zip(look.written, after, here, strict=True)]
        )
        tag = tag / tag.norm(dim=-1, keepdim=True)
        of_sequence = tested.paid(look).sum(-1) / after.sum(-1)
        columns = {
            "seed": torch.tensor(trained.seeds),
            "error": (look.output - tested.wanted).square().mean(-1),
            "left": tested.left(look.output),
            "left_mean_of_all": tested.left(torch.where(here, 0.0, tested.numbers).sum(-1) / (LENGTH - 1)),
            "sink": tested.sink(look),
            "sink_begun": tested.sink(begun),
            "sinks": (of_sequence > SINK.limit).double().mean(-1),
            "outlier": _outlier(look, after),
            "tag_share": tag.square().amax(-1),
            "eta": _eta(look.written, after, ~here),
            "eta_chance": _eta(look.written, after.roll(1, 1), ~here),
            "left_blind": tested.left(trained.model(tested.numbers, tested.places, blind=True).output),
            **_without(trained.model, tested, tag, look.written),
            **_spectra(trained),
        }
    table = pd.DataFrame({name: values.numpy() for name, values in columns.items()})
    table.insert(0, "kind", trained.kind.name)
    return table.assign(solved=np.asarray(SOLVED.met(table["left"].to_numpy(dtype=np.float64))))


def _sequences(trained: TrainedModels) -> _Tested:
    generators = [torch.Generator().manual_seed(EVALUATED + seed) for seed in trained.seeds]
    numbers, places = draw(generators, TESTED)
    place = torch.arange(LENGTH)
    wanted = mean_after(numbers, places)
    return _Tested(numbers, places, place > places[..., None], place == places[..., None], wanted)


def _without(model: TwoLayers, tested: _Tested, tag: Tensor, written: Tensor) -> dict[str, Tensor]:
    """What is left of the variance without the tag's direction, and without random ones of the same space."""

    def left(direction: Tensor) -> Tensor:
        return tested.left(model(tested.numbers, tested.places, without=direction).output)

    own = left(tag)
    random = torch.stack([left(one) for one in random_directions(written, DIRECTIONS)])
    return {
        "left_untagged": own,
        "left_random": random.mean(0),
        "left_random_sd": random.std(0),
        "as_costly": (random >= own).double().mean(0),
    }


def random_directions(
    written: Float[Tensor, "seeds batch length width"], count: int
) -> Float[Tensor, "count seeds width"]:
    """Random unit vectors, uniform in the space that a layer's output spans, of each seed: the same every time.

    Of all directions of the stream, most would take nothing: at width 16 the models write along three.
    """
    _, sizes, spanned = torch.linalg.svd(written.double().flatten(1, 2), full_matrices=False)
    normal = torch.randn(
        count, *sizes.shape, generator=torch.Generator().manual_seed(EVALUATED), dtype=torch.float64
    )
    normal = normal * (sizes > WRITTEN * sizes[:, :1])
    directions = torch.einsum("csk,skw->csw", normal, spanned)
    return (directions / directions.norm(dim=-1, keepdim=True)).to(written.dtype)


def _spectra(trained: TrainedModels) -> dict[str, Tensor]:
    found = {}
    for when, model in (("", trained.model), ("_begun", trained.begun)):
        for name, matrix in (("value", model.value_output()), ("query_key", model.query_key())):
            values = torch.linalg.svdvals(matrix.double())
            found[f"second_{name}{when}"] = values[:, 1] / values[:, 0]
            found[f"stable_rank_{name}{when}"] = values.square().sum(-1) / values[:, 0].square()
    return found


def _outlier(look: ForwardPass, after: Tensor) -> Tensor:
    """RMS of the largest coordinate over the median RMS of the others, over tokens after [SEP], (seeds,)."""
    sizes = (look.hidden.square() * after[..., None]).sum((1, 2)) / after.sum((1, 2))[:, None]
    ordered = sizes.sqrt().sort(-1).values
    return ordered[:, -1] / ordered[:, :-1].median(-1).values


def _eta(written: Tensor, after: Tensor, counted: Tensor) -> Tensor:
    """η² of grouping the counted tokens by `after`, (seeds,)."""
    found = []
    for vectors, group, kept in zip(written.double(), after, counted, strict=True):
        vectors, group = vectors[kept], group[kept]
        mean = vectors.mean(0)
        between = sum(
            float(part.sum()) * (vectors[part].mean(0) - mean).square().sum() for part in (group, ~group)
        )
        found.append(between / (vectors - mean).square().sum())
    return torch.stack([torch.as_tensor(value) for value in found])
