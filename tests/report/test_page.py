"""Oracle: Python's own HTML parser reads the page back; the run says what it must hold."""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests import checkpoints
from tests.report.synthetic import HOSTILE, make_survey, weights_only
from theodolite.corpus.corpus import Corpus
from theodolite.errors import WorkError
from theodolite.passes.run import Run
from theodolite.passes.survey import spectra, survey
from theodolite.report import style
from theodolite.report.content import flowing, run_table
from theodolite.report.figures import EXHIBITS
from theodolite.report.page import PLOTLY, figure_json, script_json, write_report

VOID = {"meta", "link", "img", "br", "hr", "input", "path", "circle"}


class Reader(HTMLParser):
    """What a browser would see: elements, text of each element by kind, and whether all were closed."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open[-1] == tag, f"</{tag}> closes <{self.open[-1]}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def data(self) -> dict[str, object]:
        blocks = re.findall(
            r'<script type="application/json" id="([^"]+)">(.*?)</script>', self.rawdata_, re.S
        )
        return {name: json.loads(text) for name, text in blocks}

    rawdata_: str = ""


def read(path: Path) -> Reader:
    html = path.read_text(encoding="utf-8")
    reader = Reader(html)
    reader.rawdata_ = html
    return reader


@pytest.fixture(scope="module")
def reader(page: Path) -> Reader:
    return read(page)


def test_the_page_is_well_formed_and_nothing_is_loaded_from_a_network(page: Path, reader: Reader) -> None:
    assert sorted(file.name for file in page.parent.iterdir()) == ["index.html", PLOTLY]
    assert reader.open == []
    targets = {attributes["id"] for _, attributes in reader.elements if "id" in attributes}
    links = [str(link["href"])[1:] for link in reader.named("a")]
    assert set(links) <= targets
    assert len(links) >= 10
    sources = [
        value
        for _, attributes in reader.elements
        for name in ("src", "href")
        if (value := attributes.get(name))
    ]
    assert [source for source in sources if not source.startswith("#")] == [PLOTLY]
    assert "url(" not in "".join(reader.texts["style"])
    assert "sendChartToCloud" in re.findall(r"modeBarButtonsToRemove: \[(.*?)\]", reader.rawdata_)[0]


def test_the_policy_admits_our_two_scripts_only(reader: Reader) -> None:
    policy = next(
        meta for meta in reader.named("meta") if meta.get("http-equiv") == "Content-Security-Policy"
    )
    content = policy["content"]
    assert content is not None
    nonce = re.search(r"script-src 'nonce-(\w{32})'", content)
    assert nonce
    assert content.startswith("default-src 'none'")
    scripts = [script for script in reader.named("script") if script.get("type") != "application/json"]
    assert [script.get("nonce") for script in scripts] == [nonce[1]] * 2
    assert not any(name.startswith("on") for _, attributes in reader.elements for name in attributes)


def test_every_placeholder_has_its_figure_and_every_figure_a_placeholder(run: Run, reader: Reader) -> None:
    places = [str(div["data-figure"]) for div in reader.named("div") if "data-figure" in div]
    assert set(places) == figures_of(reader) == {exhibit.key for exhibit in EXHIBITS if exhibit.of(run)}
    for attributes in reader.named("div"):
        if "data-variant" in attributes:
            figure = reader.data()[f"data-{attributes['data-figure']}"]
            assert attributes["data-variant"] in figure["variants"]  # type: ignore[index]


def test_every_figure_is_named_for_those_who_do_not_see_it(reader: Reader) -> None:
    plots = [div for div in reader.named("div") if "data-figure" in div]
    assert all(len(div.get("aria-label") or "") > 20 for div in plots)
    for div in plots:  # a large one has buttons inside, which a picture may not have
        assert div["role"] == ("img" if "compact" in str(div["class"]) else "group")
    headings = [tag for tag, _ in reader.elements if re.fullmatch(r"h[1-6]", tag)]
    assert headings.count("h1") == 1
    assert all(int(b[1]) <= int(a[1]) + 1 for a, b in pairwise(headings))


def test_hostile_tokens_are_shown_and_never_live(run: Run, reader: Reader) -> None:
    html = reader.rawdata_
    assert "alert(1)" in html
    assert "<script>alert" not in html
    assert "<img src=x" not in html
    assert "\u202e" not in html
    assert "\x00" not in html
    shown = "".join(reader.texts["span"] + reader.texts["mark"])
    for token in HOSTILE:
        assert flowing(token)["text"] in shown or token in shown
    assert len(reader.named("script")) == len(reader.data()) + 2


def test_each_example_token_is_there_in_order_with_its_attention(run: Run, reader: Reader) -> None:
    tokens = [attributes for _, attributes in reader.elements if "data-hint" in attributes]
    assert len(tokens) == len(run.examples)
    sinks = [bool(attributes.get("tabindex")) for attributes in tokens]
    assert sinks == run.examples["sink"].tolist()
    assert tokens[0]["data-hint"] == "position 0 · receives 0.90 from L2H1 · sink"
    assert tokens[0]["style"] == "--a:0.9"


def test_same_run_same_bytes(run: Run, page: Path, tmp_path: Path) -> None:
    again = write_report(make_survey(), tmp_path / "again")
    assert hashlib.sha256(again.read_bytes()).digest() == hashlib.sha256(page.read_bytes()).digest()
    other = write_report(make_survey(seed=1), tmp_path / "other")
    assert other.read_bytes() != page.read_bytes()


def test_a_folder_that_cannot_be_written_is_one_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkError, match="cannot write"):
        write_report(run, tmp_path / "file" / "report")


def figures_of(reader: Reader) -> set[str]:
    return {name.removeprefix("data-") for name in reader.data() if name.startswith("data-")}


def test_little_makes_a_page(run: Run, tmp_path: Path) -> None:
    """Weights alone, and a run of one layer and one head."""
    bare = read(write_report(weights_only(run), tmp_path))
    assert figures_of(bare) == {"head-map", "spectrum"}
    assert "no text was read" in bare.rawdata_
    one = read(write_report(make_survey(blocks=1, heads=1, length=8, contexts=4), tmp_path))
    assert "spectrum" in figures_of(one)
    assert bare.open == one.open == []


def test_columns_of_nan_make_a_page(run: Run, tmp_path: Path) -> None:
    named = {"layer", "head", "spectrum_of"}
    broken = replace(
        run,
        layers=run.layers.assign(**{name: math.nan for name in run.layers.columns if name != "layer"}),
        heads=run.heads.assign(**{name: math.nan for name in run.heads.columns if name not in named}),
        examples=run.examples.assign(received=math.nan),
        sinks=pd.DataFrame(),
        outliers=pd.DataFrame(),
        arrays={
            name: tensor * math.nan if tensor.is_floating_point() else tensor
            for name, tensor in run.arrays.items()
        },
    )
    reader = read(write_report(broken, tmp_path))
    assert reader.open == []
    assert not re.search(
        r"\bnan\b",
        " ".join(text for name, texts in reader.texts.items() if name != "script" for text in texts),
        re.I,
    )


def test_a_layer_measure_and_its_error_share_a_cell_sorted_by_the_value(run: Run) -> None:
    table = run_table(run, "layers")
    assert table is not None
    names = [name for name, _ in table.headings]
    assert len(names) == len([name for name in run.layers if not name.endswith("_se")])
    cell = table.rows[1][names.index("relative norm")]
    expected = run.layers["relative_norm"][1]
    assert cell.value == pytest.approx(expected, rel=1e-5)
    assert cell.shown == f"{expected:.2f} ± {0.05 * expected:.2f}"
    random = table.rows[1][names.index("incoherence, random")]
    assert random.shown == "0.0300"
    missing = table.rows[0][names.index("cosine to previous layer")]
    assert (missing.shown, missing.value) == ("–", None)


def test_a_page_of_30_times_9_heads_stays_small(tmp_path: Path) -> None:
    run = make_survey(blocks=30, heads=9, length=128, width=64, head_width=64, contexts=64)
    assert write_report(run, tmp_path).stat().st_size < 3e6


def test_json_cannot_leave_its_element_and_a_figure_travels_without_its_template() -> None:
    hostile = {"a": "</script><!-- \u2028 &amp;", "b": "<script>"}
    assert not set("<>&\u2028") & set(script_json(hostile))
    assert json.loads(script_json(hostile)) == hostile
    assert "template" not in json.loads(figure_json(style.figure([]), {}))["layout"]


# What differs in a report: no causal mask, learned sinks, no query-key matrix; labels or none.
CASES = [("gpt2", None), ("bert", ["a"]), ("gpt_oss", ["a", "b"]), ("qwen3", ["a"])]


def assert_shown(run: Run, page: Reader) -> None:
    """Oracle: the run's own tables are in the cells of the page, and every figure that is available has data."""
    cells = np.array([float(cell["data-v"]) for cell in page.named("td") if "data-v" in cell])
    for table, names in ((run.heads, ["trace", "entropy"]), (run.layers, ["rank", "norm"])):
        for name in names if len(table) else ():
            for value in table[name].dropna() if name in table else ():
                assert np.isclose(cells, value, rtol=1e-3, atol=0).any(), f"{name} {value} is not on the page"
    figures = {name.removeprefix("data-"): data for name, data in page.data().items() if name[:5] == "data-"}
    assert figures.keys() == {exhibit.key for exhibit in EXHIBITS if exhibit.of(run)}
    for name, figure in figures.items():
        assert figure["data"], name


@pytest.mark.parametrize(("family", "labels"), CASES)
def test_every_family_gets_a_report(family, labels, opened, tmp_path):
    texts = ["to be or not to be, that is the question. " * 4] * len(labels or [""])
    corpus = Corpus.from_texts(texts, checkpoints.byte_tokenizer(), 20, labels=labels)
    run = survey(opened(family), corpus)
    assert_shown(run, read(write_report(run, tmp_path / "report")))


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "vit"])
def test_spectra_alone_get_a_report(family, opened, tmp_path):
    run = spectra(opened(family))
    assert_shown(run, read(write_report(run, tmp_path / "report")))
