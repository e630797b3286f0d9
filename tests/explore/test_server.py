"""A live server on this machine, asked as other pages and programs would ask it. Oracle: statuses and files on disk."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from theodolite.errors import UsageError
from theodolite.explore.subject import MOST_CHARACTERS, prompt_ids

pytest.importorskip("gradio")

COMMAND = [sys.executable, "-u", "-m", "theodolite", "explore", "--no-browser"]
BOUNDARY = "xyz"
FILE = (
    f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\nkept\r\n--{BOUNDARY}--\r\n'
).encode()


@dataclass(frozen=True)
class Server:
    """A running command, the address of its page, and where its temporary files go."""

    process: subprocess.Popen[str]
    address: str
    temporary: Path


def start(model: Path, temporary: Path) -> Server:
    process = subprocess.Popen(
        [*COMMAND, str(model), "--contexts", "4", "--length", "64"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(temporary)},
    )
    assert process.stdout is not None
    found = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
    assert found, process.communicate()[1]
    return Server(process, found[0], temporary)


@pytest.fixture(scope="module")
def server(sharp_folder, tmp_path_factory) -> Iterator[Server]:
    running = start(sharp_folder, tmp_path_factory.mktemp("temporary"))
    yield running
    running.process.kill()
    running.process.communicate()


@pytest.fixture
def address(server) -> str:
    return server.address


def ask(address: str, body: bytes | None = None, **headers: str) -> tuple[int, str]:
    """Status and text of a GET, or of a POST of `body`."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        with urllib.request.urlopen(urllib.request.Request(address, body, named), timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


class Session:
    """What the page's own script does: an event is posted, and its answer streamed."""

    def __init__(self, address: str, name: str) -> None:
        self.address, self.name = address, name
        self.config = json.loads(ask(f"{address}/config")[1])

    def event(self, *values: Any, of: str) -> list[Any]:
        """The outputs of the event that this component triggers first."""
        component = next(c["id"] for c in self.config["components"] if c["props"].get("elem_id") == of)
        event = next(
            d for d in self.config["dependencies"] if d["targets"] and d["targets"][0][0] == component
        )
        body = {"fn_index": event["id"], "session_hash": self.name, "data": values, "event_data": None}
        status, text = ask(
            f"{self.address}/gradio_api/queue/join",
            json.dumps(body).encode(),
            Content_Type="application/json",
            Origin=self.address,
        )
        assert status == 200, text
        _, stream = ask(f"{self.address}/gradio_api/queue/data?session_hash={self.name}")
        messages = [json.loads(line.removeprefix("data: ")) for line in stream.splitlines() if line]
        (done,) = [each for each in messages if each["msg"] == "process_completed"]
        assert done["success"], done
        return done["output"]["data"]


@pytest.mark.parametrize("slash", ["", "/"])
def test_nothing_is_uploaded_wherever_it_comes_from(server, address, slash):
    kind = {"Content_Type": f"multipart/form-data; boundary={BOUNDARY}"}
    for headers in ({}, {"Origin": address}, {"Origin": "http://elsewhere.example"}):
        assert ask(f"{address}/gradio_api/upload{slash}", FILE, **headers, **kind)[0] in (403, 404)
    assert not [path for path in server.temporary.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    "origin", ["http://elsewhere.example", "null", "http://127.0.0.1:1", "https://127.0.0.1"]
)
def test_another_origin_is_refused_and_none_or_its_own_is_not(address, origin):
    body, kind = b'{"session_hash": "s"}', {"Content_Type": "application/json"}
    join = f"{address}/gradio_api/queue/join"
    assert ask(join, body, Origin=origin, **kind)[0] == 403
    assert ask(f"{address}/config", Origin=origin)[0] == 403
    for own in ({}, {"Origin": address}):
        assert ask(join, body, **own, **kind)[0] not in (403, 404)  # it is read, and found wanting


def test_what_the_page_does_not_need_is_not_served(address):
    for path in ("docs", "redoc", "openapi.json", "gradio_api/openapi.json", "gradio_api/openapi.json/"):
        assert ask(f"{address}/{path}")[0] == 404, path
    for path in ("gradio_api/run/predict", "gradio_api/call/read", "login", "gradio_api/vibe-code"):
        assert ask(f"{address}/{path}", b"{}", Content_Type="application/json")[0] == 404, path
    assert ask(address)[0] == 200


def test_a_prompt_is_run_and_a_click_without_one_is_a_line(address):
    prompt = "the cat sat on the mat"
    controls = [None, "L0H0", "prompt:entropy", False, False, 1]
    message, *panels = Session(address, "with").event(prompt, *controls, of="run")
    assert message == ""
    assert all(isinstance(panel, str) for panel in panels[-6:])
    # The page was open while the server was started anew: its session has no prompt.
    message, *panels = Session(address, "without").event(*controls, of="head")
    assert "no prompt has been run yet: run one first" in message
    assert not any(isinstance(panel, str) for panel in panels)  # what was shown stays


def test_a_prompt_that_is_far_too_long_is_refused_before_it_is_tokenized(sharp, monkeypatch):
    monkeypatch.setattr("theodolite.explore.subject._ids", lambda *_: pytest.fail("it was tokenized"))
    with pytest.raises(
        UsageError, match=rf"the prompt is 10,000,000 characters long: at most {MOST_CHARACTERS:,}"
    ):
        prompt_ids([sharp], "ab cd" * 2_000_000)


def test_it_ends_without_a_traceback_and_leaves_nothing(server):
    """The last test of this server: what was asked of it before is in its words and files."""
    (folder,) = server.temporary.iterdir()
    (folder / "left").write_text("behind")
    server.process.send_signal(signal.SIGINT)
    _, stderr = server.process.communicate(timeout=120)
    assert server.process.returncode == 0
    assert "Traceback" not in stderr
    assert not list(server.temporary.iterdir())
