"""The processes of one training run: sum over all of them, or share what the first one computed.

With one process nothing is sent and everything is as it was. What is summed is not known here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor, distributed

from theodolite.errors import TheodoliteError

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Ranks:
    """The rank of this process, and how many there are (`world`). All of them must call every method but `share`.

    Attributes:
        team, teams: those who must read the same contexts are a team (each has some of the heads); which this one's is.
        leads: whether this process is the first of its team, whose sums are those of all.
    """

    rank: int = 0
    world: int = 1
    team: int = 0
    teams: int = 1
    leads: bool = True

    @classmethod
    def current(cls, heads: Any = None) -> Ranks:
        """Read the default process group, or be alone without one; `heads`: the group over which heads are spread."""
        if not (distributed.is_available() and distributed.is_initialized()):
            return cls()
        rank, world = distributed.get_rank(), distributed.get_world_size()
        first = rank if heads is None else min(distributed.get_process_group_ranks(heads))
        everyone: list[int] = [0] * world
        distributed.all_gather_object(everyone, first)
        teams = sorted(set(everyone))
        return cls(rank, world, teams.index(first), len(teams), rank == first)

    @property
    def first(self) -> bool:
        """True for the process that writes and speaks."""
        return self.rank == 0

    def share(self, ids: Int[Tensor, "contexts positions"]) -> Int[Tensor, "own positions"]:
        """Return the contexts that this process reads; none, where there are fewer contexts than teams of processes."""
        return ids[self.team :: self.teams]

    def totals(self, values: dict[str, Tensor], maxima: frozenset[str] = frozenset()) -> dict[str, Tensor]:
        """Sum every tensor over the processes, or take its maximum, in float64 on the CPU.

        Names and shapes must be the same everywhere.
        """
        values = {name: value.double().cpu() for name, value in values.items()}
        if self.world == 1:
            return values
        for operation, largest in ((distributed.ReduceOp.SUM, False), (distributed.ReduceOp.MAX, True)):
            if names := [name for name in values if (name in maxima) == largest]:
                flat = torch.cat([values[name].flatten() for name in names]).to(_device())
                distributed.all_reduce(flat, operation)
                parts = flat.cpu().split([values[name].numel() for name in names])
                values |= {name: part.view_as(values[name]) for name, part in zip(names, parts, strict=True)}
        return values

    def from_first(self, compute: Callable[[], Answer]) -> Answer:
        """Return on all processes the result of `compute` on the first one, or raise what it raises there."""
        if self.world == 1:
            return compute()
        answers: list[Answer | TheodoliteError | None] = [None]
        if self.first:
            try:
                answers[0] = compute()
            except TheodoliteError as error:
                answers[0] = error
        distributed.broadcast_object_list(answers, src=0, device=_device())
        if isinstance(answers[0], TheodoliteError):
            raise answers[0]
        return answers[0]  # type: ignore[return-value]

    def raise_any(self, error: TheodoliteError | None) -> None:
        """Raise on all processes what any of them has to raise: else the others would wait for it for ever."""
        errors = [error] * self.world
        if self.world > 1:
            distributed.all_gather_object(errors, error)
        for failure in filter(None, errors):
            raise failure


def _device() -> torch.device:
    """Return the device that tensors are sent from: NCCL takes those of this process's GPU only."""
    nccl = "nccl" in str(distributed.get_backend())
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
