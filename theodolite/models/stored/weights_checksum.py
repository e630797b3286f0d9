"""Check that the weights in memory are those that were opened; name them by a SHA-256 if they are not.

A write to `.data` leaves the version counters of tensors as they are, so all weights are read: by a CRC-32, at 2 GB a
second.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.models.stored.dequantised import has_own_class
from theodolite.models.weights.weight_map import own_parameter
from theodolite.system.files import digest
from theodolite.system.processor import parallel_map


@dataclass(frozen=True)
class Weights:
    """The identity of an opened model's weights.

    `sha256` is that of the checkpoint on disk, if that was local, or of the tensors where they were `changed` or the
    model was opened `in_memory`; `revision` is the commit on the hub, if they are still those.
    """

    sha256: str | None
    revision: str | None
    changed: bool = False
    in_memory: bool = False

    def described(self) -> dict[str, str | None]:
        """Return what a run's provenance records of them."""
        where = "in memory, changed" if self.changed else "in memory" if self.in_memory else None
        return {"revision": self.revision, "sha256": self.sha256, **({"weights": where} if where else {})}


def weights_checksum(model: nn.Module) -> int:
    """Sum names, types, shapes and bytes of all weights; 0 of those elsewhere (on disk, on the meta device)."""
    return zlib.crc32(repr(parallel_map(_crc, list(_weights(model).items()))).encode())


def weights_sha256(model: nn.Module) -> str:
    """Hash the weights in memory, to name them."""
    return digest({name: tensor.detach().cpu().contiguous() for name, tensor in _weights(model).items()})


def _crc(named: tuple[str, Tensor]) -> tuple[str, str, tuple[int, ...], int]:
    name, tensor = named
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return name, str(tensor.dtype), tuple(tensor.shape), zlib.crc32(values.data)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and the buffers that checkpoints hold, each once; what an intervention replaced, as it was."""
    found: dict[int, tuple[str, Tensor]] = {}
    for path, module in model.named_modules():
        held = {name: own_parameter(module, name, p) for name, p in module._parameters.items()}
        held |= {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for name, tensor in held.items():
            if tensor is not None and not tensor.is_meta:
                found.setdefault(id(tensor), (f"{path}.{name}", tensor))
    return dict(part for named in found.values() for part in _parts(*named))


def _parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensor, or the plain ones that one of a quantiser's class is made of."""
    if not has_own_class(tensor):
        yield name, tensor
        return
    parts: Any = tensor
    for part in parts.__tensor_flatten__()[0]:
        yield from _parts(f"{name}.{part}", getattr(tensor, part))
