"""Rules of what to leave out; oracle: rows of tables written here by hand, and plain comparisons of token ids."""

from __future__ import annotations

import json
from dataclasses import replace

import pandas as pd
import pytest
import torch

from theodolite.accumulate.outliers import OutlierCounts
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError, WorkError
from theodolite.measure.outliers import outliers_table
from theodolite.models import open_model
from theodolite.passes.run import Run
from theodolite.sinks.exclusions import Exclusions, Rule
from theodolite.sinks.outliers import Outliers, find_outliers

PROVENANCE = {
    "schema_version": 3,
    "model": {"id": "m", "revision": None, "sha256": "1" * 64, "layers": 2, "heads": 2},
    "corpus": {"name": "text", "sha256": "2" * 64, "contexts": 4, "length": 8},
}
SINKS = pd.DataFrame(
    {
        "layer": [0, 1, 1, 1],
        "head": [1, 0, 0, 0],
        "token_id": [7, 3, 4, 9],
        "token": ["\n", "a", "b", "c"],
        "first": [False, True, True, False],
        "contexts": [2, 1, 2, 1],
        "share": [0.5, 0.25, 0.5, 0.001],
    }
)
OUTLIERS = pd.DataFrame(
    {
        "layer": [1, 2],
        "dimension": [5, 6],
        "share": [0.4, 0.0],
        "maximum": [9.0, 3.0],
        "maximum_first": [1.0, 300.0],
        "massive": [0, 0],
        "massive_first": [0, 2],
        "massive_contexts": [0, 0],
    }
)
EMPTY = pd.DataFrame()
SURVEYED = Run(EMPTY, EMPTY, SINKS, OUTLIERS, EMPTY, {}, PROVENANCE)
TRACED = replace(
    SURVEYED,
    sinks=EMPTY,
    outliers=EMPTY,
    traces=pd.DataFrame(
        {
            "layer": [0, 1, 1],
            "head": [1, 0, 1],
            "kind": ["later", "first", "learned"],
            "token_id": [7, -1, -1],
            "token": ["\n", "", ""],
            "share": [0.5, 0.75, 1.0],
        }
    ),
    provenance=PROVENANCE | {"fingerprint": {"trace": True}},
)


def test_rules_of_a_survey():
    assert Exclusions.of(SURVEYED).rules == (
        Rule("sink", 0, head=1, first=False, token_id=7, token="\n", share=0.5),
        Rule("outlier dimension", 1, dimension=5, share=0.4),
        Rule("sink", 1, head=0, first=True, share=0.75),
        Rule("massive activation", 2, dimension=6, first=True, share=0.5),
    )
    assert len(Exclusions.of(SURVEYED, 0.0).rules) == 6  # with the rare sink and the rare outlier
    assert [rule.kind for rule in Exclusions.of(SURVEYED, 0.6).rules] == ["sink"]


def test_massive_activations_are_rules_from_the_least_share_on():
    """Oracle: by hand, 4 contexts: 2 of them at position 0, and after it 3 values in 3 contexts or 9 in one."""
    table = OUTLIERS.assign(massive=[3, 9], massive_first=[0, 2], massive_contexts=[3, 1], share=0.0)
    run = replace(SURVEYED, sinks=SINKS[:0], outliers=table)
    shares = [(rule.layer, rule.first, rule.share) for rule in Exclusions.of(run).rules]
    assert shares == [(1, False, 0.75), (2, True, 0.5), (2, False, 0.25)]
    assert [rule.share for rule in Exclusions.of(run, 0.6).rules] == [0.75]


def test_a_context_full_of_massive_activations_is_one_of_a_hundred():
    """Oracle: planted, 100 contexts of which one has 100 massive values in a dimension after position 0."""
    hidden = torch.full((100, 101, 8), 0.05)
    hidden[7, 1:, 3] = 500.0
    counts = OutlierCounts(1, 8, contexts=100)
    counts.update(0, hidden, 0)
    contexts = torch.full((1, 8), 100 / 8, dtype=torch.float64)
    means = {"contexts": contexts, "readers": contexts[:, :, None].expand(1, 8, 101)}
    table, _ = outliers_table(counts.state(), means)
    corpus = PROVENANCE["corpus"] | {"contexts": 100, "length": 101}
    run = replace(SURVEYED, sinks=SINKS[:0], outliers=table, provenance=PROVENANCE | {"corpus": corpus})
    assert table["massive"].tolist() == [100]
    rules = [rule for rule in Exclusions.of(run).rules if rule.kind == "massive activation"]
    assert rules == [Rule("massive activation", 0, dimension=3, first=False, share=0.01)]


def test_rules_of_outliers(tmp_path):
    """Oracle: tables written by hand, 8 contexts. At position 0 all tokens are one rule, later each is its own."""
    dimensions = pd.DataFrame(
        {
            "layer": [0, 1, 1, 2],
            "dimension": [4, 4, 5, 6],
            "share": [0.5, 0.001, 0.0, 0.9],
            "published": [True, True, False, False],
            "adaptive": [False, False, True, False],
        }
    )
    massive = pd.DataFrame(
        {
            "layer": [1, 1, 1, 2],
            "dimension": [7, 7, 7, 7],
            "token_id": [3, 9, 5, 3],
            "token": ["a", "b", ".", "a"],
            "first": [True, True, False, False],
            "contexts": [2, 4, 2, 1],
            "places": [2, 4, 3, 1],
            "published": [2, 4, 3, 0],
            "adaptive": [2, 4, 3, 1],
            "mean": [200.0] * 4,
            "extreme": [300.0] * 4,
            "position": [0.0, 0.0, 5.0, 6.0],
        }
    )
    numbers = {"contexts": 8, "corpus": PROVENANCE["corpus"], "model": PROVENANCE["model"]}
    found = Outliers(EMPTY, dimensions, massive, EMPTY, EMPTY, EMPTY, numbers)
    exclusions = Exclusions.of(found, 0.2)
    assert exclusions.rules == (
        Rule("outlier dimension", 0, dimension=4, share=0.5),
        Rule("massive activation", 1, dimension=7, first=True, share=0.75),
        Rule("massive activation", 1, dimension=7, first=False, token_id=5, token=".", share=0.25),
        Rule("outlier dimension", 1, dimension=5, share=0.0),
    )
    assert exclusions.model["sha256"] == "1" * 64
    exclusions.save(tmp_path / "exclusions.json")
    assert Exclusions.load(tmp_path / "exclusions.json") == exclusions
    rules = json.loads((tmp_path / "exclusions.json").read_text())["rules"]
    assert rules[0] == {"kind": "outlier dimension", "layer": 0, "dimension": 4, "share": 0.5}


def test_rules_of_outliers_of_a_model():
    """Oracle: the tables that `find_outliers` itself gives."""
    model = open_model()
    ids = torch.arange(200).view(4, 50)
    found = find_outliers(model, Corpus("some", ids, torch.full((4,), -1), [], 0))
    exclusions = Exclusions.of(found)
    named = found.dimensions[found.dimensions["published"] | found.dimensions["adaptive"]]
    assert len(exclusions.rules) >= len(named) > 0
    assert exclusions.model == {"id": model.id, "revision": model.revision, "sha256": model.sha256}
    assert exclusions.corpus["name"] == "some"


def test_rules_of_a_trace():
    assert Exclusions.of(TRACED).rules == (
        Rule("sink", 0, head=1, first=False, token_id=7, token="\n", share=0.5),
        Rule("sink", 1, head=0, first=True, share=0.75),
        Rule("sink", 1, head=1, share=1.0),
    )


def test_tokens_and_dimensions():
    exclusions = Exclusions.of(SURVEYED)
    ids = torch.tensor([[7, 1, 7, 2], [3, 7, 7, 7]])
    assert exclusions.tokens(ids, layer=0).tolist() == [
        [False, False, True, False],
        [False, True, True, True],
    ]
    assert exclusions.tokens(ids, layer=1).tolist() == [[True, False, False, False]] * 2
    assert exclusions.tokens(ids[0]).tolist() == [True, False, True, False]
    assert [exclusions.dimensions(layer) for layer in range(3)] == [[], [5], [6]]


def test_refusals(tmp_path):
    with pytest.raises(UsageError, match="give one from 0 to 1"):
        Exclusions.of(SURVEYED, 2.0)
    with pytest.raises(UsageError, match="give the folder of a survey"):
        Exclusions.of(replace(SURVEYED, provenance={"model": PROVENANCE["model"]}))
    with pytest.raises(UsageError, match="no file at"):
        Exclusions.load(tmp_path / "none.json")
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(UsageError, match="no file of exclusions that theodolite wrote"):
        Exclusions.load(tmp_path / "other.json")
    (tmp_path / "newer.json").write_text('{"schema_version": 9}')
    with pytest.raises(UsageError, match="upgrade theodolite"):
        Exclusions.load(tmp_path / "newer.json")
    with pytest.raises(WorkError, match=r"cannot write .*: choose another --out"):
        Exclusions.of(SURVEYED).save(tmp_path / "other.json" / "exclusions.json")
    Exclusions.of(SURVEYED).save(tmp_path / "new" / "exclusions.json")
    assert Exclusions.load(tmp_path / "new" / "exclusions.json") == Exclusions.of(SURVEYED)
