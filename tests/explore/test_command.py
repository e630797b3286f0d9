"""`theodolite explore` as its users meet it: a server on this machine only, refusals in one line, a clean end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests import checkpoints
from tests.cli.test_cli import call
from theodolite.corpus.corpus import Corpus
from theodolite.models import open_model
from theodolite.passes.survey import spectra, survey

pytest.importorskip("gradio")
COMMAND = [sys.executable, "-u", "-m", "theodolite", "explore", "--no-browser"]


def _page(address: str, host: str | None = None) -> tuple[int, str, str]:
    """Status, content security policy and text of what a browser would get."""
    request = urllib.request.Request(address, headers={} if host is None else {"Host": host})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return (
                answer.status,
                answer.headers["Content-Security-Policy"],
                answer.read().decode(),
            )
    except urllib.error.HTTPError as error:
        return error.code, "", error.read().decode()


def test_it_opens_the_embedded_model_and_ends_with_ctrl_c(tmp_path):
    process = subprocess.Popen(
        [*COMMAND, "--contexts", "4", "--length", "32"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"GRADIO_ANALYTICS_ENABLED": "True"},
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        found = re.match(r"Explorer: (http://127\.0\.0\.1:(\d+)) \(Ctrl-C ends it\)", line)
        assert found, line + (process.stderr.read() if process.stderr and process.poll() is not None else "")
        address, port = found.groups()
        status, policy, text = _page(address)
        assert status == 200
        assert policy.startswith("default-src 'self'")
        assert "theodolite explore" in text
        assert re.search(r'"analytics_enabled": ?false', text)  # whatever the environment said
        assert not re.search(r'(?:src|href)="(?:https?:)?//', text)
        status, _, script = _page(f"{address}/explore/page.js")
        assert status == 200
        assert script.startswith("const THEMES")
        # Not by a name that another site could give it, and not from another machine.
        assert _page(address, "elsewhere.example")[0] == 400
        with socket.socket() as other:
            other.settimeout(2)
            assert other.connect_ex((_own_address(), int(port))) != 0
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0
    assert "Traceback" not in stderr
    assert not list(tmp_path.iterdir())  # it writes nothing


def _own_address() -> str:
    """An address of this machine that is not 127.0.0.1, where it answers to all of its own."""
    return "127.0.0.2"


def test_a_port_that_is_taken():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, _, stderr = call("explore", "--no-browser", "--port", port)
    assert status == 2
    assert f"port {port} cannot be used (Address already in use)" in stderr
    assert call("explore", "--no-browser", "--port", 70000)[0] == 2


def test_without_gradio_one_line_says_what_to_install():
    code = (
        "import sys; sys.modules['gradio'] = None\n"
        "from theodolite.cli.app import main\nsys.argv = ['theodolite', 'explore']\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: the page needs gradio: pip install 'theodolite[explore]'\n"


def test_runs_and_models_that_do_not_fit(checkpoint, opened, tmp_path):
    gpt2 = opened("gpt2")
    survey(gpt2, Corpus.random_tokens(gpt2.tokenizer, 16, 4, 0), tmp_path / "run")
    spectra(gpt2, tmp_path / "spectra")
    folder, llama = checkpoint("gpt2"), checkpoint("llama3")
    for arguments, said in (
        ((folder, llama, "--run", tmp_path / "run"), "1 --run for 2 models: give one per model"),
        ((llama, "--run", tmp_path / "run"), "the run is of another model"),
        ((folder, "--run", tmp_path / "spectra"), "spectra only and no positional basis"),
        ((folder, "--run", tmp_path / "none"), "no run at"),
        ((folder, "--run", tmp_path / "run", "--corpus", "code"), "leave out --corpus"),
        ((tmp_path / "nothing",), "no checkpoint at"),
        (("embedded", folder), "layers"),
        ((_without_tokenizer(tmp_path / "bare"),), "has no tokenizer beside its weights"),
        ((checkpoints.write("vit", tmp_path / "vit"),), "reads pixel_values, not text"),
    ):
        status, stdout, stderr = call("explore", "--no-browser", *arguments)
        assert status == 2, (arguments, stdout, stderr)
        assert said in stderr
        assert stderr.count("error: ") == 1
        assert "Explorer:" not in stdout


def _without_tokenizer(folder: Path) -> Path:
    checkpoints.build("gpt2").save_pretrained(folder)
    assert open_model(folder).tokenizer is None
    return folder
