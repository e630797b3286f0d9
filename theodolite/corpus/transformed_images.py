"""Pictures as a transform of one's own makes them: for encoders of images that no checkpoint describes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from theodolite.corpus.patches import PatchGrid
from theodolite.errors import UsageError


@dataclass(frozen=True)
class TransformedImages:
    """How a module reads pictures: what `Corpus.from_path` takes in place of a tokenizer.

    Args:
        transform: from a picture of Pillow in RGB to pixel values (channels, height, width), as those of timm and
            torchvision; the same for the same picture.
        patch: height and width of a patch in pixels.
        before: names of the tokens before the patches; () where there are none.
        mean, deviation: of each colour, by which the transform normalised; to show pictures in reports.
    """

    transform: Callable[[Any], Tensor]
    patch: tuple[int, int]
    before: tuple[str, ...] = ("[CLS]",)
    mean: Sequence[float] = (0.0,)
    deviation: Sequence[float] = (1.0,)

    def read(self, image: Any) -> Float[Tensor, "channels height width"]:
        """The pixel values of a picture in RGB.

        Raises:
            UsageError: the transform gives something else.
        """
        pixels = self.transform(image)
        if not isinstance(pixels, Tensor) or pixels.ndim != 3:
            raise UsageError(
                f"the transform gives {tuple(pixels.shape) if isinstance(pixels, Tensor) else type(pixels).__name__} "
                "for a picture: pixel values are (channels, height, width)"
            )
        return pixels.float()

    def shown(
        self, pixels: Float[Tensor, "images channels height width"]
    ) -> UInt8[Tensor, "images height width colours"]:
        """Pixel values as a picture that can be looked at."""
        mean, deviation = (
            torch.tensor(values, dtype=torch.float64) for values in (self.mean, self.deviation)
        )
        colours = pixels.movedim(1, -1).double() * deviation + mean
        return (colours * 255).round().clamp(0, 255).to(torch.uint8)

    def grid_of(self, height: int, width: int) -> PatchGrid:
        """The tokens of a picture of so many pixels."""
        return PatchGrid(height // self.patch[0], width // self.patch[1], self.before)
