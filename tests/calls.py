"""The command line, called in this process."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from theodolite.cli.app import app


def call(*words: object) -> tuple[int, str, str]:
    """The exit status of a command, what it printed, and its errors."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    return result.exit_code, result.stdout, result.stderr


def one_error(stderr: str) -> str:
    """The line that says what went wrong: there is one, and it was foreseen."""
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, stderr
    assert "Traceback" not in stderr
    assert "--debug" not in stderr, "was not foreseen"
    return errors[0]


def same_bytes(whole: Path, parts: Path) -> None:
    """Two run folders are the same, but for run.json, which says how long it took."""
    files = list(whole.glob("[!r]*.*"))
    assert len(files) >= 3
    for path in files:
        assert path.read_bytes() == (parts / path.name).read_bytes(), path.name
