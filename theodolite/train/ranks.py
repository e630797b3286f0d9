"""The processes of one training run: sum over all of them, or share what the first one computed."""

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
        teams = sorted(set(cls(rank, world)._of_all(first)))
        return cls(rank, world, teams.index(first), len(teams), rank == first)

    @property
    def first(self) -> bool:
        """True for the process that writes and speaks."""
        return self.rank == 0

    def share(self, ids: Int[Tensor, "contexts positions"]) -> Int[Tensor, "own positions"]:
        """Return the contexts that this process reads; none, where there are fewer contexts than teams of processes."""
        return ids[self.team :: self.teams]

    def totals(self, values: dict[str, Tensor], maxima: frozenset[str] = frozenset()) -> dict[str, Tensor]:
        """Sum every tensor over the processes, or take its maximum, in float64 on the CPU."""
        everyone = self._of_all({name: value.double().cpu() for name, value in values.items()})
        stacked = {name: torch.stack([each[name] for each in everyone]) for name in values}
        return {name: of.amax(0) if name in maxima else of.sum(0) for name, of in stacked.items()}

    def from_first(self, compute: Callable[[], Answer]) -> Answer:
        """Return on all processes the result of `compute` on the first one, or raise what it raises there."""
        answer: Any = None
        if self.first:
            try:
                answer = compute()
            except TheodoliteError as error:
                answer = error
        answer = self._of_all(answer)[0]
        if isinstance(answer, TheodoliteError):
            raise answer
        return answer  # type: ignore[no-any-return]

    def raise_any(self, error: TheodoliteError | None) -> None:
        """Raise on all processes what any of them has to raise: else the others would wait for it for ever."""
        for failure in filter(None, self._of_all(error)):
            raise failure

    def _of_all(self, own: Answer) -> list[Answer]:
        """Return what each process has."""
        gathered = [own] * self.world
        if self.world > 1:
            distributed.all_gather_object(gathered, own)
        return gathered
