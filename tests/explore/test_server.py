"""A served page, asked as other pages and programs would ask it. Oracle: statuses of HTTP."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from theodolite.errors import WorkError
from theodolite.explore.panels import Selection, measures_of
from theodolite.explore.subject import PlannedSurvey, Subject, prompt_ids
from theodolite.passes.run import Run

# The server is in this process; gradio's warnings are not ours.
pytestmark = pytest.mark.filterwarnings("ignore")
JSON = {"Content-Type": "application/json"}


@pytest.fixture
def address(serving, sharp) -> str:
    return serving(sharp)


def ask(address: str, body: bytes | None = None, **headers: str) -> tuple[int, str]:
    """Status and text of a GET, or of a POST of `body`."""
    try:
        with urllib.request.urlopen(urllib.request.Request(address, body, headers), timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def event(address: str, session: str, name: str, *values: Any) -> list[list[Any]]:
    """What the page gets, step by step, when this event is posted as its own script does."""
    config = json.loads(ask(f"{address}/config")[1])
    (which,) = [each["id"] for each in config["dependencies"] if each["api_name"] == name][:1]
    body = {"fn_index": which, "session_hash": session, "data": values, "event_data": None}
    headers = {**JSON, "Origin": address}
    assert ask(f"{address}/gradio_api/queue/join", json.dumps(body).encode(), **headers)[0] == 200
    stream = ask(f"{address}/gradio_api/queue/data?session_hash={session}")[1]
    messages = [json.loads(line.removeprefix("data: ")) for line in stream.splitlines() if line]
    assert all(each.get("success", True) for each in messages), messages
    return [each["output"]["data"] for each in messages if each["msg"] == "process_generating"]


def test_nothing_is_sent_or_fetched(address):
    status, text = ask(address)
    assert status == 200
    assert re.search(r'"analytics_enabled": ?false', text)
    assert not re.search(r'(?:src|href)="(?:https?:)?//', text)
    with urllib.request.urlopen(address) as answer:
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'self'")


@pytest.mark.parametrize("slash", ["", "/"])
def test_nothing_is_uploaded_wherever_it_comes_from(address, slash):
    body = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a"\r\n\r\nkept\r\n--x--\r\n'
    for origin in ({}, {"Origin": address}, {"Origin": "http://elsewhere.example"}):
        headers = {"Content-Type": "multipart/form-data; boundary=x", **origin}
        assert ask(f"{address}/gradio_api/upload{slash}", body, **headers)[0] in (403, 404)


def test_another_origin_or_name_is_refused_and_none_or_its_own_is_not(address):
    join = f"{address}/gradio_api/queue/join"
    for origin in ("http://elsewhere.example", "null", "http://127.0.0.1:1", "https://127.0.0.1"):
        assert ask(join, b"{}", Origin=origin, **JSON)[0] == 403
        assert ask(f"{address}/config", Origin=origin)[0] == 403
    assert ask(address, Host="elsewhere.example")[0] == 400
    for own in ({}, {"Origin": address}):
        assert ask(join, b'{"session_hash": "s"}', **own, **JSON)[0] not in (
            403,
            404,
        )  # read, and found wanting


def test_a_click_without_a_prompt_is_a_line(address):
    """As where the page was open while the server was started anew: its session has no prompt."""
    ((message, *others),) = event(address, "without", "show", None, "L0H0", "prompt:entropy", False)
    assert "no prompt has been run yet: run one first" in message
    # What was shown stays.
    assert not any(isinstance(each, str) or "value" in (each or {}) for each in others)


def test_a_survey_that_fails_is_said_and_not_waited_for(sharp):
    def make(tell: Callable[[str, int, int], None]) -> Run:
        raise RuntimeError("out of memory\nand more")

    planned = Subject("planned", sharp.model, PlannedSurvey(sharp.provenance, make))
    with pytest.raises(WorkError, match=r"the survey of planned ended: out of memory$"):
        _ = planned.run
    assert not planned.is_pending


def test_the_first_panels_need_no_survey_and_it_is_made_once(sharp):
    """Oracle: the survey that is planned."""
    from theodolite.explore.page import ON_PROMPT, WITH_TEXT

    made = []

    def make(tell: Callable[[str, int, int], None]) -> Run:
        tell("reading contexts", 3, 6)
        made.append(True)
        return sharp.run

    planned = Subject("planned", sharp.model, PlannedSurvey(sharp.provenance, make))
    at = Selection([planned], prompt_ids([planned], "the cat sat on the mat"), 0, 0)
    for draws in ON_PROMPT:
        for draw in draws:
            draw(at)
    assert not made
    assert planned.is_pending
    assert len(measures_of([planned])) == 1
    for draws in WITH_TEXT:
        for draw in draws:
            draw(at)
    assert made == [True]
    assert not planned.is_pending
    assert planned.progress == "reading contexts: 3 of 6"
    assert measures_of([planned]) == measures_of([sharp])
