"""Commands of other packages, made here: found by their entry points, and by themselves when they are broken."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MODULE = """
import typer

from theodolite.cli.screen import one_line_errors
from theodolite.errors import UsageError

group = typer.Typer(help="Say things.")


def hello(name: str, loudly: bool = False) -> None:
    \"\"\"Greet somebody.\"\"\"
    with one_line_errors():
        if not name:
            raise UsageError("give a name")
        print(f"hello {name.upper() if loudly else name}")


group.command("again")(hello)
group.command("twice")(hello)
"""
ENTRIES = """
[theodolite.commands]
hello = hello_theodolite:hello
greetings = hello_theodolite:group
lost = no_such_module:hello
survey = hello_theodolite:hello
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A package as pip installs it: its module, and what its metadata says."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "hello_theodolite.py").write_text(MODULE)
    info = folder / "hello_theodolite-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hello-theodolite\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    return folder


def _run(package: Path, *words: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "theodolite", *words]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths})


def test_commands_of_another_package(package):
    """Oracle: the functions of the package, and of a name that is taken the command that was there."""
    assert _run(package, "hello", "you", "--loudly").stdout == "hello YOU\n"
    assert _run(package, "greetings", "again", "you").stdout == "hello you\n"
    refused = _run(package, "hello", "")
    assert (refused.returncode, refused.stderr) == (2, "error: give a name\n")
    assert "tables, arrays and a report" in _run(package, "survey", "--help").stdout


def test_a_command_that_cannot_be_loaded_leaves_the_others(package):
    lost = _run(package, "lost")
    assert lost.returncode == 2
    assert lost.stderr.splitlines() == [
        "error: hello-theodolite: the command 'lost' cannot be loaded (ModuleNotFoundError: No module named "
        "'no_such_module')"
    ]
    listed = _run(package, "--help")
    assert listed.returncode == 0
    assert {"hello", "greetings", "lost", "survey", "reproduce", "train"} <= set(listed.stdout.split())
