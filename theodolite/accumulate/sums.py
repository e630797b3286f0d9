"""Named tensors, one a layer or one a key, that are summed over a corpus: the base of every accumulator.

An accumulator has `update(...)`, `merge(state)`, `state()` and `restore(state)`. Each layer's tensors live where that
layer's hidden states live; `state` brings them together on the CPU. Sums are float64 whatever the model's dtype.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TypeVar

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional

from theodolite.corpus.groups import GROUPS, Groups
from theodolite.jobs.job import part_of
from theodolite.system.mapped import zeros_in_file, zeros_in_pages
from theodolite.system.processor import parallel_map

Result = TypeVar("Result")

State = dict[str, Tensor]
"""What an accumulator saves and what the measures read: name → tensor, leading with layers."""


def joined(parts: Mapping[str, State]) -> State:
    """Combine several states into one, each tensor under `name.tensor`."""
    return {f"{name}.{key}": tensor for name, state in parts.items() for key, tensor in state.items()}


LARGE = 2**26
"""Bytes of sums of all layers that are in a file, where they may be, or take memory only where there is something."""

_folder: ContextVar[Path | None] = ContextVar("folder of sums", default=None)


@contextmanager
def large_in_files(folder: Path | None) -> Iterator[None]:
    """Keep the large sums of accumulators made while open in unnamed files of a folder; None: in memory."""
    before = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(before)


class LayerSums:
    """Tensors `name → (layers, *shape)` that only ever grow by addition, or by maximum for `maxima`.

    With `keyed` sums beside them, whose tensors its state has as `name.tensor`.
    """

    def __init__(
        self,
        layers: int,
        shapes: dict[str, tuple[int, ...]],
        maxima: tuple[str, ...] = (),
        keyed: Mapping[str, KeyedSums] | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.layers = layers
        self.maxima = frozenset(maxima)
        self.keyed = dict(keyed or {})
        # One tensor of all layers, so that its state is no copy; `at` puts a layer's elsewhere.
        self._whole = {name: _zeros((layers, *shape), dtype) for name, shape in shapes.items()}
        self._tensors = {name: list(whole.unbind()) for name, whole in self._whole.items()}

    def at(self, name: str, layer: int, device: torch.device) -> Tensor:
        """Return the tensor itself, moved to `device` first if it is elsewhere; change it in place."""
        tensors = self._tensors[name]
        if tensors[layer].device != device:
            tensors[layer] = tensors[layer].to(device)
        return tensors[layer]

    def add(self, name: str, layer: int, value: Tensor, group: int | None = None) -> None:
        """Add `value` (or take the maximum with it, for the maxima), to one group where there are groups.

        Of a layer with fewer heads than another one, to the first rows.
        """
        tensor = self.at(name, layer, value.device)
        if group is not None:
            tensor = tensor[group]
        if value.ndim == tensor.ndim:
            tensor = tensor[tuple(map(slice, value.shape))]
        include(tensor, value, maximum=name in self.maxima)

    def state(self) -> State:
        """Return all tensors on the CPU, those of keys in the order of keys; they may change with the next update."""
        for name, tensors in self._tensors.items():
            for layer, tensor in enumerate(tensors):
                if tensor.device.type != "cpu":
                    self._whole[name][layer] = tensor.cpu()
        return self._whole | joined({name: sums.state() for name, sums in self.keyed.items()})

    def restore(self, state: State) -> None:
        """Restore a state that `state` returned."""
        for name, tensors in self._tensors.items():
            for tensor, value in zip(tensors, state[name], strict=True):
                for total, row in self._pieces(tensor, value):
                    if row.any() or total.any():  # where nothing is written nothing takes room
                        total.copy_(row)
        for name, sums in self.keyed.items():
            sums.restore(part_of(state, name))

    def merge(self, state: State) -> None:
        """Merge the `state` of another accumulator into this one."""
        for name, tensors in self._tensors.items():
            for layer, tensor in enumerate(tensors):
                for total, row in self._pieces(tensor, state[name][layer].to(tensor.device)):
                    if name in self.maxima or row.any():
                        include(total, row, maximum=name in self.maxima)
        for name, sums in self.keyed.items():
            sums.merge(part_of(state, name))

    def _pieces(self, tensor: Tensor, value: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Pair a layer's sums with a value, row by row where they are large: most rows may be empty."""
        large = tensor.device.type == "cpu" and tensor.nbytes * self.layers >= LARGE
        return list(zip(tensor, value, strict=True)) if large and tensor.ndim > 1 else [(tensor, value)]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    folder, size = _folder.get(), dtype.itemsize * math.prod(shape)
    if size < LARGE:
        return torch.zeros(shape, dtype=dtype)
    return zeros_in_pages(shape, dtype) if folder is None else zeros_in_file(shape, dtype, folder)


class KeyedSums:
    """Sums (or maxima) name → (rows, *shape); a row is made when its key, a tuple of integers, is first seen."""

    def __init__(self, width: int, shapes: dict[str, tuple[int, ...]], maxima: tuple[str, ...] = ()) -> None:
        self.width = width
        self.maxima = frozenset(maxima)
        self._row_of: dict[tuple[int, ...], int] = {}
        self._tensors = {name: torch.zeros(0, *shape, dtype=torch.float64) for name, shape in shapes.items()}

    def __len__(self) -> int:
        return len(self._row_of)

    def rows(self, keys: Int[Tensor, "some width"]) -> Int[Tensor, " some"]:
        """Return the row of each key, new ones at the end."""
        rows = [self._row_of.setdefault(tuple(key), len(self._row_of)) for key in keys.tolist()]
        for name, tensor in self._tensors.items():
            if len(self) > len(tensor):
                size = max(len(self), 2 * len(tensor))  # doubling: each row is copied a few times only
                more = size - len(tensor), *tensor.shape[1:]
                empty = -torch.inf if name in self.maxima else 0.0
                self._tensors[name] = torch.cat([tensor, tensor.new_full(more, empty)])
        return torch.tensor(rows, dtype=torch.int64)

    def add(self, rows: Int[Tensor, " some"], values: Mapping[str, Tensor]) -> None:
        """Add values name → (some, *shape) to rows, which may repeat."""
        for name, of_rows in values.items():
            terms = of_rows.to("cpu", torch.float64)
            if name in self.maxima:
                self._tensors[name].scatter_reduce_(0, rows, terms, "amax")
            else:
                self._tensors[name].index_add_(0, rows, terms)

    def count_contexts(
        self, rows: Int[Tensor, " some"], context: Int[Tensor, " some"], groups: Groups | None = None
    ) -> None:
        """Add 1 to `contexts` of each row, and group if there are any, for every context that it is seen in."""
        context, row = torch.stack([context, rows], dim=1).unique(dim=0).unbind(dim=1)
        once = torch.ones(len(row)) if groups is None else functional.one_hot(groups.of(context), GROUPS)
        self.add(row, {"contexts": once})

    def at(self, name: str) -> Tensor:
        """Return the tensor itself, (rows, *shape) and spare rows behind; change it in place."""
        return self._tensors[name]

    def state(self) -> State:
        """Return `keys` (K, width) in ascending order, and every tensor's rows in that order."""
        ordered = sorted(self._row_of.items())
        rows = torch.tensor([row for _, row in ordered], dtype=torch.int64)
        keys = torch.tensor([key for key, _ in ordered], dtype=torch.int64).reshape(-1, self.width)
        return {"keys": keys} | {name: tensor[rows] for name, tensor in self._tensors.items()}

    def restore(self, state: State) -> None:
        """Restore a state that `state` returned."""
        self._row_of = {tuple(key): row for row, key in enumerate(state["keys"].tolist())}
        self._tensors = {name: state[name].clone() for name in self._tensors}

    def merge(self, state: State) -> None:
        """Merge the `state` of another one into this one."""
        self.add(self.rows(state["keys"]), {name: state[name] for name in self._tensors})


ANY = -1  # the part (head or dimension) of what is marked at position 0, where nearly every part is

MARKED_COLUMNS = ("layer", "part", "context", "position", "token_id", "occurrences", "key")
"""Of `marked_places`: `part` is a head or a dimension, `key` what knows the context again (`context_key`)."""


class Marked(KeyedSums):
    """Occurrences by layer, part, number of the context, position and token: keys alone, and no sums."""

    def __init__(self) -> None:
        super().__init__(5, {})

    def mark(self, layer: int, part: Tensor, context: Tensor, position: Tensor, token: Tensor) -> None:
        """Mark occurrences, one a row of all tensors; of position 0 all parts are one."""
        part = torch.where(position == 0, ANY, part)
        self.rows(torch.stack([torch.full_like(part, layer), part, context, position, token], dim=1))


def context_key(ids: Int[Tensor, " positions"]) -> int:
    """Return a number that only contexts of the same tokens have."""
    digest = hashlib.sha256(ids.cpu().long().contiguous().numpy().tobytes()).digest()
    return int.from_bytes(digest[:7], "little")


def marked_places(state: State, contexts: Iterable[Int[Tensor, " positions"]]) -> Int[Tensor, "places 7"]:
    """Tabulate by `MARKED_COLUMNS` what was marked in these contexts; occurrences count after position 0, 0 there."""
    contexts = list(contexts)
    layer, part, context, position, token = state["keys"].unbind(dim=1)
    later = torch.cat([ids[1:] for ids in contexts])
    counts = torch.bincount(later, minlength=int(max(token, default=0)) + 1)
    key = torch.tensor([context_key(ids) for ids in contexts])
    occurrences = torch.where(position == 0, 0, counts[token])
    return torch.stack([layer, part, context, position, token, occurrences, key[context]], dim=1)


def include(total: Tensor, value: Tensor, *, maximum: bool) -> None:
    """Add `value` to `total` in place, or take the maximum of both."""
    if maximum:
        torch.maximum(total, value.to(total.dtype), out=total)
    else:
        total += value


def token_slices(length: int, trailing: int, leading: int = 1) -> dict[str, slice]:
    """Return the positions of a context's text (""), and of tokens told apart from it, by the ending of their names.

    Apart are position 0 and `trailing` special tokens at the end; all `leading` tokens before a picture are no text.
    """
    end = length - trailing
    return {"": slice(leading, end), "_first": slice(1)} | ({"_last": slice(end, None)} if trailing else {})


def position_slices(read: int, length: int, apart: int) -> list[tuple[slice, slice]]:
    """Map positions of `read` tokens to those of `length`, as pairs of slices; the last `apart` stay the last."""
    if read == length:
        return [(slice(None), slice(None))]
    end = read - apart
    text = (slice(end), slice(end))
    return [text, (slice(end, read), slice(length - apart, length))] if apart else [text]


CACHED = 2**19
"""Numbers of float32 to work on at once on a CPU: its cache holds them, and the calls that do it take less time."""


def contexts_in_cache(numbers: int) -> int:
    """Return how many contexts of so many numbers each to work on at once."""
    return max(1, CACHED // max(1, numbers))


def share_of_thread(batch: int) -> int:
    """Return how many contexts of a batch each of torch's threads has, if they share them."""
    return max(1, math.ceil(batch / torch.get_num_threads()))


def cache_sized(batch: int, device: torch.device, contexts: int = 1) -> list[slice]:
    """Cut a batch into slices to work on at once: on a CPU, `contexts` at a time, as its cache holds; else all."""
    step = contexts if device.type == "cpu" else max(batch, 1)
    return [slice(start, min(start + step, batch)) for start in range(0, batch, step)]


def cache_sized_groups(
    groups: Groups, first: int, batch: int, device: torch.device, contexts: int = 1
) -> Iterator[tuple[int, slice]]:
    """Yield slices of the contexts `first …` as `cache_sized` does, each within one group of contexts."""
    for group, part in groups.parts(first, batch):
        for inner in cache_sized(part.stop - part.start, device, contexts):
            yield group, slice(part.start + inner.start, part.start + inner.stop)


def each_part(
    work: Callable[[slice], Result], batch: int, device: torch.device, contexts: int = 1
) -> list[Result]:
    """Apply `work` to each of the `cache_sized` parts of a batch; on a CPU, in parallel, a part a thread at least."""
    return parallel_map(work, cache_sized(batch, device, min(contexts, share_of_thread(batch))))
