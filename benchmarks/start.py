"""Seconds until the commands answer, and two surveys at once over one alone: on an otherwise idle machine.

Of the embedded model; `theodolite explore` opens SmolLM2, where `make real-models` has fetched it.

`python -m benchmarks.start [NAME=VALUE …] [-- MODEL --corpus FILE --contexts 16 --length 256]` times one survey and two
at once as the command line sets its threads, and under each of these settings of the environment.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.timing import Ratio, in_turns, over
from tools.real_models import real_model

ROUNDS, SURVEY_ROUNDS = 5, 3
COMMAND = str(Path(sys.executable).with_name("theodolite"))


def measure(device: str) -> Iterator[Ratio]:
    if device.startswith("cuda"):
        return
    for name, command, budget in (
        ("import theodolite", [sys.executable, "-c", "import theodolite"], 0.1),
        ("theodolite --help", [COMMAND, "--help"], 0.3),
    ):
        times = in_turns({name: lambda line=command: subprocess.check_output(line)}, ROUNDS)  # type: ignore[misc]
        yield Ratio.of(f"{name}: seconds", [each.wall for each in times[name]], budget)
    yield from of_surveys()
    smollm2 = real_model("smollm2")
    if smollm2 is not None:
        seconds = [first_answer(smollm2) for _ in range(1 + SURVEY_ROUNDS)][1:]
        yield Ratio.of("theodolite explore: seconds to the first answered prompt", seconds, 15)


def of_surveys(arguments: Sequence[str] = (), settings: Mapping[str, str] | None = None) -> Iterator[Ratio]:
    """Time one survey, and two at once until both are done."""

    def run(count: int) -> Callable[[], None]:
        return lambda: surveys(count, arguments, settings or {})

    times = in_turns({"one": run(1), "two": run(2)}, SURVEY_ROUNDS)
    alone = None if arguments else 12
    yield Ratio.of("theodolite survey: seconds", [each.wall for each in times["one"]], alone)
    yield Ratio.of("two surveys at once / one alone", over(times["two"], times["one"]), 1.7)


def surveys(count: int, arguments: Sequence[str], settings: Mapping[str, str]) -> None:
    """Run so many surveys at once."""
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [COMMAND, "survey", *arguments, "--out", f"{folder}/{number}"],
                env=os.environ | settings,
                **quiet,
            )
            for number in range(count)
        ]
        if any([process.wait() for process in processes]):
            raise RuntimeError("a survey failed")


def first_answer(model: Path) -> float:
    """Explore a model, and return the seconds until the page shows the first panels of a prompt.

    It is asked for them as the page's own script does.
    """
    command = [COMMAND, "explore", str(model), "--no-browser"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    started = time.monotonic()
    with subprocess.Popen(command, env=os.environ | {"PYTHONUNBUFFERED": "1"}, **pipes) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split()[1]
            dependencies = json.loads(_read(f"{address}/config"))["dependencies"]
            load = next(each["id"] for each in dependencies if each["api_name"] == "load")
            values = ["The cat sat on the mat.", "L0H0", "prompt:entropy", False]
            body = {"fn_index": load, "session_hash": "first", "data": values, "event_data": None}
            _read(f"{address}/gradio_api/queue/join", json.dumps(body).encode())
            with urllib.request.urlopen(f"{address}/gradio_api/queue/data?session_hash=first") as answers:
                if not any(b"process_generating" in line and b"plotly" in line for line in answers):
                    raise RuntimeError("the prompt was not answered")
            return time.monotonic() - started
        finally:
            process.send_signal(signal.SIGINT)


def _read(address: str, body: bytes | None = None) -> str:
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return str(answer.read().decode())


def main(words: Sequence[str]) -> None:
    """Print the times of one survey and of two, under each setting."""
    settings, arguments = words, list[str]()
    if "--" in words:
        settings, arguments = words[: words.index("--")], [*words[words.index("--") + 1 :]]
    for setting in ("", *settings):
        print(f"\n{setting or 'as the command sets it'}", flush=True)
        for ratio in of_surveys(arguments, dict([setting.split("=")]) if setting else None):
            print(ratio, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
