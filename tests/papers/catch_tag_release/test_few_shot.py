"""Oracles: answers of the instrument, eager attention of transformers, curves that were made up, numbers by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import transformers

from tests.papers.shared import answers as answers_of
from tests.papers.shared import outcome_of, verdicts_of
from theodolite import Corpus, survey
from theodolite.evaluate.few_shot import MOST_SHOTS, FewShotPrompts, few_shot_answers
from theodolite.models import open_model
from theodolite.models.hooks import Hooks, hooked
from theodolite_papers import EXPERIMENTS, Study
from theodolite_papers.catch_tag_release import few_shot
from theodolite_papers.catch_tag_release.ablated import (
    LayerAttention,
    Reading,
    all_open,
    other_keys,
    read_alone,
    share_hidden,
)
from theodolite_papers.catch_tag_release.few_shot import (
    ATTENDED,
    DENSE,
    EARLIEST,
    HIDDEN,
    OATS,
    OTHERS,
    RANDOM_TERMS,
    TAGS,
    WITHOUT,
    Tag,
    ablations,
    answer,
    answered,
    others_of,
    over_tasks,
    show_ablations,
    show_accuracy,
    tabulated,
    texts_of,
)
from theodolite_papers.catch_tag_release.few_shot import RANDOM as RANDOM_DIRECTIONS

TASKS = ("a",) * 100 + ("b",) * 100
PROMPTS = len(TASKS)


@pytest.fixture(scope="module")
def sharp(checkpoint, tmp_path_factory):
    """A model whose queries look far more sharply than random ones do, so that it has sinks."""
    folder = tmp_path_factory.mktemp("sharp")
    model = transformers.GPTNeoXForCausalLM.from_pretrained(checkpoint("gpt_neox"))
    with torch.no_grad():
        for layer in model.gpt_neox.layers:
            layer.attention.query_key_value.weight.mul_(40)
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(checkpoint("gpt_neox")).save_pretrained(folder)
    return folder


def test_sinks_and_catches_are_those_of_the_models_own_attention(sharp):
    """Oracle: eager attention of transformers, and the criterion: more than 0.3 of the queries' attention."""
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(5, 60, (length,), generator=generator) for length in (40, 31)]
    eager = transformers.GPTNeoXForCausalLM.from_pretrained(sharp, attn_implementation="eager")
    reading = read_alone(open_model(sharp, device="cpu"), texts, slice(0, 2))
    assert any(of.sinks.any() for of in reading.layers.values())
    for place, ids in enumerate(texts):
        length = len(ids)
        with torch.no_grad():
            attentions = eager(ids[None], output_attentions=True).attentions
        queries = torch.arange(length, 0, -1)
        for of_layer, (weights,) in zip(reading.layers.values(), attentions, strict=True):
            mass, sinks = of_layer.mass[place], of_layer.sinks[place]
            np.testing.assert_allclose(mass[:, :length], weights.double().sum(1), rtol=1e-4, atol=1e-4)
            assert not mass[:, length:].any()
            received = weights.double().sum(1) / queries
            received[..., queries - 1 < min(16, length / 4)] = 0.0
            clear = received.sub(0.3).abs() > 1e-4
            assert torch.equal(sinks[:, :length] & clear, (received > 0.3) & clear)
            for head, query in of_layer.caught[place].nonzero().tolist():  # by a later sink that it pays most
                paid = weights[head, query] * sinks[head, :length]
                assert paid[1:].max() > max(float(paid[0]), 0.299)


def test_controls_hide_as_many_other_keys():
    """By hand: of eight keys the first is the sink, the fifth has most of the others' attention; the second head has no
    sink, and nothing of it counts."""
    mass = torch.tensor([[[4.0, 0.5, 0.0, 0.5, 2.0, 0.5, 0.25, 0.25], [8.0, 0, 0, 0, 0, 0, 0, 0]]])
    sinks = torch.zeros(1, 2, 8, dtype=torch.bool)
    sinks[0, 0, 0] = True
    attended, earliest = other_keys(sinks, -mass), other_keys(sinks, torch.arange(8).expand_as(mass))
    assert attended.nonzero().tolist() == [[0, 0, 4]]
    assert earliest.nonzero().tolist() == [[0, 0, 1]]
    nothing = torch.zeros(0, 1, 8, dtype=torch.bool)
    reading = Reading(slice(0, 1), torch.zeros(1, 8), [8], {0: LayerAttention(sinks, mass, sinks)}, nothing)
    assert [float(share_hidden(reading, {0: keys})) for keys in (sinks, attended)] == [0.5, 0.25]
    caught = torch.zeros(2, 8, dtype=torch.bool)
    caught[0, :2], caught[1, :3] = True, True
    others = others_of(caught, torch.zeros_like(caught), [8, 4])
    assert others.sum(dim=1).tolist() == [2, 1]  # the second text has one other token
    assert not (others & caught).any()
    assert not others[1, 4:].any()


class _Outputs(Hooks):
    def __init__(self) -> None:
        self.streams: list[torch.Tensor] = []

    def stream(self, layer, hidden):
        self.streams.append(hidden.clone())


def test_each_prompt_is_answered_with_something_of_its_own_taken_away(sharp):
    """Oracles: untouched, the instrument's answers, however many at once; with a tag taken from the tokens that a later
    sink catches, a stream that differs at these tokens alone behind the first block."""
    model = open_model(sharp, device="cpu")
    prompts = FewShotPrompts.draw(model.tokenizer, 2, seed=1, shots=2)
    direct = np.concatenate(list(few_shot_answers(model, prompts=2, seed=1, shots=2).values()))
    np.testing.assert_array_equal(answer(model, prompts, batch=5), direct)
    texts = texts_of(prompts)
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(2, model.width, generator=generator)
    reading = read_alone(model, texts, slice(0, 3))
    head = int(reading.layers[0].caught.any(dim=2).any(dim=0).nonzero()[0])
    made = ablations(model, [Tag(0, head, *directions)])
    assert list(made) == [DENSE, HIDDEN, EARLIEST, ATTENDED, TAGS, RANDOM_DIRECTIONS, OTHERS]
    streams = {}
    for name, ablation in made.items():
        tap = _Outputs()
        with all_open(ablation(reading)):
            right = answered(model, prompts, reading)
            with hooked(model, tap):
                model.forward(reading.ids)
        streams[name] = tap.streams[1]
        if name == DENSE:
            np.testing.assert_array_equal(right, direct[:3])
    caught = reading.layers[0].caught[:, head]
    sinks = reading.layers[0].sinks[:, head]
    others = others_of(caught, sinks, reading.lengths)
    assert not (others & (caught | sinks)).any()
    for name, tokens in ((TAGS, caught), (RANDOM_DIRECTIONS, caught), (OTHERS, others)):
        moved = (streams[name] - streams[DENSE]).abs().amax(dim=-1) > 1e-6
        assert torch.equal(moved, tokens), name


def test_errors_over_tasks_are_those_of_strata():
    """Oracle: the variance of a mean of means, by hand; a difference between tasks is no error."""
    values, tasks = np.array([0.0, 1.0, 0.0, 1.0, 5.0, 5.0, 5.0]), ["a"] * 4 + ["b"] * 3
    found = over_tasks(values, tasks)
    assert (found.value, found.n) == (2.75, 6)
    assert found.error == pytest.approx(np.sqrt((1 / 3) / 4) / 2)


def test_tables_are_means_of_all_and_of_each_task():
    """Oracle: numpy."""
    tasks = ("a",) * 3 + ("b",) * 4
    prompts = FewShotPrompts(tasks, torch.zeros(7, 1), torch.zeros(7, 17, 2))
    right = np.random.default_rng(0).random((7, 17)) < 0.5
    table = tabulated({"m": right}, prompts).set_index(["task", "shots"])
    assert table.loc[("", 8), "accuracy"] == pytest.approx(right[:, 8].mean())
    assert table.loc[("b", 2), "accuracy"] == pytest.approx(right[3:, 2].mean())
    assert table.loc[("a", 0), "prompts"] == 3


def made_up(start: float, end: float, seed: int = 0) -> np.ndarray:
    """Right answers whose accuracy goes from one value to another with the number of examples."""
    shares = np.linspace(start, end, MOST_SHOTS + 1)
    order = np.random.default_rng(seed).permutation(PROMPTS)
    return order[:, None] < np.round(shares * PROMPTS)


def test_verdicts_follow_the_numbers():
    found = {
        DENSE: made_up(0.1, 0.9),
        OATS: made_up(0.1, 0.8),
        "Wanda": made_up(0.1, 0.4),
        "SparseGPT": made_up(0.02, 0.72),
        "magnitude": made_up(0, 0),
        WITHOUT: made_up(0.1, 0.3),
        RANDOM_TERMS: made_up(0.1, 0.6),
    }
    outcome = outcome_of("sinks/figure3")
    show_accuracy(outcome, found, TASKS)
    assert answers_of(outcome) == ["holds", "holds", "holds", "fails", "not decided", "holds"]
    assert not outcome.unjudged
    floor = outcome_of("sinks/figure3")
    show_accuracy(
        floor, found | {name: made_up(0.0, 0.5) for name in (DENSE, OATS, "Wanda", "SparseGPT")}, TASKS
    )
    assert answers_of(floor)[1] == answers_of(floor)[3] == "not testable here"
    again = outcome_of("sinks/figure3")
    show_accuracy(again, found | {RANDOM_TERMS: made_up(0, 0)}, TASKS)
    assert answers_of(again)[-1] == "not testable here"


def of_curves(curves: dict[str, np.ndarray]) -> list[str]:
    went = dict.fromkeys((HIDDEN, EARLIEST, ATTENDED), "a tenth")
    caught = np.ones(PROMPTS, dtype=bool)
    return answers_of(verdicts_of(show_ablations, curves, TASKS, went, caught, of="sinks/examples"))


def test_verdicts_are_against_the_control_that_costs_most():
    """Of sinks: 0.4 lost after sixteen examples, and 0.1 or 0.2 by the controls. Of tags: 0.2, and 0.1 or 0.3."""
    curves = {
        DENSE: made_up(0.2, 0.9),
        HIDDEN: made_up(0.2, 0.5),
        EARLIEST: made_up(0.2, 0.8),
        ATTENDED: made_up(0.2, 0.7),
        TAGS: made_up(0.2, 0.7),
        RANDOM_DIRECTIONS: made_up(0.2, 0.8),
        OTHERS: made_up(0.2, 0.6),
    }
    assert of_curves(curves) == ["holds", "holds", "fails", "fails"]
    curves |= {
        name: made_up(0.0, of[:, -1].mean()) for name, of in curves.items()
    }  # then nothing can be lost
    assert of_curves(curves)[1] == "not decided"
    curves[ATTENDED] = made_up(0.2, 0.3)
    assert of_curves(curves)[0] == "fails"
    curves[TAGS] = curves[DENSE]  # nobody's answer changed: that is no certainty
    assert of_curves(curves | {OTHERS: curves[DENSE], RANDOM_DIRECTIONS: curves[DENSE]})[2] == "not decided"
    few = np.arange(PROMPTS) < 5
    verdicts = verdicts_of(
        show_ablations,
        curves,
        TASKS,
        dict.fromkeys((HIDDEN, EARLIEST, ATTENDED), ""),
        few,
        of="sinks/examples",
    )
    assert answers_of(verdicts)[2:] == ["not testable here"] * 2


@pytest.mark.slow
def test_the_experiments_run_on_the_embedded_model(monkeypatch):
    """Oracle: the instrument's own answers; it has no massive activation, of which the other experiment would be."""
    model = open_model(device="cpu")
    corpus = Corpus.python_docs(model.tokenizer, 64, 16)
    monkeypatch.setattr(few_shot, "PROMPTS", 2)
    monkeypatch.setattr(few_shot, "TAG_PROMPTS", 2)
    study = Study(survey(model, corpus), model, corpus)
    outcome = study.outcome(EXPERIMENTS["sinks/examples"])
    table = outcome.tables["accuracy"].set_index(["model", "task", "shots"])["accuracy"]
    direct = few_shot_answers(model, prompts=2, seed=few_shot.SEED)
    for task, right in direct.items():
        assert table[DENSE, task, 16] == right[:, 16].mean()
    assert len(outcome.verdicts) == 4
    spikes = study.outcome(EXPERIMENTS["sinks/spikes"])
    assert set(answers_of(spikes)) == {"not testable here"}


def test_tags_that_too_few_contexts_decide_are_not_counted_as_lost(monkeypatch):
    """Oracle: of tags of weights 2, 1 and 1, beside a new one, by hand."""
    statuses = ["survived", "lost", "undecided", "new"]
    table = pd.DataFrame({"tagged_before": [2.0, 1.0, 1.0, 9.0], "status": statuses})
    monkeypatch.setattr(few_shot, "survival_of_tags", lambda before, after: SimpleNamespace(table=table))
    said = few_shot.tags_kept(None, None).replace("\N{NO-BREAK SPACE}", " ")
    assert said == "50 % of their tags, of 25 % it is not known"
    table["tagged_before"] = 0.0
    assert few_shot.tags_kept(None, None) == "none of their tags: it has none"
