"""W_q and W_k as views of a model's parameters, against the probe's, in every family."""

from __future__ import annotations

import torch
import transformers
from transformers.pytorch_utils import Conv1D

import theodolite.models.projections
from tests import checkpoints
from theodolite.models.calls import capture_calls
from theodolite.models.projections import find_projections
from theodolite.models.source import Source
from theodolite.models.structure_search import find_structure


def sample(family: str) -> dict[str, torch.Tensor]:
    if family == "vit":
        return {"pixel_values": torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))}
    return {"input_ids": torch.tensor([[7]]), "use_cache": False}


def found(model: transformers.PreTrainedModel, inputs: dict[str, torch.Tensor], layers: list[int]):
    with torch.no_grad():
        structure = find_structure(Source.of_transformers(model))
        calls = capture_calls(model, structure, lambda: model.base_model(**inputs))
        return structure, calls, find_projections(model, structure, calls, layers)


class Swapping(Conv1D):
    """Queries and keys one for the other, in layers that say so: of the same kind as those that do not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, value = super().forward(x).split(32, dim=-1)
        return torch.cat([second, first, value] if self.swaps else [first, second, value], dim=-1)


def test_layers_alike_are_found_by_the_first_and_others_by_themselves(monkeypatch):
    """Oracle: the search in every layer by itself."""
    model = checkpoints.build("gpt2")
    for block in model.transformer.h:
        block.attn.c_attn.__class__, block.attn.c_attn.swaps = Swapping, False
    searched: list[int] = []

    def searching(structure, layer, *rest):
        searched.append(layer)
        return search(structure, layer, *rest)

    def factors(layers):
        searched.clear()
        return [w.detach() for layer in found(model, sample("gpt2"), layers)[2] for w in layer.factors()]

    search = theodolite.models.projections._find
    monkeypatch.setattr(theodolite.models.projections, "_find", searching)
    for swapped, expected in (([], [0]), ([1], [0, 1, 2]), ([2], [0, 2])):
        for layer, block in enumerate(model.transformer.h):
            block.attn.c_attn.swaps = layer in swapped
        alone = [w for layer in range(3) for w in factors([layer])]
        together = factors([0, 1, 2])
        assert searched == expected  # the last search of a kind is what the next layer of it is tried with
        assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))
