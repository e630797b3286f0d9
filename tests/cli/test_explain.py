"""The page of errors: what it quotes is said by the package, and what the package says leads to it."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

import theodolite
from tests.calls import call
from theodolite.cli.screen import section_of, sections

PACKAGE = Path(theodolite.__file__).parent


@functools.cache
def said_by_the_package() -> list[str]:
    """Every text in the package's code, with a hole where a formatted one has a value."""
    found = []
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "\0" for p in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


@pytest.mark.parametrize("name", sections())
def test_what_a_section_quotes_is_said_somewhere(name: str) -> None:
    texts = said_by_the_package()
    for quoted in sections()[name].quoted:
        assert any(quoted in text for text in texts), quoted


def test_there_are_messages_that_are_explained() -> None:
    assert sum(len(section.quoted) for section in sections().values()) > 30


def test_a_refusal_leads_to_its_explanation(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a word")
    error, more = call("survey", "--corpus", tmp_path / "short.txt")[2].splitlines()
    assert error.startswith("error: ")
    assert more == "more:  theodolite explain text-too-short"
    assert section_of(error) is sections()["text-too-short"]
    for asked in ("text-too-short", "Short", error):
        status, stdout, _ = call("explain", asked)
        assert status == 0
        assert "Text too short" in stdout
        assert re.search(r"smaller\s+--length", re.sub(r"[│┃]", " ", stdout))


def test_the_list_and_what_is_not_in_it() -> None:
    assert call("explain")[1].split() == list(sections())
    status, _, stderr = call("explain", "love")
    assert (status, "nothing explains 'love': give one of families" in stderr) == (2, True)
