"""The same architecture with the random weights of its config's own initialisation: what training starts from."""

from __future__ import annotations

import copy
import hashlib

import torch
from transformers import PreTrainedModel

from theodolite.errors import UsageError
from theodolite.models.guard import MAKING, measures
from theodolite.models.open import verified_parts
from theodolite.models.opened import OpenModel


@measures
def untrained(model: OpenModel, seed: int = 0) -> OpenModel:
    """A model of the same class and config with random weights; the global random state stays as it is.

    Args:
        model: from `open_model`; its device, dtype and tokenizer are taken over.
        seed: of the weights.

    Raises:
        UsageError: it is no `transformers` model, so that nothing says how its weights begin.
    """
    if not isinstance(model.root, PreTrainedModel):
        raise UsageError(
            f"{model.id} has no config that says how its weights begin: it has no untrained baseline"
        )
    with MAKING, torch.random.fork_rng():
        torch.manual_seed(seed)
        made = type(model.root)(copy.deepcopy(model.root.config))
    hf = made.to(device=model.device, dtype=model.source.dtype).eval().requires_grad_(False)  # type: ignore[call-arg]
    weights = model.weights()
    origin = f"{weights.sha256 or weights.revision or model.id} untrained {seed}"
    assert model.source.of_copy is not None
    source = model.source.of_copy(hf)
    return OpenModel.of(
        source,
        *verified_parts(source),
        tokenizer=model.tokenizer,
        id=f"{model.id}, untrained",
        sha256=hashlib.sha256(origin.encode()).hexdigest(),
    )
