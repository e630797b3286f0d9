"""The notebooks under `examples/` run from the first cell to the last, and their sentences are what they computed.

Oracle: the values left in each notebook's own namespace, asked for in a cell that is added at its end.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from theodolite.system import embedded

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

EXAMPLES = Path(__file__).parent.parent / "examples"
TITLES = {
    "attention": "What does my model's attention do?",
    "collapse": "Is my training collapsing?",
    "pruning": "Did pruning break few-shot?",
}
SECONDS = 300  # of a cell; a whole notebook takes less than a minute on a core of its own

pytestmark = pytest.mark.filterwarnings("ignore")  # of Jupyter's own packages


def executed(name, ask, monkeypatch, folder):
    """A notebook with its outputs, and the dictionary that the expression `ask` gives in it at the end."""
    monkeypatch.setenv("PLOTLY_RENDERER", "plotly_mimetype")
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", 4)
    notebook.cells.append(nbformat.v4.new_code_cell(f"import json\nprint(json.dumps({ask}))"))
    nbclient.NotebookClient(
        notebook, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    return notebook, json.loads(notebook.cells.pop().outputs[0]["text"])


def said(notebook: Any) -> str:
    return "".join(
        output["text"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.get("name") == "stdout"
    )


def figures_of(notebook: Any) -> list[dict[str, Any]]:
    kind = "application/vnd.plotly.v1+json"
    return [
        output["data"][kind]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if kind in output.get("data", {})
    ]


@pytest.mark.parametrize("name", TITLES)
def test_a_notebook_is_kept_with_its_outputs_under_its_title(name: str) -> None:
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", 4)
    nbformat.validate(notebook)
    assert notebook.cells[0].source.splitlines()[0] == f"# {TITLES[name]}"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    # Run once, from top to bottom.
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)]
    outputs = [output for cell in code for output in cell.outputs]
    assert outputs
    shown = [
        output["data"] for output in outputs if "application/vnd.plotly.v1+json" in output.get("data", {})
    ]
    assert shown
    assert all("image/png" in data for data in shown), "python -m tools.notebooks draws them"
    assert not any(output.output_type == "error" for output in outputs)
    assert (EXAMPLES / f"{name}.ipynb").stat().st_size < 1e6
    assert {path.stem for path in EXAMPLES.glob("*.ipynb")} == set(TITLES)


def test_the_attention_notebook_names_the_strongest_head(monkeypatch, tmp_path) -> None:
    ask = (
        "{'scores': run.heads['previous_token'].tolist(), 'layers': run.heads['layer'].tolist(),"
        " 'heads': run.heads['head'].tolist(), 'shares': run.heads.filter(like='share_').to_dict('list')}"
    )
    notebook, found = executed("attention", ask, monkeypatch, tmp_path)
    best = max(range(len(found["scores"])), key=lambda place: found["scores"][place])
    name = f"L{found['layers'][best]}H{found['heads'][best]}"
    assert f"{name} gives {found['scores'][best]:.2f} of its attention" in said(notebook)
    shares = {key: values[best] for key, values in found["shares"].items()}
    words = {"share_position": "position", "share_context": "what the tokens are"}
    leading = max(shares, key=lambda key: shares[key])
    assert f"variance to {words.get(leading, '')}" in said(notebook)
    assert f"({shares[leading]:.0%})" in said(notebook)
    drawn = figures_of(notebook)
    assert len(drawn) == 5
    assert drawn[0]["layout"]["title"]["text"].endswith("previous token")
    html = next(
        o["data"]["text/html"] for cell in notebook.cells for o in cell.get("outputs", []) if "data" in o
    )
    assert embedded.NAME in html


@pytest.mark.slow
def test_the_collapse_notebook_tells_the_two_trainings_apart(monkeypatch, tmp_path) -> None:
    ask = (
        "{'alarms': {name: [[a.kind, a.step, a.layer] for a in found] for name, found in alarms.items()},"
        " 'least': {name: curve(name, 'geometry/propagation_min') for name in paces},"
        " 'loss': {name: curve(name, 'loss') for name in paces}}"
    )
    notebook, found = executed("collapse", ask, monkeypatch, tmp_path)
    decent, high = found["alarms"]
    assert not found["alarms"][decent]
    assert found["alarms"][high]
    first = min(step for _, step, _ in found["alarms"][high])
    assert f"{decent}: no alarm;" in said(notebook)
    assert f"{high}: first alarm at step {first};" in said(notebook)
    for kind, _, _ in found["alarms"][high]:
        assert kind in said(notebook)
    losses = found["loss"][high]
    assert losses[-1] < losses[0] < 4  # nats: of a model that learns, far below ln 2048 = 7.6
    assert found["least"][high][-1] < 0.5 * found["least"][decent][-1]
    assert len(figures_of(notebook)) == 1


@pytest.mark.real
def test_the_pruning_notebook_answers_from_paired_answers(real, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("MODEL", str(real("smollm2")))
    ask = (
        "{'right': {name: one.tolist() for name, one in answers.items()}, 'loss': {name: one.loss for name, one in"
        " losses.items()}, 'verdicts': audit.tables['parts'].set_index('part')['answer'].to_dict()}"
    )
    notebook, found = executed("pruning", ask, monkeypatch, tmp_path)
    rises = {
        name: [sum(row[1:]) / len(row[1:]) - row[0] for row in rows] for name, rows in found["right"].items()
    }
    lost = [dense - pruned for dense, pruned in zip(rises["dense"], rises["pruned"], strict=True)]
    mean = sum(lost) / len(lost)
    error = (sum((value - mean) ** 2 for value in lost) / (len(lost) - 1) / len(lost)) ** 0.5
    gain = sum(rises["dense"]) / len(lost)
    answer = "no:" if mean <= 2 * error else "yes:" if mean > gain / 2 else "in part:"
    assert f"Did pruning break few-shot? {answer}" in said(notebook)
    assert f"fell by {mean:.1%} ± {error:.1%} of {gain:.1%}" in said(notebook)
    assert gain > 0.2  # the model learns from its prompt, so that the question has a meaning
    assert found["loss"]["pruned"] > found["loss"]["dense"]
    assert "sinks" in found["verdicts"]
    assert len(figures_of(notebook)) == 2
