"""Every measured number in the prose has a source, and is what a committed result says where there is one."""

from __future__ import annotations

import json

import pytest

from tools import numbers

DEBT = 108
"""Numbers in the prose that only the page has: the run was not kept. `python -m tools.numbers` says of which runs."""


def test_every_number_has_a_source_that_has_it(capsys):
    assert not (wrong := numbers.problems()), "\n".join(wrong)
    with capsys.disabled():
        print("", *(f"{count:4} {kind}" for kind, count in sorted(numbers.count().items())), sep="\n")


def test_the_debt_does_not_grow():
    assert sum(count for kind, count in numbers.count().items() if kind.startswith("recorded only")) == DEBT


def test_every_named_source_is_used_and_says_how_it_was_made():
    used = {source for entries in numbers.prose().values() for runs in entries.values() for source, _ in runs}
    recorded = numbers.named("recorded")
    files = {path.stem for path in numbers.RESULTS.glob("*.json") if "values" in json.loads(path.read_text())}
    assert used >= {*recorded, *numbers.named("not-measured"), *files}
    assert all({"command", "seed", "recorded"} == set(run) for run in recorded.values())
    for name in files:
        assert {"command", "seed", "date", "versions", "made of", "values"} == set(numbers.named(name))


@pytest.mark.parametrize(
    ("printed", "known", "answer"),
    [
        ("0.90", 0.8951, True),
        ("0.90", 0.8949, False),
        ("0.90", "0.9", False),  # the source has fewer digits
        ("71 %", "0.708", True),
        ("71 %", "0.7", False),
        ("71", "71 %", False),
        ("2.5 %", "−0.0253", True),  # “lower by 2.5 %”
        ("−0.15", "−0.151", True),
        ("−0.15", "0.151", False),
        ("0.9·10⁻⁴", "9.07·10⁻⁵", True),
        ("0.9·10⁻⁴", "9.57·10⁻⁵", False),
        ("1,805", 1804.6, True),
        ("8.03e+11", 8.034e11, True),
    ],
)
def test_a_number_agrees_at_the_precision_that_it_is_printed_with(printed, known, answer):
    assert numbers.agrees(printed, [known]) == answer


@pytest.mark.parametrize(
    ("unit", "found"),
    [
        ("It has 6 layers and 4 heads, from step 300 on, with Python 3.11 and torch 2.13.0.", []),
        (
            "- The share is 0.16 at step 0, 12 % in L4H1, and 1.7·10⁻⁵ in `0.5` of them.",
            ["0.16", "12 %", "1.7·10⁻⁵"],
        ),
        ("It lost 8 ± 2 points, or 2.5 ± 0.9 %.", ["8 %", "2 %", "2.5 %", "0.9 %"]),
        (
            "A head in 3 of 8 models, from −0.4 to 12, has 0.98–1.00, 2 times as much.",
            ["3", "8", "−0.4", "12", "0.98", "1.00", "2"],
        ),
        (r"| mean \|cosine\| of 5 heads | 46 | 93 % |", ["46", "93 %"]),
    ],
)
def test_measured_numbers_are_told_from_others(unit, found):
    assert numbers.measured(numbers._NOT_PROSE.sub("", unit)) == found


def test_a_changed_number_is_found(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("# Title\n\nThe share is 0.896 here.\n")
    monkeypatch.setattr(numbers, "ROOT", tmp_path)
    monkeypatch.setattr(numbers, "PAGES", ["page.md"])
    listed = {"page.md": {"Title: The share is here": [["there", "0.896"]]}}
    monkeypatch.setattr(numbers, "prose", lambda: listed)
    monkeypatch.setattr(numbers, "committed", {"there": ["0.8964"]}.get)
    assert not numbers.problems()
    page.write_text("# Title\n\nThe share is 0.897 here.\n")
    assert "not as listed" in numbers.problems()[0]
    listed["page.md"]["Title: The share is here"] = [["there", "0.897"]]
    assert numbers.problems() == ["page.md: Title: The share is here: there has no 0.897"]
    page.write_text("# Title\n\nNothing.\n")
    assert numbers.problems() == ["page.md: listed, but not there: Title: The share is here"]
