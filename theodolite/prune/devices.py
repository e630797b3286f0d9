"""The matrices of a block given out to several devices: the largest work first, a thread for each device.

Each matrix and its moments are copied to a device and pruned there; what comes back is in the order of the matrices,
so that it does not depend on how many devices there were. How a matrix is pruned is not known here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import torch

from theodolite.errors import UsageError
from theodolite.models.block_matrices import Matrix
from theodolite.models.factored import PrunedMatrix
from theodolite.models.guard import known_state
from theodolite.models.loading import usable_device
from theodolite.prune.moments import InputMoments
from theodolite.prune.settings import PruningSettings

SECONDS = 0.2
"""How long the caller waits for a matrix before it hears of Ctrl-C."""

PrunedAndRow = tuple[PrunedMatrix, dict[str, Any]]


def usable_devices(names: Sequence[str]) -> list[torch.device]:
    """The devices of these names.

    Raises:
        UsageError: one cannot be used, or they are not all of one kind, which would give each matrix other last bits.
    """
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise UsageError(f'devices is {names!r}: give a list of names, such as ["cuda:0", "cuda:1"]')
    devices = [usable_device(name) for name in names]
    kinds = sorted({device.type for device in devices})
    if len(kinds) > 1:
        raise UsageError(
            f"--devices of several kinds ({', '.join(kinds)}) differ in last bits: give one kind"
        )
    return devices


def pruned_block(
    settings: PruningSettings,
    matrices: Sequence[Matrix],
    moments: InputMoments,
    devices: Sequence[torch.device],
    between: Callable[[int], None],
) -> list[PrunedAndRow]:
    """The matrices of a block pruned, each with its row of the table, in their order.

    Args:
        settings, matrices, moments: of the block.
        devices: none: each where it is.
        between: told how many are done, never after the last one; it may raise to stop.

    Raises:
        WorkError: as `PruningSettings.prune`.
    """
    if devices:
        return _on_devices(settings, matrices, moments, devices, between)
    finished: list[PrunedAndRow] = []
    for matrix in matrices:
        between(len(finished))
        finished.append(settings.prune(matrix, moments.of(matrix)))
    return finished


def _on_devices(
    settings: PruningSettings,
    matrices: Sequence[Matrix],
    moments: InputMoments,
    devices: Sequence[torch.device],
    between: Callable[[int], None],
) -> list[PrunedAndRow]:
    groups: SimpleQueue[list[int]] = SimpleQueue()
    together = moments.together(matrices)
    for group in sorted(together, key=lambda group: _work(matrices, group), reverse=True):
        groups.put(group)
    if not settings.options.needs_full_moments:  # of several matrices, which may go to several devices
        diagonals = [moments.of(matrix) for matrix in matrices]
    ended: SimpleQueue[tuple[int, PrunedAndRow] | BaseException] = SimpleQueue()
    stopped = threading.Event()

    def prune(number: int, device: torch.device) -> PrunedAndRow:
        matrix = matrices[number]
        full = settings.options.needs_full_moments
        of_inputs = moments.of(matrix, device) if full else diagonals[number].diagonal_on(device)
        pruned, row = settings.prune(matrix, of_inputs, device)
        return pruned.to(matrix.holder.device), row

    own_threads = torch.get_num_threads()

    def work(device: torch.device) -> None:
        torch.get_num_threads()  # a new thread takes what any other has set last, when it first asks
        torch.set_num_threads(own_threads)
        try:
            with known_state():
                while True:
                    for number in groups.get_nowait():
                        if stopped.is_set():
                            return
                        ended.put((number, prune(number, device)))
        except Empty:
            return
        except BaseException as error:  # raised again by the thread that waits
            ended.put(error)

    threads = [threading.Thread(target=work, args=(device,), daemon=True) for device in devices]
    finished: dict[int, PrunedAndRow] = {}
    try:
        for thread in threads:
            thread.start()
        while len(finished) < len(matrices):
            between(len(finished))
            try:
                result = ended.get(timeout=SECONDS)
            except Empty:
                continue
            if isinstance(result, BaseException):
                raise result
            finished[result[0]] = result[1]
    finally:
        stopped.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        torch.set_num_threads(own_threads)  # new threads inherit what any thread has set last
    return [finished[number] for number in range(len(matrices))]


def _work(matrices: Sequence[Matrix], group: Sequence[int]) -> int:
    """About how many operations: products of the size of a matrix with its moments, and the moments' own."""
    inputs = matrices[group[0]].shape[1]
    outputs = sum(matrices[number].shape[0] for number in group)
    return inputs * inputs * (inputs + outputs)
