"""Find outlier dimensions and massive activations, by the published thresholds and by rules from data.

The published rules know absolute sizes (6, 100), which mean nothing for a model whose activations are a tenth or
fifty times as large. The rules from data compare a layer with itself, and say what they allow by chance. `parts` are
the vectors of a token in a layer: 1 for the residual stream, H for the outputs of its heads.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from scipy.special import ndtri, stdtrit  # `scipy.stats` has them too, and takes long to start
from torch import Tensor

MAD_TO_SD = 1.4826  # 1/Φ⁻¹(3/4): a normal variable's standard deviation over its median absolute deviation
# As noisy as the standard deviation of such a share of values (Rousseeuw & Croux 1993).
MAD_EFFICIENCY = 0.3675
GUMBEL_MEDIAN = 0.36651  # −ln ln 2, of the standard Gumbel law F(y) = exp(−exp(−y))
GUMBEL_MAD = 0.76705  # a with F(median + a) − F(median − a) = ½
IQR_TO_SD = 1.349  # 2 Φ⁻¹(3/4)
# An outlier dimension is at least so many times the layer's median dimension (ours). Where all dimensions are alike,
# as in random numbers, a robust deviation of a few per cent makes everything significant and nothing large.
LEAST_RATIO = 3.0
SMALLEST = float(torch.finfo(torch.float32).tiny)

GAUSSIAN_CONSISTENCY = math.exp(-(float(np.euler_gamma) + math.log(2)) / 2)
"""exp E ln |x| over the RMS of a normal variable, 0.530: E ln x² = −γ − ln 2."""


@dataclass(frozen=True)
class Thresholds:
    """Thresholds above which a value is large. The defaults are the published ones.

    Attributes:
        outlier: a value is an outlier from this |x| on (Dettmers et al. 2022, LLM.int8()).
        outlier_tokens, outlier_layers: an outlier dimension holds outliers in this share of the tokens, in this share
            of the layers, or more (the same paper).
        massive, massive_ratio: a massive activation is above this |x|, and above so many times the median magnitude
            of its context in its layer (Sun et al. 2024).
        level: of the rules from data: the share of healthy layers in which they may find something.
    """

    outlier: float = 6.0
    outlier_tokens: float = 0.06
    outlier_layers: float = 0.25
    massive: float = 100.0
    massive_ratio: float = 1000.0
    level: float = 0.01


def massive_activations(
    magnitude: Float[Tensor, "contexts positions parts width"], thresholds: Thresholds
) -> Bool[Tensor, "contexts positions parts width"]:
    """Mark |x| > 100 and > 1000 × the median magnitude of the same context and part (Sun et al. 2024)."""
    massive = magnitude > thresholds.massive
    for context, part in massive.any(3).any(1).nonzero().tolist():
        large = massive[context, :, part]
        values = magnitude[context, :, part].to(torch.promote_types(magnitude.dtype, torch.float32))
        ordered, middle = values[large].sort().values, (values.numel() - 1) // 2

        # Whether x / ratio is above the lower median: counting is ten times faster than selecting it.
        def above_ratio(x: Tensor, values: Tensor = values, middle: int = middle) -> bool:
            return bool((values < x / thresholds.massive_ratio).count_nonzero() > middle)

        least = bisect.bisect_left(range(len(ordered)), True, key=lambda place: above_ratio(ordered[place]))
        large &= values >= ordered[least] if least < len(ordered) else False
    return massive


def outlier_features(
    share: Float[Tensor, "layers width"], thresholds: Thresholds
) -> Bool[Tensor, "layers width"]:
    """Mark where a dimension has outliers in enough tokens (`share`), in enough layers (Dettmers et al. 2022)."""
    enough = share >= thresholds.outlier_tokens
    return enough & (enough.double().mean(0) >= thresholds.outlier_layers)


def log_magnitude(values: Tensor) -> Tensor:
    """Compute ln |x|, of an exact 0 that of the smallest float32: half-precision streams hold a few zeros."""
    return values.abs().clamp_min(SMALLEST).log()


def typical_magnitude(log_mean: Tensor) -> Tensor:
    """Compute the geometric mean exp E ln |x| of a dimension's sizes, which few huge tokens hardly move.

    A dimension with |x| = 1000 in one of 1000 tokens and 1 in all others has RMS 31.6 and a typical magnitude of 1.007:
    it carries massive activations and is no outlier dimension. A dimension that is always 0 has 0.
    """
    return torch.where(log_mean < math.log(SMALLEST) + 1e-3, 0.0, log_mean.exp())


def dimension_limit(width: int, level: float) -> float:
    """Compute the robust z that the largest of `width` normal values exceeds in at most a share `level` of samples.

    z of each value is (value − median)/(1.4826 MAD). A value alone exceeds t with probability level/width (Bonferroni).
    The MAD is as noisy as a standard deviation with ν = 0.3675 · width degrees of freedom, so t is Student's, and the
    median's variance π/(2 width) adds to the value's own:

        z = t_ν(1 − level/width) · √(1 + π/(2 width)).
    """
    quantile = -float(stdtrit(MAD_EFFICIENCY * width, level / width))
    return quantile * math.sqrt(1 + math.pi / (2 * width))


def robust_z(values: Float[Tensor, "*layers width"]) -> Float[Tensor, "*layers width"]:
    """Compute (value − median)/(1.4826 MAD) over the last dimension; NaN for the median itself where the MAD is 0."""
    values = values.double()
    deviation = values - values.median(-1, keepdim=True).values
    return deviation / (MAD_TO_SD * deviation.abs().median(-1, keepdim=True).values)


def outlier_dimensions(
    magnitude: Float[Tensor, "*layers width"], level: float
) -> tuple[Float[Tensor, "*layers width"], Bool[Tensor, "*layers width"]]:
    """Find the dimensions of each layer that stand out, by the logarithm of their size in any unit.

    Args:
        level: the share of layers with normal log sizes in which a dimension may be found.

    Returns:
        z, robust, of ln magnitude; and where it is above `dimension_limit` and the size at least `LEAST_RATIO` times
        the median.
    """
    magnitude = magnitude.double()
    z = robust_z(magnitude.log())
    large = magnitude >= LEAST_RATIO * magnitude.median(-1, keepdim=True).values
    return z, (z > dimension_limit(magnitude.shape[-1], level)) & large


def token_limit(tokens: int, level: float) -> float:
    """Compute the robust z that the largest of `tokens` Gumbel values exceeds in at most a share `level` of samples.

    z = (y − median)/(1.4826 MAD) of the standard Gumbel law, at exp(−exp(−y)) = 1 − level/tokens.
    """
    log_survival = -math.log(-math.log1p(-min(level / tokens, 0.5)))
    return (log_survival - GUMBEL_MEDIAN) / (MAD_TO_SD * GUMBEL_MAD)


def gaussian_spread(width: int) -> float:
    """Compute the robust deviation of ln max |x| over `width` independent Gaussian dimensions, from its quartiles.

    P(max |x| ≤ m) = (2Φ(m) − 1)^width.
    """
    low, high = (float(ndtri((1 + q ** (1 / width)) / 2)) for q in (0.25, 0.75))
    return math.log(high / low) / IQR_TO_SD


@dataclass(frozen=True)
class LayerBaseline:
    """A layer's typical values: the size of each dimension, and the law of a token's largest value over it.

    Attributes:
        typical: the typical magnitude of each dimension, or that of the median dimension where it is larger.
        middle, spread: median and robust standard deviation over tokens of ln max over dimensions of |x|/typical.
    """

    typical: Float[Tensor, "parts width"]
    middle: Float[Tensor, " parts"]
    spread: Float[Tensor, " parts"]

    @classmethod
    def of(cls, hidden: Float[Tensor, "tokens parts width"]) -> LayerBaseline:
        """Estimate it from some tokens of the layer, thousands if possible; a few massive ones do no harm."""
        magnitude = hidden.abs().double()
        by_dimension = typical_magnitude(log_magnitude(magnitude).mean(0))
        # A dimension that is nearly dead is compared with the others, not with itself.
        typical = torch.maximum(by_dimension, by_dimension.median(-1, keepdim=True).values)
        tiny = torch.finfo(torch.float64).tiny
        largest = (magnitude / typical.clamp_min(tiny)).amax(-1).clamp_min(tiny).log()
        middle = largest.median(0).values
        spread = MAD_TO_SD * (largest - middle).abs().median(0).values
        return cls(typical, middle, spread)

    def bounds(self, tokens: int, level: float) -> Float[Tensor, "parts width"]:
        """Compute the |x| from which a value is massive for its layer; `tokens` are looked at in all.

        A value is massive where the token's largest |x|/typical is what no healthy layer has by chance. Its logarithm
        is compared with the Gumbel law, that of the logarithm of a maximum over many heavy-tailed values; lighter tails
        give smaller maxima. The spread is at least that of a Gaussian layer of the same width, so that a layer whose
        tokens are all alike (a few embeddings, say) is not full of massive ones.
        """
        parts, width = self.typical.shape
        limit = token_limit(tokens * parts, level)
        spread = self.spread.clamp_min(gaussian_spread(width))
        return self.typical * (self.middle + limit * spread).exp()[:, None]
