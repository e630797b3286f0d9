"""The page, its file and its server. Oracles: pandas' reader of the record, planted values, statuses of HTTP."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from tests.inputs.test_pages import HOSTILE
from tests.slow import slow_but
from tests.watch.conftest import LOOKS
from theodolite.cli.app import app
from theodolite.watch import figures
from theodolite.watch.figures import POINTS, first_of_groups
from theodolite.watch.page import LISTED, render
from theodolite.watch.record import TrainingRecord

WAITING = ">Waiting for the first look.<"  # as text: the page's script can say it too


def page_of(run: Path) -> str:
    record = TrainingRecord(run)
    record.refresh()
    return render(record, every=1.0)


def numbers(values: object) -> np.ndarray:
    """Plotly's typed arrays as plain ones."""
    if isinstance(values, list):
        return np.array(values)
    flat = np.frombuffer(base64.b64decode(values["bdata"]), dtype=values["dtype"])
    return flat.reshape([int(size) for size in values.get("shape", str(len(flat))).split(",")])


def figure(page: str, key: str) -> dict:
    (text,) = re.findall(rf'<script type="application/json" id="data-{key}">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def traces(page: str, key: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """x and y of each trace, by its place and name."""
    return {
        f"{number} {trace.get('name')}": (numbers(trace["x"]), numbers(trace["y"]))
        for number, trace in enumerate(figure(page, key)["data"])
        if trace.get("hoverinfo") != "skip"
    }


def test_lines_and_map_hold_what_the_record_holds(recorded):
    page = page_of(recorded)
    heads = pd.read_json(recorded / "geometry" / "heads.jsonl", lines=True)
    losses = pd.read_json(recorded / "geometry" / "losses.jsonl", lines=True)
    by_step = heads.groupby("step")
    layers = pd.read_json(recorded / "geometry" / "layers.jsonl", lines=True).groupby("step")
    expected = [
        losses["loss"],
        *(of(by_step[name]) for name in ("entropy_share", "propagation") for of in (_least, _mean)),
        *(of(by_step["largest_logit"]) for of in (_most, _mean)),
        *(of(layers["rank_collapse"]) for of in (_least, _mean)),
    ]
    drawn = list(traces(page, "lines").values())
    assert len(drawn) == len(expected)
    for (x, y), values in zip(drawn, expected, strict=True):
        assert tuple(x) == LOOKS
        np.testing.assert_allclose(y, values, rtol=1e-5)
    shown = figure(page, "heads")
    for column, (patch, _) in shown["variants"].items():
        table = heads.pivot(index=["layer", "head"], columns="step", values=column).to_numpy()
        np.testing.assert_allclose(numbers(patch["z"]), table, rtol=1e-5)
    assert tuple(numbers(shown["data"][0]["x"])) == LOOKS
    assert shown["data"][0]["y"][:5] == ["L0H0", "L0H1", "L0H2", "L0H3", "L1H0"]
    alarms = pd.read_json(recorded / "geometry" / "alarms.jsonl", lines=True)
    marked = [step for x, _ in traces(page, "alarms").values() for step in x]
    assert sorted(marked) == sorted(alarms["step"])
    crosses = shown["data"][1]
    assert sorted(numbers(crosses["x"])) == sorted(alarms["step"][alarms["head"].notna()])
    assert "<td>L0H1</td>" in page


def _most(groups: pd.core.groupby.SeriesGroupBy) -> pd.Series:
    return groups.max()


def _least(groups: pd.core.groupby.SeriesGroupBy) -> pd.Series:
    return groups.min()


def _mean(groups: pd.core.groupby.SeriesGroupBy) -> pd.Series:
    return groups.mean()


@pytest.fixture
def many(tmp_path) -> Path:
    """10,000 looks at 12 × 12 heads whose columns are planted; steps are uneven."""
    steps = np.cumsum(np.r_[np.full(9000, 10), np.full(1000, 50)])
    with (tmp_path / "heads.jsonl").open("w") as heads, (tmp_path / "losses.jsonl").open("w") as losses:
        for look, step in enumerate(steps.tolist()):
            for head in range(144):
                share = 0.01 if (look, head) in ((4321, 100), (9999, 143)) else 0.5
                row = {"step": step, "layer": head // 12, "head": head % 12, "entropy_share": share}
                heads.write(json.dumps(row | {"largest_logit": 40 if share < 0.5 else 5}) + "\n")
            losses.write(json.dumps({"step": step, "loss": 2 + look % 2}) + "\n")
    alarm = {"kind": "rank collapse", "layer": 1, "head": None, "value": 0.01, "slope": 0, "collapsed": True}
    lines = [json.dumps({"step": step, **alarm}) for step in steps.tolist()]
    (tmp_path / "alarms.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.mark.slow
def test_ten_thousand_looks_stay_light_and_hide_nothing(many):
    """Oracle: the two planted looks, one of them the last, and every head's row."""
    page = page_of(many)
    assert len(page) < 1 << 21
    shown = figure(page, "heads")
    steps = numbers(shown["data"][0]["x"])
    assert len(steps) <= POINTS
    assert steps[-1] == 140_000
    for column, planted in (("entropy_share", 0.01), ("largest_logit", 40)):
        z = numbers(shown["variants"][column][0]["z"])
        assert z.shape == (144, len(steps))
        rows, columns = np.nonzero(np.isclose(z, planted))
        assert rows.tolist() == [100, 143]
        assert columns.tolist() == [np.searchsorted(steps, 43_220), len(steps) - 1]
    lines = list(traces(page, "lines").values())
    assert all(len(x) <= POINTS and x[-1] == 140_000 for x, _ in lines)
    np.testing.assert_allclose(lines[0][1], 2.5)
    named = [trace for trace in figure(page, "lines")["data"] if "text" in trace]
    assert len(named) == 2
    for trace in named:
        of_points = dict(zip(numbers(trace["x"]).tolist(), trace["text"], strict=True))
        assert of_points[int(min(step for step in of_points if step >= 43_220))] == "L8H4"
        assert of_points[140_000] == "L11H11"
    assert page.count("<td>rank collapse</td>") == LISTED
    assert f"The newest {LISTED} of 10000" in page


@pytest.mark.parametrize("count", [1, 2, POINTS, POINTS + 1, 10_000, 123_457])
def test_looks_that_share_a_point_do_not_move_as_others_come(count):
    groups = first_of_groups(count, POINTS)
    assert groups[0] == 0
    assert len(groups) <= POINTS
    assert len(groups) == count or len(groups) > POINTS // 2
    later = first_of_groups(count + 1, POINTS)
    assert set(later) <= {*groups, count}


def test_a_file_stands_alone(recorded, tmp_path):
    out = tmp_path / "new" / "page.html"
    done = CliRunner().invoke(app, ["watch", str(recorded), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert done.stdout.split() == ["Report:", str(out)]
    page = out.read_text()
    bare = re.sub(r"(<script[^>]*>).*?</script>", r"\1", page, flags=re.DOTALL)
    assert bare.count("<script") > 4
    assert not re.search(r"\b(?:src|href)=", bare)
    assert "connect-src" not in bare
    assert "plotly.js v" in page
    assert f"{len(LOOKS)} looks" in page


@pytest.mark.parametrize("there", [True, False])
def test_a_file_of_nothing_is_refused(tmp_path, there):
    run = tmp_path if there else tmp_path / "none"
    done = CliRunner().invoke(app, ["watch", str(run), "--out", str(tmp_path / "page.html")])
    assert done.exit_code == 2
    assert "holds no record of a training run yet" in " ".join(done.stderr.split())
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    "files", [(), ("losses",), ("heads",), ("layers",), ("alarms",), ("alarms", "losses")]
)
def test_a_record_of_which_only_some_is_there_is_drawn(recorded, tmp_path, files):
    for name in files:
        (tmp_path / f"{name}.jsonl").write_bytes((recorded / "geometry" / f"{name}.jsonl").read_bytes())
    page = page_of(tmp_path)
    assert (WAITING in page) == (not files)
    assert ('id="data-lines"' in page) == (
        set(files) > {"alarms"} or files in (("losses",), ("heads",), ("layers",))
    )


def test_a_run_s_name_cannot_leave_its_place(recorded, tmp_path):
    for number, text in enumerate(HOSTILE):
        run = tmp_path / str(number) / text.replace("/", "∕").encode("utf-8", "replace")[:200].decode()
        run.parent.mkdir()
        run.symlink_to(recorded)
        page = page_of(run)
        assert page.count("<script") == page_of(recorded).count("<script")
        if "<" in text:
            assert text.replace("/", "∕") not in page


class Server:
    """A running command, and the address of its page."""

    def __init__(self, *words: str) -> None:
        command = [sys.executable, "-u", "-m", "theodolite", "watch", *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(command, text=True, env=os.environ, **pipes)
        assert self.process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:\d+", self.process.stdout.readline())
        assert found, self.process.communicate()[1]
        self.address = found[0]

    def ask(self, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, str, dict[str, str]]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(self.address + path, headers=named, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, answer.read().decode(), dict(answer.headers)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode(), dict(error.headers)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[tuple[Server, Path]]:
    run = tmp_path_factory.mktemp("served") / "later"
    running = Server(str(run), "--every", "0.5")
    yield running, run
    running.process.kill()
    running.process.communicate()


def test_it_waits_for_a_folder_and_answers_anew_only_when_something_has_changed(server, recorded):
    """Oracle: the files that are there when it is asked."""
    running, run = server
    status, page, headers = running.ask()
    assert status == 200
    assert WAITING in page
    assert "Theodolite-Silent" not in headers
    assert running.ask(If_None_Match=headers["ETag"])[0] == 304
    run.mkdir()
    (run / "heads.jsonl").write_bytes((recorded / "geometry" / "heads.jsonl").read_bytes())
    status, page, later = running.ask(If_None_Match=headers["ETag"])
    assert status == 200
    assert WAITING not in page
    assert f"{len(LOOKS)} looks" in page
    assert 0 <= float(later["Theodolite-Silent"]) < 60
    assert running.ask(If_None_Match=later["ETag"])[0] == 304
    assert running.ask(method="HEAD")[:2] == (200, "")
    assert running.ask("/plotly.min.js")[1].startswith("/**\n* plotly.js")


def test_nobody_else_is_answered(server):
    running, _ = server
    port = running.address.rpartition(":")[2]
    for host in ("elsewhere.example", f"elsewhere.example:{port}", "127.0.0.1", f"127.0.0.1.nip.io:{port}"):
        assert running.ask(Host=host)[0] == 403
    assert running.ask(Host=f"localhost:{port}")[0] == 200
    for path in ("/heads.jsonl", "/../../etc/passwd", "/?x", "/index.html"):
        assert running.ask(path)[0] == 404, path
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert running.ask(method=method)[0] == 501


@pytest.mark.parametrize("number", slow_but([signal.SIGINT], [signal.SIGINT, signal.SIGTERM]))
def test_it_ends_in_a_line(server, number, tmp_path):
    running = server[0] if number == signal.SIGINT else Server(str(tmp_path))
    running.process.send_signal(number)
    _, stderr = running.process.communicate(timeout=120)
    assert running.process.returncode == 0
    assert " ".join(stderr.split()).endswith("is watched no more; the training was not touched")
    assert "Traceback" not in stderr


@pytest.mark.parametrize(("lowest", "kind"), [(0.5, "log"), (-0.5, None), (0.0, None)])
def test_logits_that_grow_by_factors_have_a_logarithmic_axis_which_hides_none(lowest, kind):
    """Oracle: a logarithm shows no value of 0 or less."""
    values = np.array([[lowest, lowest], [50.0, np.nan]])
    panel = figures.measure_panel(figures.LOGITS, np.array([0, 1]), values, [(0, 0), (0, 1)])
    assert panel.yaxis.get("type") == kind
    assert figures.measure_panel(figures.ENTROPIES, np.array([0, 1]), values, [(0, 0), (0, 1)]).yaxis == {
        "rangemode": "tozero"
    }
