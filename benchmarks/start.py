"""Seconds until the commands answer, and a survey of the embedded model ends: on an otherwise idle machine.

`theodolite explore` opens SmolLM2, where `make real-models` has fetched it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.timing import Ratio, in_turns
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
    with tempfile.TemporaryDirectory() as folder:
        survey = [COMMAND, "survey", "--out", f"{folder}/run"]

        def surveyed() -> None:
            shutil.rmtree(f"{folder}/run", ignore_errors=True)
            subprocess.run(survey, check=True, capture_output=True)

        times = in_turns({"survey": surveyed}, SURVEY_ROUNDS)
    yield Ratio.of("theodolite survey: seconds", [each.wall for each in times["survey"]], 12)
    smollm2 = real_model("smollm2")
    if smollm2 is not None:
        seconds = [first_answer(smollm2) for _ in range(1 + SURVEY_ROUNDS)][1:]
        yield Ratio.of("theodolite explore: seconds to the first answered prompt", seconds, 15)


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
