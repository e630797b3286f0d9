"""Oracles: answers of the instrument, eager attention of transformers, curves that were made up."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from tests.papers.shared import answers as answers_of
from tests.papers.shared import outcome_of, verdicts_of
from theodolite.evaluate.few_shot import MOST_SHOTS, FewShotPrompts, few_shot_answers
from theodolite.models import open_model
from theodolite_papers.catch_tag_release.few_shot import (
    ATTENDED,
    DENSE,
    HIDDEN,
    OATS,
    OTHERS,
    RANDOM,
    WITHOUT,
    PromptAttention,
    answer,
    attention_of_prompt,
    other_keys,
    share_of,
    show_ablations,
    show_accuracy,
    tabulated,
    without_sinks,
)

PROMPTS = 200


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


def test_sinks_are_those_of_the_models_own_attention(sharp):
    """Oracle: eager attention of transformers, and the criterion: more than 0.3 of the queries' attention."""
    ids = torch.randint(5, 60, (40,), generator=torch.Generator().manual_seed(0))
    eager = transformers.GPTNeoXForCausalLM.from_pretrained(sharp, attn_implementation="eager")
    with torch.no_grad():
        attentions = eager(ids[None], output_attentions=True).attentions
    length = len(ids)
    queries = torch.arange(length, 0, -1)
    found = attention_of_prompt(open_model(sharp, device="cpu"), ids)
    assert any(bool(of_layer.sinks.any()) for of_layer in found)
    for of_layer, (weights,) in zip(found, attentions, strict=True):
        np.testing.assert_allclose(of_layer.mass, weights.double().sum(1), rtol=1e-4, atol=1e-4)
        received = weights.double().sum(1) / queries
        received[..., queries - 1 < min(16, length // 4)] = 0.0
        clear = received.sub(0.3).abs() > 1e-4
        assert torch.equal(of_layer.sinks & clear, (received > 0.3) & clear)


def test_the_hardest_control_hides_what_is_attended_most_beside_the_sinks():
    """By hand: of eight keys the first is the sink, the fifth has most of the others' attention, the last two of
    them are too late; the second head has no sink, and nothing of it counts."""
    mass = torch.tensor([[4.0, 0.5, 0.0, 0.5, 2.0, 0.5, 0.25, 0.25], [8.0, 0, 0, 0, 0, 0, 0, 0]])
    sinks = torch.zeros(2, 8, dtype=torch.bool)
    sinks[0, 0] = True
    others = other_keys(sinks, -mass)
    assert others.nonzero().tolist() == [[0, 4]]
    attention = [PromptAttention(sinks, mass)]
    assert (share_of(attention, [sinks]), share_of(attention, [others])) == (0.5, 0.25)


def test_every_prompt_is_answered_with_its_own_sinks_hidden(sharp):
    """Oracle: untouched, the instrument's answers; hidden, other logits."""
    model = open_model(sharp, device="cpu")
    prompts = FewShotPrompts.draw(model.tokenizer, 2, seed=1, shots=2)
    found, shares = without_sinks(model, prompts, lambda what, done, total: None)
    direct = np.concatenate(list(few_shot_answers(model, prompts=2, seed=1, shots=2).values()))
    np.testing.assert_array_equal(found[DENSE][0], direct)
    np.testing.assert_array_equal(answer(model, prompts, batch=5), direct)
    assert {name: len(of) for name, of in found.items()} == {DENSE: 1, HIDDEN: 1, OTHERS: 2, ATTENDED: 1}
    assert shares[HIDDEN] > shares[OTHERS] > 0


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
    }
    outcome = outcome_of("sinks/figure3")
    show_accuracy(outcome, found)
    assert answers_of(outcome) == ["holds", "holds", "holds", "fails", "not decided"]
    assert not outcome.unjudged


def of_curves(curves: dict[str, list[np.ndarray]]) -> list[str]:
    return answers_of(
        verdicts_of(show_ablations, curves, {HIDDEN: 0.5, OTHERS: 0.1, ATTENDED: 0.2}, of="sinks/examples")
    )


def test_verdicts_are_against_the_control_that_costs_most():
    """Of sinks: 0.4 lost after sixteen examples, and 0.1 or 0.2 by the controls. Of terms: 0.2, and 0.1 or 0.3."""
    curves = {
        DENSE: [made_up(0.2, 0.9)],
        HIDDEN: [made_up(0.2, 0.5)],
        OTHERS: [made_up(0.2, 0.9), made_up(0.2, 0.8)],
        ATTENDED: [made_up(0.2, 0.7)],
        OATS: [made_up(0.2, 0.9)],
        WITHOUT: [made_up(0.2, 0.7)],
        RANDOM: [made_up(0.2, 0.8), made_up(0.2, 0.6)],
    }
    assert of_curves(curves) == ["holds", "holds", "fails", "fails"]
    curves[HIDDEN] = [made_up(0.0, 0.5)]  # nothing is right without examples: nothing can be lost
    assert of_curves(curves)[1] == "not decided"
    curves[ATTENDED] = [made_up(0.2, 0.3)]
    assert of_curves(curves)[0] == "fails"
