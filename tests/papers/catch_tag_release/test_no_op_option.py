"""The page of models with and without an escape."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from tests.papers.catch_tag_release.test_no_op_training import SMALL
from tests.papers.training.test_embedded_training import quiet, sources
from theodolite.accumulate.catches import attend_and_catch
from theodolite.attention.inputs import AttentionInputs
from theodolite.cli.app import app
from theodolite.errors import UsageError
from theodolite.papers.catch_tag_release.no_op_option import (
    MEASURES,
    compare_no_ops,
    no_op_option,
    no_op_provenance,
    no_op_table,
    sinks_of,
)
from theodolite.papers.catch_tag_release.no_op_training import train_no_op_models
from theodolite.papers.experiment import Study
from theodolite.papers.training.models import NO_OPS
from theodolite.report.outcome import Outcome


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    out = tmp_path_factory.mktemp("trained") / "escape"
    train_no_op_models(out, seeds=2, sources=sources(), config=SMALL, threads=1, console=quiet())
    return out


def test_sinks_read_off_matrices_are_those_of_the_tracer():
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(1, 6, 90, 4, generator=generator, dtype=torch.float64) for _ in "qkv")
    query, key = 1.2 * query + 1, 1.2 * key
    key[:, 0, 5] += 3
    key[:, 1, 40] += 3
    for start in (0, 30, 60):  # a query asks for its own third of the context
        query[:, 3:, start : start + 30, start // 30] += 4
        key[:, 3:, start, start // 30] += 3
    inputs = AttentionInputs(query, key, value, 1.0, causal=True)
    logits = (query @ key.mT).masked_fill(~torch.ones(90, 90).tril().bool(), -torch.inf)
    global_sinks, local_sinks = sinks_of(logits.softmax(-1))
    _, catches = attend_and_catch(inputs, stretches=True)
    traced = torch.zeros(6, 90, dtype=torch.bool)
    traced[catches.head, catches.position] = True
    traced_local = torch.zeros_like(traced)
    traced_local[catches.head, catches.position] = catches.stretch
    assert traced_local.any()
    assert (traced & ~traced_local).any()
    assert torch.equal(global_sinks[0], traced & ~traced_local)
    assert torch.equal((global_sinks | local_sinks)[0], traced)


def test_every_model_is_measured(folder):
    table = no_op_table(folder)
    assert list(zip(table["seed"], table["escape"], strict=True)) == [(s, e) for s in (0, 1) for e in NO_OPS]
    none = table[table["escape"] == "none"]
    assert (none["escaped"] == 0).all()
    assert (table[table["escape"] == "off-by-one"]["escaped"] > 0.05).all()
    assert table["loss"].between(2, math.log(270) + 1).all()
    assert (table["most_first"] >= table["first"]).all()


def made_up(sinks: dict[str, list[float]], loss: dict[str, list[float]]) -> pd.DataFrame:
    rows = []
    for no_op in NO_OPS:
        for seed in range(3):
            values = dict.fromkeys(MEASURES, 0.1) | {"sinks": sinks[no_op][seed], "stretches": 0.2}
            rows.append({"escape": no_op, "seed": seed} | values | {"loss": loss[no_op][seed]})
    return pd.DataFrame(rows)


def compared(table: pd.DataFrame) -> Outcome:
    outcome = Outcome()
    compare_no_ops(outcome, table)
    return outcome


def test_verdicts_follow_the_numbers():
    table = made_up(
        {"none": [0.2, 0.3, 0.4], "off-by-one": [0.19, 0.28, 0.41], "learned": [0.01, 0.012, 0.02]},
        {"none": [3.0, 3.1, 3.2], "off-by-one": [2.9, 3.0, 3.1], "learned": [3.0, 3.1, 3.2]},
    )
    outcome = compared(table)
    by_claim = [(v.claim.split(":")[1].split(" (")[0], v.answer) for v in outcome.verdicts]
    assert by_claim == [
        (" softmax off by one", "holds"),
        (" softmax off by one", "holds"),
        (" softmax off by one does not lower the loss", "fails"),
        (" learned sink logit", "fails"),
        (" learned sink logit", "holds"),
        (" learned sink logit does not lower the loss", "holds"),
    ]
    ratios = np.array([0.19 / 0.2, 0.28 / 0.3, 0.41 / 0.4])
    assert (
        f"{ratios.mean():.2f} ± {ratios.std(ddof=1) / 3**0.5:.2f} (3 seeds)" in outcome.verdicts[0].evidence
    )
    assert len(outcome.exhibits[0].figure.data) == 3 * len(MEASURES)
    one_seed = compared(table[table["seed"] == 0])
    assert {verdict.answer for verdict in one_seed.verdicts} == {"not testable here"}
    without = table.assign(sinks=0.0)
    assert compared(without).verdicts[0].answer == "not testable here"


def test_the_command_reads_the_folder_and_refuses_what_is_none(folder, tmp_path):
    runner = CliRunner()
    finished = runner.invoke(
        app, ["reproduce", "sinks/escape", str(folder), "--out", str(tmp_path / "pages")]
    )
    assert finished.exit_code == 0, finished.output
    assert (tmp_path / "pages" / "sinks-escape" / "index.html").is_file()
    refused = runner.invoke(app, ["reproduce", "sinks/escape"])
    assert refused.exit_code == 2
    assert "pass the folder that `theodolite train escape` wrote" in refused.output
    (folder.parent / "begun").mkdir()
    (folder.parent / "begun" / "escape.json").write_text("{}")
    with pytest.raises(UsageError, match="no seed whose models are all trained"):
        no_op_provenance(folder.parent / "begun")
    study = Study(no_op_provenance(folder))
    del study.provenance["escapes"]
    with pytest.raises(UsageError, match="pass the folder"):
        study.outcome(no_op_option)
