"""What a worker of a survey on Ray does: it reads contexts, and makes the passes that follow the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from theodolite.accumulate.extra import Extra
from theodolite.accumulate.sums import State
from theodolite.passes.packed_states import Packed, packed, unpacked
from theodolite.passes.ray_actors import Job, Opener
from theodolite.passes.survey import later_pass
from theodolite.passes.survey_pass import SurveyPass
from theodolite.system.progress import Progress


@dataclass(frozen=True)
class SurveyJob(Job):
    """What every worker of a survey opens and reads."""

    seed: int
    extra: Sequence[Extra]


class Worker(Opener):
    """The actor."""

    job: SurveyJob

    def read(self, first: int, last: int, directions: Tensor | None) -> tuple[bool, Packed]:
        """That it was read, and what a pass over these contexts only sums: two objects, the first of which is small.

        `directions` are those of the sketches of a pass that began elsewhere.
        """
        job = self.job
        corpus_pass = SurveyPass(self.opened(), job.corpus, job.seed, job.batch, job.extra)
        if directions is not None:
            corpus_pass.sketches.look_along(directions)
        corpus_pass.read(first, last)
        return True, packed(corpus_pass.state())

    def later(self, name: str, given: Packed) -> tuple[State, dict[str, Any]]:
        """The state and the notes of one of the passes that follow the text."""
        job = self.job
        running = later_pass(name, self.opened(), job.corpus, job.seed, unpacked(given))
        running.run(Progress(running.total))
        return running.state(), running.notes
