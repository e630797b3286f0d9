"""How alike positions and contexts are by chance: the positional basis rotated at random (sections 2 and 5).

Directions drawn one by one would be too many: positions lie in a few dimensions and contexts in clusters, so that a
single chance alignment moves many cosines at once. A random rotation of the whole basis keeps all of that, and makes
its directions random ones of the model's width. Reads a run's arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from theodolite.estimates import Estimate, Estimates
from theodolite.judging import Criterion
from theodolite.report.data import Floats, layer_average, layer_estimates, need
from theodolite.theory.haar import haar_rotation
from theodolite_papers.experiment import Study

ROTATIONS = 100
QUANTILE = 0.975
"""Of the rotations: the upper end of their 95 % interval."""

_SEED = 0

AS_RANDOM = Criterion(
    "at most",
    1.0,
    f"the {QUANTILE:.1%} quantile over {ROTATIONS} random rotations of the positional basis: “random baseline” "
    "(section 5)".replace("%", "\u00a0%"),
)


@dataclass(frozen=True)
class RandomCosines:
    """|Cosines| of positions and contexts after random rotations, (rotations, layers): their mean and their maximum."""

    mean: Floats
    largest: Floats

    def limits(self, name: str) -> Floats:
        """The quantile by layer: of `mean` or `largest`."""
        return np.asarray(np.quantile(getattr(self, name), QUANTILE, axis=0))


def random_cosines(basis: Tensor, contexts: Tensor, rotations: int = ROTATIONS) -> RandomCosines:
    """Rotate a basis (layers, positions, d) at random against contexts (layers, contexts, d), all layers alike."""
    unit, directions = (functional.normalize(rows.float(), dim=-1) for rows in (basis, contexts))
    generator = torch.Generator().manual_seed(_SEED)
    means, maxima = [], []
    for _ in range(rotations):
        rotation = haar_rotation(basis.shape[-1], generator, unit.device).to(unit)
        cosines = [(p @ rotation @ c.mT).abs() for p, c in zip(unit, directions, strict=True)]
        means.append([float(each.mean()) for each in cosines])
        maxima.append([float(each.max()) for each in cosines])
    return RandomCosines(np.array(means), np.array(maxima))


def chance_cosines(study: Study) -> RandomCosines:
    """Those of the study's run."""

    def draw() -> RandomCosines:
        basis, contexts = need(study.run, "positional_basis")[:, 1:], need(study.run, "context_basis")
        return random_cosines(torch.from_numpy(basis), torch.from_numpy(contexts))

    return study.cached("cosines of random rotations", draw)


def over_random(study: Study, name: str) -> Estimates:
    """The `mean` or `largest` |cosine| of every layer, over the quantile of random rotations."""
    limits = chance_cosines(study).limits(name)
    measured = layer_estimates(study.run, {"mean": "incoherence_mean", "largest": "incoherence_max"}[name])
    assert measured.errors is not None
    return replace(measured, values=measured.values / limits, errors=measured.errors / limits)


def mean_over_random(study: Study) -> Estimate:
    """The mean |cosine| over all layers, over the quantile of the same mean of random rotations."""
    limit = float(np.quantile(chance_cosines(study).mean.mean(axis=1), QUANTILE))
    mean, _ = layer_average(study.run, "incoherence_mean")
    return replace(mean, value=mean.value / limit, error=mean.error / limit)
