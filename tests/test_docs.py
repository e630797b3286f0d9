"""README and docs: what they show runs and prints what they say, and what they name exists."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.processes import Started
from tests.referee import answers_of
from theodolite import Corpus, Run, __version__, open_model, survey, trace_sinks
from theodolite.cli.app import app
from theodolite.corpus.documents import READERS
from theodolite.corpus.spec import KEYWORDS
from theodolite.estimates import Estimate
from theodolite.judging import Criterion, judge, untestable
from theodolite.passes.run import TABLES
from theodolite.report.outcome import write_outcome
from theodolite_papers import ALIASES, EXPERIMENTS, reproduce
from theodolite_papers.declarations import declarations
from theodolite_papers.experiment import of_nothing
from tools import gallery, site_pages

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md"), ROOT / "theodolite" / "assets" / "errors.md"])
FIRST = {ROOT / "README.md", DOCS / "start.md"}
"""Pages whose blocks are in the fast run."""
_BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)
"""A block of Python, and what the page says that it prints."""


_FENCE = re.compile(r"```(bash|sh|python)\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)
REAL = "SmolLM2-135M-Instruct.Q4_1.gguf"
"""The model of the blocks that are run where the real models are."""


def _is_real(block: str) -> bool:
    return REAL in block or "runs/smollm2" in block


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def _blocks(page: Path) -> list[tuple[str, str]]:
    found = _BLOCK.findall(page.read_text(encoding="utf-8"))
    return [(code, shown) for code, shown in found if not _is_real(code)]


def _run_page(page: Path, folder: Path) -> None:
    """Each block by itself, in the order of the page; what they print goes to a file."""
    os.chdir(folder)
    printed = []
    for code, _ in _blocks(page):
        with contextlib.redirect_stdout(io.StringIO()) as caught:
            exec(compile(code, f"<{page.name}>", "exec"), {"__name__": "__main__"})
        printed.append(caught.getvalue())
        if accelerate := sys.modules.get(
            "accelerate.state"
        ):  # it keeps the precision of a process's first Trainer
            accelerate.AcceleratorState._reset_state(reset_partial_state=True)
    Path("printed.json").write_text(json.dumps(printed))


def _make_runs(folder: Path) -> None:
    """The run folders that docs/start.md tells its readers to make."""
    model = open_model()
    corpus = Corpus.python_docs(model.tokenizer, 128, 64)
    survey(model, corpus, folder / "first")
    trace_sinks(model, corpus, folder / "first-sinks")


def _in_process(work, *args, folder: Path) -> None:
    status, _, errors = Started(work, *args, folder=folder).end(seconds=600)
    assert status == 0, errors


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    _in_process(_make_runs, folder, folder=folder)
    return folder


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=_name(page), marks=[] if page in FIRST else pytest.mark.slow)
        for page in PAGES
        if _blocks(page)
    ],
)
def test_blocks_of_python_run_and_print_what_is_shown(page, request, tmp_path):
    if "runs/first" in "".join(code for code, _ in _blocks(page)):
        (tmp_path / "runs").mkdir()
        for run in request.getfixturevalue("runs").glob("first*"):
            (tmp_path / "runs" / run.name).symlink_to(run)
    _in_process(_run_page, page, tmp_path, folder=tmp_path)
    printed = json.loads((tmp_path / "printed.json").read_text())
    for (_, shown), got in zip(_blocks(page), printed, strict=True):
        if shown:
            _same_output(got, shown)


@pytest.mark.real
@pytest.mark.parametrize("page", [page for page in PAGES if _is_real(page.read_text())], ids=_name)
def test_what_is_shown_of_smollm2_is_what_it_does(page, real, tmp_path):
    """Commands and blocks in their order, in one folder; progress goes elsewhere."""
    (tmp_path / REAL).symlink_to(real("smollm2"))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for kind, block, shown in _FENCE.findall(page.read_text(encoding="utf-8")):
        if not _is_real(block):
            continue
        lines = [line for line in block.splitlines() if line.startswith("theodolite")]
        command = [sys.executable, "-c", block] if kind == "python" else ["bash", "-ec", "\n".join(lines)]
        done = subprocess.run(
            command, cwd=tmp_path, env=os.environ | {"PATH": path}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-2000:]
        if shown:
            _same_output(done.stdout, shown)


def _same_output(printed: str, shown: str) -> None:
    """The same words; numbers up to what another release of Python's own documentation changes."""
    number = r"-?\d+\.?\d*"
    got, expected = ([float(n) for n in re.findall(number, text)] for text in (printed, shown))
    assert re.sub(number, "#", printed).split() == re.sub(number, "#", shown).split()
    assert got == pytest.approx(expected, rel=0.05, abs=0.02)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_commands_are_parsed_and_links_lead_somewhere(page):
    """Every command, argument and option that a page shows is there; nothing is run. Links: of files; the site's own
    are tested with the site."""
    text = page.read_text(encoding="utf-8")
    for fence in re.findall(r"```(?:bash|sh|console|)\n(.*?)```", text, re.DOTALL):
        for line in re.findall(r"(?:^|do |\$ )(theodolite [^\n;>]*)", fence, re.MULTILINE):
            _parse(line)
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if page.parent == ROOT and "://" not in target:
            assert (page.parent / target).exists(), target


def _parse(line: str) -> None:
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


def test_every_command_has_an_example_that_is_parsed():
    examples = re.findall(r"```bash\n(theodolite .*)\n```", site_pages.commands())
    groups = len(typer.main.get_command(app).commands)
    assert len(examples) >= groups
    for example in examples:
        _parse(example)


def test_every_table_is_explained_and_every_measure_has_a_place(runs):
    run = Run.load(runs / "first")
    text = (DOCS / "run-folder.md").read_text()
    marked = re.findall("<!-- table: (.*) -->", text)
    assert {name for name in TABLES if len(getattr(run, name))} <= set(marked)
    explained = "".join(map(site_pages.table, marked)) + site_pages.arrays(None)
    left_out = {f"layers.{name}.without" for name in run.layers} | {
        f"heads.{name}.without" for name in run.heads
    }
    assert {f"`{name}`" for name in set(run.arrays) - left_out} <= set(re.findall("`[^`]+`", explained))
    measures = "".join(
        (DOCS / f"{page}.md").read_text() for page in ("position", "heads", "spectrum", "sinks")
    )
    placed = measures + "".join(map(site_pages.columns, re.findall("<!-- columns: (.*) -->", measures)))
    for table in (run.layers, run.heads):
        for column in set(table.columns) - {"layer", "head"}:
            assert f"`{column.removesuffix('_se')}`" in placed, column


def test_every_kind_of_file_and_every_named_corpus_is_on_the_page_of_the_survey():
    page = (DOCS / "survey.md").read_text()
    assert [name for name in (*READERS, *KEYWORDS) if f"`{name}" not in page] == []


def test_every_page_can_be_reached_from_the_contents():
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    listed = set(re.findall(r"([\w/-]+\.md)$", navigation, re.MULTILINE))
    assert {page.name for page in DOCS.glob("*.md")} <= listed


def test_verdicts_of_the_gallery_follow_from_their_numbers():
    """Oracle: `tests/referee.py`. What is not testable needs none."""
    results = gallery.results()
    assert set(results) <= {*EXPERIMENTS, *ALIASES}
    for name, result in every_result():
        given = [verdict["answer"] for verdict in result["verdicts"]]
        numbers = [
            {
                key: math.nan if value is None and key in ("value", "error") else value
                for key, value in row.items()
            }
            for row in result["judged"]
        ]
        assert answers_of(numbers) == given if numbers else {*given} <= {"not testable here"}, name


def every_result() -> list[tuple[str, dict[str, Any]]]:
    return [(name, result) for name, of in gallery.results().items() for result in of.values()]


def test_the_gallery_has_the_declared_claims_and_no_others():
    """Oracle: the declarations. Of training runs only what theirs can judge: they may be too short for a claim."""
    of_trainings = {f"localization/figure{number}" for number in (6, *range(8, 13))}
    for name, result in every_result():
        declared = declarations()[ALIASES[name].of if name in ALIASES else name].claims.values()
        parts = (part for claim in declared for part in (claim, *claim.values()) if isinstance(part, Mapping))
        claims = [re.escape(part["claim"]) for part in parts if "claim" in part]
        patterns = [re.sub(r"\\{.*?\\}", ".*", claim) for claim in claims]
        judged = [verdict["claim"] for verdict in result["verdicts"]]
        missing = {p for p in patterns if not any(re.fullmatch(p, claim) for claim in judged)}
        assert not missing or name in of_trainings, (name, missing)
        assert all(any(re.fullmatch(p, claim) for p in patterns) for claim in judged), name


def test_every_experiment_is_in_the_gallery():
    text = "".join(gallery.pages().values())
    entries = dict(re.findall(r"^## (\S+)\n(.*?)(?=^##? |\Z)", text, re.MULTILINE | re.DOTALL))
    for name in gallery.names():
        assert 'class="verdict' in entries[name] or "No claim is judged" in entries[name], name
        assert f"theodolite reproduce {name}" in entries[name]
        _parse(re.findall("^theodolite reproduce .*$", entries[name], re.MULTILINE)[0])
    pictures = {picture.name for picture in gallery.PICTURES.iterdir()}
    assert pictures == set(re.findall(r"images/gallery/([\w.-]+)\)", text))


def test_results_are_taken_in_from_run_folders(tmp_path, monkeypatch):
    """Three verdicts of ours on an experiment that needs no model, on the page and in the count."""
    name = "localization/figure4"
    outcome = reproduce(name)
    for claim, number in (("One is at most two", 1.0), ("Three is at most two", 3.0)):
        outcome.verdicts.append(
            judge(claim, "it", Estimate.exact(number), Criterion("at most", 2.0, "arithmetic"))
        )
    outcome.verdicts.append(untestable("Four is even", "not counted"))
    page = write_outcome(EXPERIMENTS[name], outcome, of_nothing(), tmp_path / "runs" / "reproduce")
    found = gallery.new_results([tmp_path / "runs"])
    assert found[name][1] == page.parent
    monkeypatch.setattr(gallery, "results", lambda: {name: {"": gallery.kept(found[name][0])}})
    pages = gallery.pages()
    entry = pages["gallery-localization.md"].split(f"## {name}\n")[1].split("\n## ")[0]
    for verdict in outcome.verdicts:
        assert f"| {gallery.plain(verdict.claim)} | {gallery._answer(verdict.words)} |" in entry
    counted = "[Localization](gallery-localization.md) | theory, small models | 1 | 0 | 1 | 0 | 1 |"
    assert counted in pages["gallery.md"]


def test_the_citation_is_of_this_version():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    assert {"message", "title", "authors", "license", "cff-version"} <= set(citation)
    home = (DOCS / "index.md").read_text().lower()
    for reference in citation["references"]:
        assert {"type", "title", "authors", "year"} <= set(reference)
        assert reference["title"].split(":")[0].lower()[:30] in home


@pytest.mark.parametrize("folder", ["theodolite", "docs"])
def test_no_page_names_what_only_its_makers_read(folder):
    """Oracle: the names of the notes that do not come with the package."""
    texts = [path for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".md", ".html", ".js"}]
    assert texts
    names = re.compile(r"\b(MATH|DESIGN|STYLE|WORDS)(\.md\b|, section)|\bMATH:")
    assert not [path.name for path in texts if names.search(path.read_text(encoding="utf-8"))]
