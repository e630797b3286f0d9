"""Rules of what to leave out; oracle: rows of tables written here by hand, and plain comparisons of token ids."""

from __future__ import annotations

import json
from dataclasses import replace

import pandas as pd
import pytest
import torch

from theodolite.accumulate.sums import Marked, marked_places
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError, WorkError
from theodolite.models import open_model
from theodolite.passes.run import Run
from theodolite.sinks.exclusions import Exclusions, Rule
from theodolite.sinks.outliers import Outliers, find_outliers
from theodolite.sinks.trace import trace_sinks

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


def places_of(rows):
    """Places: layer, head or dimension, context, position, token, its occurrences, the context's key."""
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 7)


SURVEYED = Run(sinks=SINKS, outliers=OUTLIERS, arrays={}, provenance=PROVENANCE)
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
    arrays={"sink_places": places_of([(0, 1, 0, 4, 7, 2, 0), (0, 1, 1, 5, 7, 2, 1), (1, -1, 0, 0, 3, 0, 0)])},
    provenance=PROVENANCE | {"fingerprint": {"trace": True}},
)


def test_rules_of_a_survey():
    assert Exclusions.of(SURVEYED).rules == (
        Rule("outlier dimension", 1, dimension=5, share=0.4),
        Rule("sink", 1, head=0, first=True, share=0.75),
        Rule("massive activation", 2, dimension=6, first=True, share=0.5),
    )
    assert len(Exclusions.of(SURVEYED, 0.0).rules) == 4  # with the rare outlier
    assert [rule.kind for rule in Exclusions.of(SURVEYED, 0.6).rules] == ["sink"]


def test_massive_activations_are_rules_from_the_least_share_on():
    """Oracle: by hand, 4 contexts: 2 of them at position 0, and after it 3 values in 3 contexts or 9 in one."""
    table = OUTLIERS.assign(massive=[3, 9], massive_first=[0, 2], massive_contexts=[3, 1], share=0.0)
    run = replace(SURVEYED, sinks=SINKS[:0], outliers=table)
    shares = [(rule.layer, rule.first, rule.share) for rule in Exclusions.of(run).rules]
    assert shares == [(1, False, 0.75), (2, True, 0.5), (2, False, 0.25)]
    assert [rule.share for rule in Exclusions.of(run, 0.6).rules] == [0.75]


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
    full_stop = [(1, 7, context, 5, 5, 3, context) for context in range(3)]
    places = places_of([*full_stop, (1, 7, 3, 6, 9, 9, 3), (2, 7, 0, 6, 3, 1, 0)])
    found = Outliers(EMPTY, dimensions, massive, EMPTY, EMPTY, places, numbers)
    exclusions = Exclusions.of(found, 0.2)
    assert exclusions.rules == (
        Rule("outlier dimension", 0, dimension=4, share=0.5),
        Rule("massive activation", 1, dimension=7, first=True, share=0.75),
        Rule(
            "massive activation",
            1,
            dimension=7,
            first=False,
            token_id=5,
            token=".",
            share=0.375,
            occurrences=3,
            of_occurrences=1.0,
        ),
        Rule("outlier dimension", 1, dimension=5, share=0.0),
    )
    assert exclusions.occurrences == (
        (1, 3, 6),
        (2, 0, 6),
    )  # of a token elsewhere ordinary, and of too rare a one
    assert exclusions.model["sha256"] == "1" * 64
    exclusions.save(tmp_path / "exclusions.json")
    assert Exclusions.load(tmp_path / "exclusions.json") == exclusions
    rules = json.loads((tmp_path / "exclusions.json").read_text())["rules"]
    assert rules[0] == {"kind": "outlier dimension", "layer": 0, "dimension": 4, "share": 0.5}


def test_rules_of_a_trace():
    newline = {"first": False, "token_id": 7, "token": "\n", "occurrences": 2, "of_occurrences": 1.0}
    assert Exclusions.of(TRACED).rules == (
        Rule("sink", 0, head=1, share=0.5, **newline),
        Rule("sink", 1, head=0, first=True, share=0.75),
        Rule("sink", 1, head=1, share=1.0),
    )


def test_tokens_and_dimensions():
    exclusions = Exclusions.of(TRACED)
    ids = torch.tensor([[7, 1, 7, 2], [3, 7, 7, 7]])
    assert exclusions.tokens(ids, layer=0).tolist() == [
        [False, False, True, False],
        [False, True, True, True],
    ]
    assert exclusions.tokens(ids, layer=1).tolist() == [[True, False, False, False]] * 2
    assert exclusions.tokens(ids[0]).tolist() == [True, False, True, False]
    assert [Exclusions.of(SURVEYED).dimensions(layer) for layer in range(3)] == [[], [5], [6]]


TEXT = torch.tensor([[5, 9, 7, 9, 1, 7], [6, 7, 9, 2, 2, 4], [3, 1, 2, 4, 1, 2]])
SINK_PLACES = {(0, 2), (0, 5), (1, 1), (0, 1), (2, 0)}
"""All 7s, one 9 of three, and one first position of three."""


def test_a_token_is_a_rule_where_all_its_occurrences_are_sinks_and_else_an_occurrence_is_known_by_its_context():
    """Oracle: precision and recall counted by hand from the places themselves, on the text as it was read."""
    marked = Marked()
    for context, position in SINK_PLACES:
        place = (torch.tensor([value]) for value in (0, context, position, int(TEXT[context, position])))
        marked.mark(1, *place)
    provenance = TRACED.provenance | {"corpus": PROVENANCE["corpus"] | {"contexts": 3}}
    arrays = {"sink_places": marked_places(marked.state(), TEXT)}
    run = replace(TRACED, arrays=arrays, provenance=provenance)
    tokens = {"token_id": [7, 9, -1], "kind": ["later", "later", "first"], "share": [2 / 3, 1 / 3, 1 / 3]}
    traces = pd.DataFrame({"layer": 1, "head": 0, "token": ["seven", "nine", ""]} | tokens)
    exclusions = Exclusions.of(replace(run, traces=traces))
    seven = [rule for rule in exclusions.rules if rule.token_id is not None]
    assert [(rule.token_id, rule.occurrences, rule.of_occurrences) for rule in seven] == [(7, 3, 1.0)]
    true = torch.zeros_like(TEXT, dtype=torch.bool)
    true[tuple(torch.tensor(list(SINK_PLACES)).T)] = True
    for name, right in (("tokens", 4), ("mask", 5)):
        flagged = getattr(exclusions, name)(TEXT)
        accuracy = exclusions.accuracy[name]
        assert int((flagged & true).sum()) == right
        assert accuracy["precision"] == pytest.approx(right / int(flagged.sum()))
        assert accuracy["recall"] == pytest.approx(right / 5)
    assert (exclusions.mask(TEXT, layer=0) == 0).all()
    keys = marked.state()["keys"]
    again = {"keys": torch.cat([keys, keys + torch.tensor([0, 0, 3, 0, 0])])}
    arrays = {"sink_places": marked_places(again, TEXT.repeat(2, 1))}
    provenance = TRACED.provenance | {"corpus": PROVENANCE["corpus"] | {"contexts": 6}}
    twice = Exclusions.of(replace(run, traces=traces, arrays=arrays, provenance=provenance))
    assert twice.accuracy == exclusions.accuracy
    unread = TEXT[:, :5]
    assert torch.equal(exclusions.mask(unread), exclusions.tokens(unread))
    padded = torch.cat([torch.zeros(3, 2, dtype=torch.int64), TEXT], dim=1)
    here = torch.cat([torch.zeros(3, 2), torch.ones_like(TEXT)], dim=1)
    assert torch.equal(exclusions.mask(padded, attention_mask=here)[:, 2:], exclusions.mask(TEXT))
    packed, positions = TEXT.flatten()[None], torch.arange(6).repeat(3)[None]
    assert torch.equal(exclusions.mask(packed, position_ids=positions).view(3, 6), exclusions.mask(TEXT))


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
    for version, do in ((9, "upgrade theodolite"), (1, "make it anew")):
        (tmp_path / "older.json").write_text(f'{{"schema_version": {version}}}')
        with pytest.raises(UsageError, match=do):
            Exclusions.load(tmp_path / "older.json")
    with pytest.raises(WorkError, match=r"cannot write .* is a file, not a folder"):
        Exclusions.of(SURVEYED).save(tmp_path / "other.json" / "exclusions.json")
    Exclusions.of(SURVEYED).save(tmp_path / "new" / "exclusions.json")
    assert Exclusions.load(tmp_path / "new" / "exclusions.json") == Exclusions.of(SURVEYED)


@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_precision_and_recall_on_real_models(real, name):
    """Oracle: eager attention and hidden states of transformers; sinks and massive activations by their definitions."""
    model = open_model(real(name))
    corpus = Corpus.python_docs(model.tokenizer, 96, 8)
    exclusions = [Exclusions.of(run(model, corpus)) for run in (trace_sinks, find_outliers)]
    model.hf.set_attn_implementation("eager")
    with torch.no_grad():
        found = model.hf(corpus.contexts, output_attentions=True, output_hidden_states=True)
    sees = torch.arange(96, 0, -1)
    received = (attention.double().sum(2) / sees for attention in found.attentions)
    sinks = sum(((mean > 0.3) & (sees > 16)).any(1) for mean in received) > 0
    sizes = (hidden.abs() for hidden in found.hidden_states[:-1])
    massive = (
        sum(((x > 100) & (x > 1000 * x.flatten(1).median(1).values[:, None, None])).any(-1) for x in sizes)
        > 0
    )
    for of, true in zip(exclusions, (sinks, massive), strict=True):
        mask, by_rules = of.mask(corpus.contexts), of.tokens(corpus.contexts)
        assert (mask & true).sum() == true.sum() > 0
        if true is sinks:
            for name, flagged in (("mask", mask), ("tokens", by_rules)):
                right = int((flagged & true).sum())
                assert of.accuracy[name]["precision"] == pytest.approx(right / int(flagged.sum()))
                assert of.accuracy[name]["recall"] == pytest.approx(right / int(true.sum()))
        assert of.accuracy["mask"]["precision"] > 0.9
