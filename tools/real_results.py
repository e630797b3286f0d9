"""Judge the three papers on the real models: `python -m tools.real_results [MODEL …]`, `make real`.

The folders of the runs lie beside the models, outside of the repository. What is finished there is not made again, so
that a stopped run goes on; delete the folder to begin anew. At the end docs/results/real and the gallery have all.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from theodolite.errors import UsageError
from theodolite.report.outcome import RESULT
from theodolite_papers import catalogue
from tools import gallery
from tools.real_models import MODELS, cache, fetch, real_model

LENGTH = 256
SECONDS, REFUSED = "seconds.json", "refused.json"

OF_HEADS = ",".join(
    f"localization/{name}" for name in ("behaviour", "assumptions", "gradient", "collapse", "width")
)
PROMPTS = ",".join(f"sinks/figure{number}" for number in (2, 7, 8, 9, 10, 11))
SINKS = ",".join(("localization/walk", *(f"sinks/{name}" for name in ("trace", "ablation", "outliers"))))
PRUNED = "sinks/figure5,sinks/figure4,sinks/figure3"
ADDER = "geometry/addition"


@dataclass(frozen=True)
class Stage:
    """Experiments on one survey of a model, of so many contexts of Python's documentation."""

    model: str
    experiments: str
    contexts: int

    @property
    def folder(self) -> str:
        """The name of its run folder."""
        return f"{self.model}-{self.contexts}"

    def names(self) -> list[str]:
        """List the experiments by name."""
        every = (name for group in self.experiments.split(",") for name in catalogue.names_of(group))
        return [name for name in every if name != ADDER and not name.endswith("/claims")]


STAGES = (
    Stage("smollm2", f"geometry,{OF_HEADS},{PROMPTS},sinks/spikes,sinks/examples", 384),
    Stage("gemma3", f"geometry,{OF_HEADS},{PROMPTS},sinks/spikes", 256),
    Stage("minilm", f"geometry,{OF_HEADS},{PROMPTS}", 384),
    Stage("minilm", SINKS, 64),
    Stage("smollm2", f"{SINKS},{PRUNED}", 64),
    Stage("gemma3", f"{SINKS},{PRUNED}", 64),
)
"""What is judged of which model; what reads the text many times, or prunes, has fewer contexts."""


def folder() -> Path:
    """Return the folder of the runs."""
    return cache().with_name("real-results")


def run(stage: Stage) -> None:
    """Make what is left of a stage; the seconds that it took are added to those before.

    What a model refused (an encoder has no loss, say) is not asked again.
    """
    place, model = folder() / stage.folder, real_model(stage.model)
    path = place / REFUSED
    refused = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    left = [name for name in missing(stage) if name not in refused]
    if not left:
        return
    assert model is not None
    command = [str(Path(sys.executable).with_name("theodolite")), "reproduce", ",".join(left)]
    command += [str(model.relative_to(cache())), "--length", str(LENGTH), "--contexts", str(stage.contexts)]
    began = time.monotonic()
    # From the folder of the models, so that no result names a path of this machine.
    done = subprocess.run([*command, "--out", str(place)], cwd=cache(), stdout=subprocess.DEVNULL)
    seconds = took() | {stage.folder: round(took().get(stage.folder, 0) + time.monotonic() - began)}
    (folder() / SECONDS).write_text(json.dumps(seconds, indent=1) + "\n", encoding="utf-8")
    if done.returncode not in (0, UsageError.exit_status):
        sys.exit(f"{stage.folder} ended with {done.returncode}: rerun to go on")
    path.write_text(json.dumps(missing(stage)), encoding="utf-8")


def missing(stage: Stage) -> list[str]:
    """List the experiments of a stage that have no result."""
    pages = folder() / stage.folder / "reproduce"
    return [name for name in stage.names() if not (pages / name.replace("/", "-") / RESULT).is_file()]


def took() -> dict[str, int]:
    """Return the seconds that every stage took so far."""
    path = folder() / SECONDS
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def main(names: Sequence[str]) -> None:
    """Judge the models that are named, or all, and take the results in."""
    chosen = [stage for stage in STAGES if stage.model in (names or MODELS)]
    for stage in chosen:
        fetch(stage.model)
        folder().mkdir(parents=True, exist_ok=True)
        print(f"{stage.folder}: {len(stage.names())} experiments", file=sys.stderr)
        run(stage)
    gallery.take_in(folder(), {stage.folder: stage.model for stage in STAGES}, took())


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit("stopped: rerun to go on")
