"""README and docs: what they show runs and prints what they say, what they name exists, nothing generated is stale."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from pathlib import Path

import pytest
import typer

from tests.processes import Started
from tests.referee import answers_of
from theodolite import __version__, open_model, survey
from theodolite.cli.app import app
from theodolite.corpus.corpus import Corpus
from theodolite.judging import Criterion, Estimate
from theodolite.papers import ALIASES, EXPERIMENTS, reproduce, write_outcome
from theodolite.papers.experiment import of_nothing
from theodolite.report.outcome import Outcome
from theodolite.report.outcome_page import RESULT
from tools import commands, families, gallery, outputs, paper_readmes, trust

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
READMES = {group: paper_readmes.place(group) for group in gallery.GROUPS}
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *READMES.values()])
SHOWN = {code: output for _, code, output in outputs.shown_blocks()}


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


FIRST = {ROOT / "README.md", DOCS / "start.md"}
"""Pages whose blocks are in the fast run."""
PYTHON = [
    pytest.param(block, id=f"{_name(page)}-{number}", marks=[] if page in FIRST else pytest.mark.slow)
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]
COMMANDS = sorted(
    {
        (_name(page), found.strip())
        for page in PAGES
        for fence in re.findall(r"```(?:bash|sh|console|)\n(.*?)```", page.read_text(), re.DOTALL)
        for found in re.findall(r"(?:^|do |\$ )(theodolite [^\n;>]*)", fence, re.MULTILINE)
    }
)


def _run(block: str, folder: Path) -> None:
    os.chdir(folder)
    exec(compile(block, "<block>", "exec"), {"__name__": "__main__"})


def _made(work, *args, folder: Path) -> str:
    """Run something in a process of its own, and return what it printed."""
    status, printed, errors = Started(work, *args, folder=folder).end()
    assert status == 0, errors
    return printed


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The run folders that the pages tell their readers to make."""
    place = tmp_path_factory.mktemp("runs")
    _made(outputs.make_runs, place, folder=place)
    return place


@pytest.fixture
def place(request, tmp_path):
    """A folder to run a block in, with those run folders where it reads one."""
    block = request.getfixturevalue("block")
    if "runs/first" in block:
        (tmp_path / "runs").mkdir()
        for name in (outputs.FIRST, outputs.SINKS):
            (tmp_path / name).symlink_to(request.getfixturevalue("runs") / name)
    return tmp_path


@pytest.mark.parametrize("block", PYTHON)
def test_python_blocks_run_and_print_what_is_shown(block, place):
    printed = _made(_run, block, place, folder=place)
    if block in SHOWN:
        _same_output(printed, SHOWN[block])


def _same_output(printed: str, shown: str) -> None:
    """The same words; numbers up to what another release of Python's own documentation changes."""
    number = r"-?\d+\.?\d*"
    got, expected = ([float(n) for n in re.findall(number, text)] for text in (printed, shown))
    assert re.sub(number, "#", printed).split() == re.sub(number, "#", shown).split()
    assert got == pytest.approx(expected, rel=0.05, abs=0.02)


def test_there_are_blocks_to_run():
    assert len(PYTHON) > 30
    assert len(SHOWN) > 15
    assert len(COMMANDS) > 50


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_commands_are_parsed_by_the_command_line(page, line):
    """Every command, argument and option that a page shows is there; nothing is run."""
    command = typer.main.get_command(app)
    args = shlex.split(line.replace("$seed", "0"), comments=True)[1:]
    while True:
        args = ["such"] * (not args and command.name in ("report", "exclude")) + args
        context = command.make_context(command.name, list(args))
        if not hasattr(command, "resolve_command"):
            return
        rest = [*context._protected_args, *context.args]
        if not rest:
            return
        _, command, args = command.resolve_command(context, rest)


@pytest.fixture(scope="module")
def small_run():
    model = open_model()
    return survey(model, Corpus.python_docs(model.tokenizer, 32, 4))


def test_every_column_and_array_is_explained(small_run):
    run = small_run
    text = (DOCS / "run-folder.md").read_text()
    named = set(re.findall(r"`([a-z_]+[a-zK0-9_]*)`", text))
    named |= {name[:-1] + str(k) for name in named if name.endswith("_K") for k in (1, 3, 5, 10)}
    tables = (run.layers, run.heads, run.constituents, run.attribution)
    for column in [*(column for table in tables for column in table.columns), *run.arrays]:
        column = column.removesuffix("_se") if "`…_se`" in text else column
        known = column.removesuffix("_data") in named or column in named | {"layer", "head"}
        parts = column.rsplit("_", 1)
        assert known or (f"_{parts[-1]}" in named and any(n.startswith(parts[0]) for n in named)), column


def test_every_measure_has_a_page(small_run):
    pages = "".join(page.read_text() for page in (DOCS / "measurements").glob("*.md"))
    named = set(re.findall(r"`([a-z_]+[a-zK0-9_]*)`", pages))
    columns = {
        re.sub(r"_(?:1|3|5|10)$", "_K", column.removesuffix("_se").removesuffix("_data"))
        for table in (small_run.layers, small_run.heads)
        for column in table.columns
    }
    assert columns - named - {"layer", "head"} == set()


def test_every_page_can_be_reached_from_the_contents():
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    listed = set(re.findall(r"([\w/-]+\.md)$", navigation, re.MULTILINE))
    assert {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")} <= listed


@pytest.mark.parametrize(
    "command", [found for found, _, _ in commands.commands()], ids=lambda found: found.name
)
def test_every_command_has_an_example_that_is_parsed(command):
    shown = commands.example(command)
    assert shown is not None
    test_commands_are_parsed_by_the_command_line("commands.md", shown)


def test_the_page_of_commands_has_what_help_says():
    """Oracle: what the command line itself prints."""
    page = commands.page()
    for command, context, level in commands.commands():
        _, found, section = page.partition(f"\n{'#' * level} {context.command_path}\n")
        assert found, context.command_path
        section = re.split(r"\n##", section)[0]
        options = re.findall(r"^  (?:-\w, )?(--[\w-]+)", command.get_help(context), re.MULTILINE)
        assert options, "the help of a command names --help at least"
        rows = re.findall(r"^\| `([^`]+)` \| .+ \|$", section, re.MULTILINE)
        written = {name for row in rows for name in re.findall(r"--[\w-]+", row)}
        assert set(options) - {"--help"} <= written, context.command_path
    seed = re.search(r"^\| `--seed [^`]*` \| Random seed\. \| 0 \|$", page, re.MULTILINE)
    assert seed
    assert "theodolite\\[ray\\]" in page


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if "://" not in target and (page.parent / target) != DOCS / "commands.md":  # made with the site
            assert (page.parent / target).exists(), target


def test_nothing_is_listed_twice_in_the_reference():
    listed = re.findall(r"^::: (\S+)", (DOCS / "reference.md").read_text(), re.MULTILINE)
    assert sorted(set(listed)) == sorted(listed)


def test_the_table_of_families_is_what_the_tests_hold():
    assert families.page() == families.PAGE.read_text(), "run python -m tools.families"


def test_the_gallery_is_what_the_committed_results_say():
    for path, page in gallery.pages(gallery.results(), gallery.pictures()).items():
        assert page == path.read_text(), "run python -m tools.gallery"


@pytest.mark.parametrize("name", sorted(gallery.results()))
def test_verdicts_of_the_gallery_follow_from_its_numbers(name):
    """Oracle: `tests/referee.py`. What is not testable needs none."""
    result = gallery.results()[name]
    given = [verdict["answer"] for verdict in result["verdicts"]]
    numbers = [
        {
            key: math.nan if value is None and key in ("value", "error") else value
            for key, value in row.items()
        }
        for row in result["judged"]
    ]
    assert answers_of(numbers) == given if numbers else {*given} <= {"not testable here"}


def test_of_a_model_that_does_not_add_the_gallery_judges_nothing_about_addition():
    """What one page says of a model, the others of the same model go by."""
    results = gallery.results()
    adds = {
        result["provenance"]["model"]["id"]
        for result in results.values()
        if any("Addition is learned" in v["claim"] and v["answer"] != "fails" for v in result["verdicts"])
    }
    for name, result in results.items():
        for verdict in result["verdicts"]:
            if "model trained on addition" in verdict["claim"] and verdict["answer"] != "not testable here":
                assert result["provenance"]["model"]["id"] in adds, name


def test_every_experiment_is_in_the_gallery():
    pages = {group: gallery.page_of(group).read_text() for group in gallery.GROUPS}
    text = "".join(pages.values())
    entries = dict(re.findall(r"^## (\S+)\n(.*?)(?=^##? |\Z)", text, re.MULTILINE | re.DOTALL))
    for group, page in pages.items():
        assert f"({gallery.page_of(group).name})" in gallery.INDEX.read_text()
        assert {name.split("/")[0] for name in re.findall(r"^## (\S+)$", page, re.MULTILINE)} == {group}
    for name in gallery.names():
        entry = entries[name]
        shown = f"images/gallery/{name.replace('/', '-')}." in entry and 'class="verdict' in entry
        assert shown or "not made here" in entry or "No claim is judged" in entry, name
        assert f"theodolite reproduce {name}" in entry, name
    assert {name for name in EXPERIMENTS if name.endswith("/claims")} | set(gallery.names()) == set(
        EXPERIMENTS
    )
    pictures = sorted(gallery.PICTURES.iterdir())
    assert {picture.name for picture in pictures} == set(re.findall(r"images/gallery/([\w.-]+)\)", text))
    assert sum(path.stat().st_size for path in (DOCS / "images").rglob("*.*")) < 3_000_000


def _rows(text: str, columns: int) -> list[list[str]]:
    """The rows of the tables of a page that have so many columns and a name of code or of an experiment first."""
    lines = [line.strip("|") for line in text.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)] for line in lines]
    return [row for row in rows if len(row) == columns and "/" in row[0]]


@pytest.mark.parametrize("group", gallery.GROUPS)
def test_the_readme_of_a_paper_has_what_is_declared_and_what_the_gallery_answers(group):
    text = READMES[group].read_text()
    assert paper_readmes.readme(group, gallery.results()) == text, "run python -m tools.paper_readmes"
    rows = _rows(text, len(paper_readmes.COLUMNS))
    assert [row[0] for row in rows] == paper_readmes.names(group)


def _judged(name: str) -> Outcome:
    """An experiment that needs no model, with three verdicts of ours: figures of theory have none."""
    outcome = reproduce(name)
    outcome.claim("One is at most two", "one", Estimate.exact(1.0), Criterion("at most", 2.0, "arithmetic"))
    outcome.claim(
        "Three is at most two", "three", Estimate.exact(3.0), Criterion("at most", 2.0, "arithmetic")
    )
    outcome.cannot_test("Four is even", "not counted")
    return outcome


def test_the_verdicts_of_a_readme_are_counted_from_results(tmp_path):
    name = "localization/figure4"
    outcome = _judged(name)
    write_outcome(EXPERIMENTS[name], outcome, of_nothing(), tmp_path / "reproduce")
    result, _ = gallery.new_results([tmp_path])[name]
    counts = paper_readmes.verdicts(name, {name: gallery.kept(result)})
    assert sum(map(int, re.findall(r"\d+", counts))) == len(outcome.verdicts) > 2
    assert counts == "holds 1, fails 1, not testable here 1"


def test_the_table_of_names_is_that_of_the_declarations():
    """Every experiment and every figure published elsewhere has a row, with whether it needs a model."""
    named = []
    for name, shows, needs in _rows((DOCS / "experiments.md").read_text(), 3):
        group = name.strip("`").split("/")[0]
        of_row: list[str] = []
        found = re.findall(r"`(?:\w+/)?([a-z_]*)(\d*)`(?: to `[a-z]+(\d+)`)?", f"{name} {shows}")
        for prefix, first, last in found:
            numbers = range(int(first), int(last or first) + 1) if first else [""]
            of_row += [f"{group}/{prefix or 'figure'}{number}" for number in numbers]
        named += of_row
        first_name = of_row[0]
        assert ("the model" in needs) == ("model" in EXPERIMENTS[first_name].needs), first_name
        assert ("nothing" in needs) == ("nothing" in EXPERIMENTS[first_name].needs), first_name
    assert set(named) == {*EXPERIMENTS, *ALIASES}


def test_the_gallery_is_made_from_run_folders(tmp_path):
    name = "localization/figure4"
    outcome = _judged(name)
    page = write_outcome(EXPERIMENTS[name], outcome, of_nothing(), tmp_path / "runs" / "reproduce")
    found = gallery.new_results([tmp_path / "runs"])
    assert found[name][1] == page.parent
    assert (page.parent / RESULT).is_file()
    taken = {name: gallery.kept(result) for name, (result, _) in found.items()}
    pages = gallery.pages(taken, {"localization-figure4": "picture.svg"})
    assert set(pages) == {gallery.INDEX, *map(gallery.page_of, gallery.GROUPS)}
    made = "".join(pages.values())
    entry = pages[gallery.page_of("localization")].split(f"## {name}\n")[1].split("\n## ")[0]
    assert "images/gallery/picture.svg" in entry
    for verdict in outcome.verdicts:
        assert f">{verdict.answer}</span> {gallery._plain(verdict.claim)}" in entry
    for other in gallery.names():
        assert f"\n## {other}\n" in made


def test_the_page_of_promises_has_the_counts_of_the_chaos_suite():
    text = trust.PAGE.read_text()
    assert trust.page(text, json.loads(trust.RESULT.read_text())) == text, "run python -m tools.trust"


def test_the_page_of_errors_is_the_one_that_the_command_line_points_to():
    assert (DOCS / "errors.md").read_text() == (ROOT / "theodolite" / "assets" / "errors.md").read_text()


def test_the_citation_is_of_this_version():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == __version__
    assert {"message", "title", "authors", "license"} <= set(citation)
    assert len(citation["references"]) == 3
    for reference in citation["references"]:
        assert {"type", "title", "authors", "year"} <= set(reference)
        assert reference["title"].split(":")[0].lower()[:30] in (
            DOCS / "citing.md"
        ).read_text().lower().replace("\n  ", " ")
    assert f"version = {{{__version__}}}" in (DOCS / "citing.md").read_text()


@pytest.mark.parametrize("folder", ["theodolite", "docs"])
def test_no_page_names_what_only_its_makers_read(folder):
    """Oracle: the names of the notes that do not come with the package."""
    texts = [path for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".md", ".html", ".js"}]
    assert texts
    names = re.compile(r"\b(MATH|DESIGN|STYLE|WORDS)(\.md\b|, section)|\bMATH:")
    assert not [path.name for path in texts if names.search(path.read_text(encoding="utf-8"))]
