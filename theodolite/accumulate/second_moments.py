"""Covariances of token vectors, streamed.

Each batch is centred on its own mean before the product is taken in float32, and batches are combined in float64 by the
formula of Chan, Golub & LeVeque (1979): a large common offset costs no digits, and the order of batches does not
matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from theodolite.accumulate.sums import LayerSums, State, contexts_in_cache, each_part
from theodolite.corpus.groups import GROUPS, Groups
from theodolite.theory.singular import largest_singular_value

SKETCH = 32
"""Directions on which a sketch sees a moment; with 16 the standard error was off by up to 25 %, with 32 by 10 %."""

STRIPS = 4  # of a symmetric product: more would save less than their narrower products cost
SUBSPACE_STEPS = 3  # steps of subspace iteration towards the leading directions of the first context


@dataclass(frozen=True)
class Centred:
    """Vectors of a batch, centred, in float32 or float64.

    `pivot` is the batch's rounded mean, which the rows are less; what is `left` of each context's mean is taken off
    products.
    """

    rows: Float[Tensor, "contexts rows width"]
    pivot: Float64[Tensor, " width"]
    left: Float64[Tensor, "contexts width"]

    @classmethod
    def of(cls, hidden: Float[Tensor, "contexts rows width"]) -> Centred:
        """Centre the vectors of some contexts."""
        at_once = contexts_in_cache(hidden[0].numel())
        sums = each_part(lambda part: hidden[part].double().sum(dim=1), len(hidden), hidden.device, at_once)
        means = torch.cat(sums) / hidden.shape[1]
        rounded = means.mean(dim=0).to(torch.promote_types(hidden.dtype, torch.float32))
        pivot = rounded.double()
        return cls(hidden - rounded, pivot, means - pivot)


class SecondMoments(LayerSums):
    """Counts (N), means (N, d) and centred second moments (N, d, d), Σ (x − x̄)(x − x̄)ᵀ, of rows."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__(layers, {"count": (), "mean": (width,), "moment": (width, width)})

    def update(self, layer: int, rows: Float[Tensor, "rows width"]) -> None:
        """Add rows of one layer."""
        self.update_centred(layer, Centred.of(rows.unsqueeze(0)))

    def update_centred(self, layer: int, batch: Centred) -> None:
        """Add the centred vectors of one layer."""
        rows, offset = batch.rows.flatten(0, 1), batch.left.mean(dim=0)
        moment = self.at("moment", layer, rows.device)
        moment.addr_(offset, offset, alpha=-float(len(rows)))
        _add_square(rows, moment)
        count = torch.tensor(float(len(rows)), dtype=torch.float64, device=rows.device)
        self._combine(layer, count, batch.pivot + offset)

    def merge(self, state: State) -> None:
        """Merge the `state` of another accumulator into this one."""
        for layer in range(self.layers):
            mean = state["mean"][layer]
            self.at("moment", layer, mean.device).add_(state["moment"][layer])
            self._combine(layer, state["count"][layer], mean)

    def _combine(self, layer: int, count: Tensor, mean: Tensor) -> None:
        sums = [self.at(name, layer, mean.device) for name in ("count", "mean", "moment")]
        _combine(sums, count, mean)


class MomentsByLayer(SecondMoments):
    """Second moments of a model whose layers come one after the other: each is held until its numbers are taken.

    State: count (N), mean (N, d), numbers (N, 3) of closed layers, as of `moment_numbers`. `moments`: those of layers
    that are not closed.
    """

    def __init__(self, layers: int, width: int) -> None:
        LayerSums.__init__(self, layers, {"count": (), "mean": (width,), "numbers": (3,)})
        self.moments: dict[int, Tensor] = {}
        self._width = width

    def at(self, name: str, layer: int, device: torch.device) -> Tensor:
        """Return the tensor itself; change it in place."""
        if name != "moment":
            return super().at(name, layer, device)
        if layer not in self.moments:
            self.moments[layer] = torch.zeros(self._width, self._width, dtype=torch.float64, device=device)
        self.moments[layer] = self.moments[layer].to(device)
        return self.moments[layer]

    def close(self, layer: int) -> None:
        """Take a layer's numbers, and drop its moment."""
        moment = self.moments.pop(layer)
        self.at("numbers", layer, moment.device).copy_(moment_numbers(moment))


class MomentSketches(LayerSums):
    """Sketches S Ω of centred second moments S (d×d), by group of contexts, for an error of the largest eigenvalue.

    State: count (N, G), mean (N, G, d), trace (N, G), Σ ‖x − x̄‖², sketch (N, G, d, r) of Σ (x − x̄)(x − x̄)ᵀ Ω,
    directions (N, d, r), Ω. Ω is orthonormal and spans about the leading directions of the first context that this
    accumulator saw: directions drawn at random would have to be several times the stable rank of S. `contexts` is how
    many the whole corpus has.
    """

    def __init__(self, layers: int, width: int, contexts: int) -> None:
        r = min(SKETCH, width)
        shapes = {
            "count": (GROUPS,),
            "mean": (GROUPS, width),
            "trace": (GROUPS,),
            "sketch": (GROUPS, width, r),
        }
        super().__init__(layers, shapes | {"directions": (width, r)})
        self.groups = Groups(contexts)

    def look_along(self, directions: Float[Tensor, "layers width r"]) -> None:
        """Use the directions of another accumulator, before the first update, so that both can be merged."""
        self._whole["directions"].copy_(directions)

    def update_centred(self, layer: int, batch: Centred, first_context: int) -> None:
        """Add the centred vectors of contexts `first_context …` of one layer."""
        directions = self.at("directions", layer, batch.rows.device)
        if not directions.any():
            directions.copy_(_leading(batch.rows[0], directions.shape[1]))
        projected = batch.rows @ directions.to(batch.rows.dtype)
        for group, part in self.groups.parts(first_context, len(batch.rows)):
            rows, offset = batch.rows[part].flatten(0, 1), batch.left[part].mean(dim=0)
            count = torch.tensor(float(len(rows)), dtype=torch.float64, device=rows.device)
            sketch = (rows.T @ projected[part].flatten(0, 1)).double()
            sketch.addr_(offset, offset @ directions, alpha=-float(len(rows)))
            square = torch.linalg.vector_norm(rows, dtype=torch.float64).square()
            trace = square - count * offset.square().sum()
            self._combine(layer, group, count, batch.pivot + offset, trace, sketch)

    def merge(self, state: State) -> None:
        """Merge the `state` of another accumulator, which looked along the same directions, into this one."""
        for layer, theirs in enumerate(state["directions"]):
            directions = self._tensors["directions"][layer]
            if not theirs.any():
                continue
            if not directions.any():
                directions.copy_(theirs)
            assert torch.equal(directions.cpu(), theirs)
            for group in range(GROUPS):
                sums = (state[name][layer, group] for name in ("count", "mean", "trace", "sketch"))
                self._combine(layer, group, *(values.to(directions.device) for values in sums))

    def _combine(
        self, layer: int, group: int, count: Tensor, mean: Tensor, trace: Tensor, sketch: Tensor
    ) -> None:
        sums = [self.at(name, layer, sketch.device)[group] for name in ("count", "mean", "sketch")]
        before, own_mean, own_sketch = sums
        shared = before * count / (before + count).clamp_min(1)
        self.add("trace", layer, trace + shared * (mean - own_mean).square().sum(), group)
        own_sketch += sketch
        _combine(sums, count, mean, self.at("directions", layer, sketch.device))


def _combine(sums: list[Tensor], count: Tensor, mean: Tensor, directions: Tensor | None = None) -> None:
    """Take other rows' count and mean into `sums`, whose moment has theirs already; with directions Ω it is S Ω."""
    own_count, own_mean, moment = sums
    total = own_count + count
    if total == 0:
        return
    difference = mean - own_mean
    projected = difference if directions is None else difference @ directions
    moment.addr_(difference, projected, alpha=float(own_count * count / total))
    own_mean += difference * (count / total)
    own_count.copy_(total)


def low_rank(
    sketch: Float[Tensor, "*batch width r"], directions: Float[Tensor, "width r"]
) -> Float[Tensor, "*batch width r"]:
    """Compute L of Nyström's approximation S ≈ L Lᵀ = (SΩ)(ΩᵀSΩ)⁺(SΩ)ᵀ, exact on the span of Ω if S has rank r."""
    core = directions.mT @ sketch
    values, vectors = torch.linalg.eigh((core + core.mT) / 2)
    # Products were taken in float32: below its rounding an eigenvalue of the core is noise.
    noise = torch.finfo(torch.float32).eps * values[..., -1:].clamp_min(0)
    inverse = torch.where(values > noise, values.clamp_min(1e-300).rsqrt(), 0.0)
    return sketch @ (vectors * inverse[..., None, :])


def _leading(rows: Float[Tensor, "rows width"], r: int) -> Float[Tensor, "width r"]:
    """Compute an orthonormal basis of about the r leading directions of the rows, by subspace iteration from a seed."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(rows.shape[1], r, generator=generator, dtype=torch.float64).to(rows.device)
    centred = rows.double() - rows.double().mean(dim=0)
    # With fewer rows than r the product has no rank r; a trace of the basis itself keeps the rest well defined.
    trace = 1e-6 * centred.square().sum().clamp_min(1e-300)
    basis = torch.linalg.qr(start)[0]
    for _ in range(SUBSPACE_STEPS):
        basis = torch.linalg.qr(centred.mT @ (centred @ basis) + trace * basis)[0]
    return basis


def _add_square(rows: Float[Tensor, "rows width"], total: Float64[Tensor, "width width"]) -> None:
    """Add rowsᵀ rows, a strip of columns at a time from the diagonal on: five eighths of the work."""
    width = rows.shape[1]
    step = -(-width // STRIPS)
    for start in range(0, width, step):
        stop = min(start + step, width)
        strip = rows[:, start:stop].T @ rows[:, start:]
        total[start:stop, start:] += strip
        total[stop:, start:stop] += strip[:, stop - start :].T


def moment_numbers(moment: Float[Tensor, "width width"]) -> Float64[Tensor, 3]:
    """Compute the largest eigenvalue, the trace and the Frobenius norm of a centred second moment."""
    largest = largest_singular_value(moment.unsqueeze(0), tolerance=1e-10).double()
    return torch.cat([largest, torch.stack([moment.trace(), torch.linalg.matrix_norm(moment)])])


def numbers_of(state: State, layer: int) -> Float64[Tensor, 3]:
    """Return the `moment_numbers` of one layer."""
    return state["numbers"][layer] if "numbers" in state else moment_numbers(state["moment"][layer])


def covariance(state: State, layer: int) -> Float[Tensor, "width width"]:
    """Compute the covariance (divided by the count) of one layer."""
    return state["moment"][layer] / state["count"][layer]
