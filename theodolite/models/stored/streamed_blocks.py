"""The blocks of a model whose tensors are read from its checkpoint as they run, and written a block at a time."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from theodolite.models.stored.checkpoint_tensors import (
    CannotReadLazily,
    CheckpointTensors,
    restore_tensors,
    stored_tensors,
)
from theodolite.models.stored.loading import refuse_nonfinite_weights
from theodolite.models.structure import Structure
from theodolite.system.files import write_text


class StreamedBlocks:
    """The blocks of a skeleton, which have their tensors while they are `present`.

    Attributes:
        names: of the blocks, in the order of the layers.
    """

    def __init__(self, tensors: CheckpointTensors, structure: Structure, device: torch.device) -> None:
        self._tensors, self._structure, self._device = tensors, structure, device
        name_of = {module: name for name, module in tensors.model.named_modules()}
        if structure.free or len(set(structure.blocks)) < len(structure.blocks):
            raise CannotReadLazily("its layers are no modules of their own")
        self.names = [name_of[block] for block in structure.blocks]
        self._users = [0] * len(self.names)
        self._edit: Callable[[int], None] | None = None

    @contextmanager
    def present(self, layer: int) -> Iterator[None]:
        """While open, the tensors of a block are there."""
        block = self._structure.blocks[layer]
        stored = [] if self._users[layer] else stored_tensors(block)
        self._users[layer] += 1
        try:
            if stored:
                # What is read within a pass without gradients is written to after it, too.
                with torch.inference_mode(False), torch.no_grad():
                    self._tensors.load(self.names[layer], self._device)
                    if self._edit is not None:
                        self._edit(layer)
            yield
        finally:
            self._users[layer] -= 1
            restore_tensors(stored)

    def load_rest(self) -> None:
        """Read, for good, what lies outside the blocks.

        Raises:
            CannotReadLazily: the checkpoint does not hold all of it.
            WorkError: a weight is NaN or infinite.
        """
        model, prefixes = self._tensors.model, tuple(name + "." for name in self.names)
        self._tensors.load_if(
            lambda name: not name.startswith(prefixes), "what is outside of its blocks", self._device
        )
        model.tie_weights()
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(self._device)
        missing = [
            name
            for name, tensor in model.state_dict().items()
            if tensor.is_meta and not name.startswith(prefixes)
        ]
        if missing:
            raise CannotReadLazily(f"the weights do not hold {missing[0]}")
        refuse_nonfinite_weights(model)

    def read_as_they_run(self) -> None:
        """From now on, a pass of the model reads each block as it gets there."""

        def run(own: Callable[..., Any], layer: int, *args: Any, **kwargs: Any) -> Any:
            with self.present(layer):
                return own(*args, **kwargs)

        for layer, block in enumerate(self._structure.blocks):
            block.__dict__["forward"] = functools.partial(run, block.forward, layer)

    @contextmanager
    def edited(self, edit: Callable[[int], None]) -> Iterator[None]:
        """While open, `edit` is called with a layer whose tensors have just been read, to change them."""
        self._edit = edit
        try:
            yield
        finally:
            self._edit = None

    def tensors(self, layer: int, without: Container[str] = ()) -> dict[str, Tensor]:
        """Copies of what a checkpoint holds of a block, by the model's names, but for some of them."""
        with self.present(layer):
            block = self._structure.blocks[layer].state_dict()
            named = {f"{self.names[layer]}.{name}": tensor for name, tensor in block.items()}
            return {name: tensor.cpu().clone() for name, tensor in named.items() if name not in without}

    def save(self, folder: Path) -> None:
        """Write a checkpoint that `transformers` opens into a folder, a file of each block and one of the rest."""
        from transformers.core_model_loading import revert_weight_conversion

        model, files = self._tensors.model, len(self.names) + 1
        save_config(model, folder)
        places: dict[str, str] = {}
        size = 0
        for number in range(files):
            name = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
            own = self.tensors(number) if number < len(self.names) else self._rest()
            tensors = {name: t.contiguous() for name, t in revert_weight_conversion(model, own).items()}
            save_file(tensors, folder / name, {"format": "pt"})
            places |= dict.fromkeys(tensors, name)
            size += sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
        write_text(folder / SAFE_WEIGHTS_INDEX_NAME, json.dumps(index, indent=2) + "\n")

    def _rest(self) -> dict[str, Tensor]:
        """What a checkpoint holds of all that lies outside the blocks; of tied tensors, the one that others follow."""
        model, prefixes = self._tensors.model, tuple(name + "." for name in self.names)
        return {
            name: tensor.cpu()
            for name, tensor in model.state_dict().items()
            if not name.startswith(prefixes) and name not in model.all_tied_weights_keys
        }


def save_config(model: PreTrainedModel, folder: Path) -> None:
    """Write what a checkpoint says of the model beside its weights."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = model.dtype
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
