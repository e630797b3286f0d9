"""`theodolite explore` as its users meet it: a page on this machine only, refusals in one line, a clean end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from tests import checkpoints
from tests.calls import call
from theodolite.corpus.corpus import Corpus
from theodolite.passes.survey import spectra, survey

pytest.importorskip("gradio")


@pytest.mark.slow
def test_it_serves_this_machine_alone_and_ends_with_ctrl_c(sharp_folder, tmp_path):
    command = [sys.executable, "-u", "-m", "theodolite", "explore", "--no-browser", sharp_folder]
    process = subprocess.Popen(
        [*command, "--contexts", "4", "--length", "64"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"GRADIO_ANALYTICS_ENABLED": "True", "TMPDIR": str(tmp_path)},
    )
    try:
        line = process.stdout.readline()
        found = re.match(r"Explorer: (http://127\.0\.0\.1:(\d+)) \(Ctrl-C ends it\)", line)
        assert found, line + process.stderr.read()
        assert urllib.request.urlopen(found[1], timeout=120).status == 200
        with socket.socket() as other:  # another address of this machine
            other.settimeout(2)
            assert other.connect_ex(("127.0.0.2", int(found[2]))) != 0
        (folder,) = tmp_path.glob("theodolite-explore-*")
        (folder / "left").write_text("behind")
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0
    assert "Traceback" not in stderr
    assert not list(tmp_path.iterdir())


def test_a_port_that_is_taken_and_a_page_without_gradio(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, _, stderr = call("explore", "--no-browser", "--port", port)
    assert status == 2
    assert f"port {port} cannot be used" in stderr
    assert call("explore", "--no-browser", "--port", 70000)[0] == 2
    monkeypatch.setitem(sys.modules, "gradio", None)
    status, _, stderr = call("explore")
    assert status == 2
    assert (
        stderr
        == "error: the page needs gradio: pip install '.[explore]' in the folder of theodolite's source\n"
    )


def test_runs_and_models_that_do_not_fit(checkpoint, opened, tmp_path):
    gpt2 = opened("gpt2")
    survey(gpt2, Corpus.random_tokens(gpt2.tokenizer, 16, 4, 0), tmp_path / "run")
    spectra(gpt2, tmp_path / "spectra")
    folder, llama = checkpoint("gpt2"), checkpoint("llama3")
    for arguments, said in (
        ((folder, llama, "--run", tmp_path / "run"), "1 --run for 2 models: give one per model"),
        ((llama, "--run", tmp_path / "run"), "the run is of another model"),
        ((folder, "--run", tmp_path / "spectra"), "spectra only and no positional basis"),
        (("embedded", folder), "layers"),
        ((checkpoints.write("vit", tmp_path / "vit"),), "reads pixel_values, not text"),
    ):
        status, stdout, stderr = call("explore", "--no-browser", *arguments)
        assert status == 2, (arguments, stdout, stderr)
        assert said in stderr
        assert stderr.count("error: ") == 1
        assert "Explorer:" not in stdout
