"""The size of a layer's values, dimension by dimension, and the tokens that carry the massive ones.

For the residual stream (one part a token) and for the outputs of the heads (H parts). The thresholds are in
`theory.outliers`; nothing is judged here.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from theodolite.accumulate.marked import Marked
from theodolite.accumulate.outliers import LargeValues
from theodolite.accumulate.sums import KeyedSums, State, cache_sized, part_of, token_slices
from theodolite.errors import UsageError
from theodolite.theory.outliers import LayerBaseline, Thresholds, log_magnitude, massive_activations

MOST_ROWS = 1_000_000
"""Massive activations are few. Thresholds that make so many of them would fill the memory with a list of them."""

KEY = ("layer", "part", "dimension", "token_id", "first")
"""What carriers are told apart by."""


class Activations(LargeValues):
    """Count outliers and massive activations by the caller's thresholds, and by comparison with the layer itself.

    State, (N, parts, width) each: square and square_first, sums of x²; log, the sum of ln |x|; maximum and
    maximum_first of |x|; outlier, published, published_first, adaptive, adaptive_first, counts of values that
    are outliers, and massive by each rule. massive_tokens and massive_tokens_first (N): tokens with a massive
    value in any dimension by either rule. With `trailing` special tokens behind the text of every context, what
    is counted at these is apart: maximum_last, published_last, adaptive_last, massive_tokens_last. carriers, by
    `KEY`: see `carrier_columns`.

    Args:
        bounds: |x| above which a value is massive by comparison with its layer (`LayerBaseline.bounds`).
    """

    def __init__(
        self,
        bounds: Float[Tensor, "layers parts width"],
        thresholds: Thresholds,
        trailing: int = 0,
    ) -> None:
        layers, parts, width = bounds.shape
        self.trailing = trailing
        endings = token_slices(0, trailing)
        rules = (f"{rule}{ending}" for rule in ("published", "adaptive") for ending in endings)
        sums = ("square", "square_first", "log", "outlier", *rules)
        maxima = tuple(f"maximum{ending}" for ending in endings)
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(sums + maxima, (parts, width))
        shapes |= {f"massive_tokens{ending}": () for ending in endings}
        counts = ("contexts", "places", "published", "adaptive", "value_sum", "position_sum")
        largest = ("highest", "deepest")
        keyed = KeyedSums(len(KEY), dict.fromkeys((*counts, *largest), ()), largest)
        self.marked = Marked()
        super().__init__(layers, shapes, maxima, {"carriers": keyed, "marked": self.marked})
        self.bounds = bounds
        self.thresholds = thresholds

    def update(
        self,
        layer: int,
        hidden: Float[Tensor, "batch positions parts width"],
        ids: Int[Tensor, "batch positions"],
        first_context: int,
    ) -> None:
        """Add one layer's values of the contexts `first_context …`, whose token ids are `ids`.

        Raises:
            UsageError: the thresholds make a million kinds of massive activations.
        """
        for batch_slice in cache_sized(len(hidden), hidden.device):
            values = hidden[batch_slice]
            values = values.to(torch.promote_types(values.dtype, torch.float32))
            magnitude = values.abs()
            self._add_sums(layer, magnitude)
            published, adaptive = self.massive(layer, magnitude)
            either = published | adaptive
            if not either.any():
                continue
            self.add_massive(layer, published, "published")
            self.add_massive(layer, adaptive, "adaptive")
            self.add_massive(layer, either.flatten(2).any(-1), "massive_tokens")
            places = either.nonzero().cpu()
            if len(places) > MOST_ROWS:
                self._refuse(layer)
            context, position, head_index, dimension = places.unbind(dim=1)
            token, first = ids[batch_slice].cpu()[context, position], (position == 0).long()
            carriers = self.keyed["carriers"]
            rows = carriers.rows(
                torch.stack([torch.full_like(head_index, layer), head_index, dimension, token, first], dim=1)
            )
            value = values[either]
            sums = {
                "places": torch.ones(len(rows)),
                "published": published[either],
                "adaptive": adaptive[either],
                "value_sum": value,
                "position_sum": position,
                "highest": value,
                "deepest": -value,
            }
            if values.shape[2] == 1:  # of heads, nobody asks which tokens
                number = first_context + batch_slice.start + context
                self.marked.mark(layer, dimension, number, position, token)
            carriers.add(rows, sums)
            carriers.count_contexts(rows, context)
            if len(carriers) > MOST_ROWS:
                self._refuse(layer)

    def massive(
        self, layer: int, magnitude: Float[Tensor, "batch positions parts width"]
    ) -> tuple[Tensor, Tensor]:
        """Mark where |x| is massive by the published rule, and where by comparison with the layer."""
        bounds = self.bounds[layer].to(magnitude.device)
        return massive_activations(magnitude, self.thresholds), magnitude > bounds

    def _add_sums(self, layer: int, magnitude: Float[Tensor, "batch positions parts width"]) -> None:
        later = self.by_place(magnitude)[""].flatten(0, 1)
        # float32 sums of one context, float64 between contexts. Squares of float32 overflow from 1.8e19 on.
        self.add("square", layer, torch.linalg.vector_norm(later, dim=0).double().square())
        self.add("square_first", layer, torch.linalg.vector_norm(magnitude[:, 0], dim=0).double().square())
        self.add("log", layer, log_magnitude(later).sum(0))
        self.add_magnitudes(layer, magnitude)

    def _refuse(self, layer: int) -> None:
        raise UsageError(
            f"more than {MOST_ROWS} kinds of massive activations by layer {layer}: thresholds this low make everything "
            "massive; give higher ones"
        )


def carrier_columns(state: State) -> dict[str, Tensor]:
    """Return the columns of the tokens with massive values in a dimension of a part of a layer: `KEY`, and the counts.

    `contexts`; `places`, values that are massive by either rule, `published` and `adaptive` by each; `value_sum` and
    `position_sum` over these; `extreme`, the largest in size with its sign (of two as large the positive one).
    """
    sums = part_of(state, "carriers")
    keys = dict(zip(KEY, sums.pop("keys").unbind(dim=1), strict=True))
    highest, deepest = (sums.pop(name) for name in ("highest", "deepest"))
    extreme = torch.where(highest >= deepest, highest, -deepest)
    return keys | sums | {"extreme": extreme}


class LayerBaselines:
    """The baseline of each layer, from one batch, without position 0 and `trailing` special tokens.

    State: `LayerBaseline`'s tensors, stacked.
    """

    def __init__(self, trailing: int = 0) -> None:
        self._trailing = trailing
        self._layers: list[State] = []

    def update(self, layer: int, hidden: Tensor, ids: Tensor, first_context: int) -> None:
        """Compute the baseline of a layer."""
        tokens = hidden[:, 1 : hidden.shape[1] - self._trailing].flatten(0, 1)
        baseline = LayerBaseline.of(tokens.to(torch.promote_types(hidden.dtype, torch.float32)))
        self._layers.append({name: value.cpu() for name, value in vars(baseline).items()})

    def state(self) -> State:
        """Return all layers' baselines, stacked."""
        names = self._layers[0] if self._layers else {}
        return {name: torch.stack([layer[name] for layer in self._layers]) for name in names}

    def restore(self, state: State) -> None:
        """Restore a state that `state` returned."""
        self._layers = by_layer(state)


def by_layer(state: State) -> list[State]:
    """Split a state whose tensors lead with layers into one state per layer."""
    return [dict(zip(state, values, strict=True)) for values in zip(*state.values(), strict=True)]
