"""Few-shot models with their sinks hidden, and without low-rank terms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
import transformers

from tests.papers.shared import answers, quiet, verdicts_of
from theodolite.corpus.few_shot_task import RULES, TEST_STREAM
from theodolite.evaluate.few_shot import few_shot_accuracy
from theodolite.models import open_model
from theodolite_papers.catch_tag_release import few_shot
from theodolite_papers.catch_tag_release import few_shot_ablation as ablation
from theodolite_papers.catch_tag_release.few_shot import PROMPT_SEED
from theodolite_papers.catch_tag_release.few_shot_ablation import (
    ATTENDED,
    DENSE,
    HIDDEN,
    OATS,
    OTHERS,
    RANDOM,
    WITHOUT,
    PromptAttention,
    ablation_table,
    attention_of_prompts,
    other_keys,
    share_of,
    show_ablations,
)
from theodolite_papers.training.tasks import FEW_SHOT, FewShot, train_task_model

COUNT = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    """A model whose queries look far more sharply than those of three steps, so that it has sinks."""
    out = tmp_path_factory.mktemp("trained")
    config = replace(FEW_SHOT, layers=2, heads=2, width=16, batch=4, steps=3, bfloat16=False)
    train_task_model(out / "few-0", FewShot(), config, threads=1, console=quiet())
    model = transformers.GPTNeoXForCausalLM.from_pretrained(out / "few-0")
    with torch.no_grad():
        for layer in model.gpt_neox.layers:
            layer.attention.query_key_value.weight.mul_(40)
    model.save_pretrained(out / "few-0")
    return out


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(ablation, "PROMPTS", COUNT)
    monkeypatch.setattr(few_shot, "CALIBRATION", 32)


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.from_numpy(RULES.draw(COUNT, np.random.default_rng([PROMPT_SEED, TEST_STREAM])).ids)


def test_sinks_are_those_of_the_models_own_attention(folder, ids):
    """Oracle: eager attention of transformers, and the criterion: more than 0.3 of the queries' attention."""
    eager = transformers.GPTNeoXForCausalLM.from_pretrained(folder / "few-0", attn_implementation="eager")
    with torch.no_grad():
        attentions = eager(ids, output_attentions=True).attentions
    length = ids.shape[1]
    queries = torch.arange(length, 0, -1)
    found = attention_of_prompts(open_model(folder / "few-0", device="cpu"), ids, 7)
    assert any(bool(of_layer.sinks.any()) for of_layer in found)
    for of_layer, weights in zip(found, attentions, strict=True):
        np.testing.assert_allclose(of_layer.mass, weights.double().sum(2), rtol=1e-4, atol=1e-4)
        received = weights.double().sum(2) / queries
        received[..., queries - 1 < min(16, length // 4)] = 0.0
        clear = received.sub(0.3).abs() > 1e-4
        assert torch.equal(of_layer.sinks & clear, (received > 0.3) & clear)


def test_the_hardest_control_hides_what_is_attended_most_beside_the_sinks():
    """By hand: of eight keys the first is the sink, the fifth has most of the others' attention, the last two of
    them are too late; the second head has no sink, and nothing of it counts."""
    mass = torch.tensor([[[4.0, 0.5, 0.0, 0.5, 2.0, 0.5, 0.25, 0.25], [8.0, 0, 0, 0, 0, 0, 0, 0]]])
    sinks = torch.zeros(1, 2, 8, dtype=torch.bool)
    sinks[0, 0, 0] = True
    others = other_keys(sinks, -mass)
    assert others.nonzero().tolist() == [[0, 0, 4]]
    attention = [PromptAttention(sinks, mass)]
    assert (share_of(attention, [sinks]), share_of(attention, [others])) == (0.5, 0.25)


def test_every_model_answers_under_every_intervention(folder):
    table = ablation_table(folder)
    assert table.groupby("model", sort=False)["control"].nunique().to_dict() == {
        DENSE: 1, HIDDEN: 1, OTHERS: 2, ATTENDED: 1, OATS: 1, WITHOUT: 1, RANDOM: 2
    }  # fmt: skip
    direct = few_shot_accuracy(open_model(folder / "few-0"), prompts=COUNT, seed=PROMPT_SEED)
    dense = table[table["model"] == DENSE]
    np.testing.assert_array_equal(dense["accuracy"], direct["accuracy"])
    accuracies = table.groupby("model")["accuracy"].apply(list)
    assert accuracies[HIDDEN] != accuracies[DENSE]
    assert accuracies[WITHOUT] != accuracies[OATS]


def made_up(curves: dict[str, list[list[float]]]) -> pd.DataFrame:
    random = np.random.default_rng(0)
    return pd.DataFrame(
        [
            {"model": name, "folder": f"m{seed}", "seed": seed, "control": control, "shots": shots}
            | {
                "accuracy": accuracy + 1e-4 * random.normal(),
                "accuracy_se": 0.01,
                "prompts": COUNT,
                "hidden": 0.0,
            }
            for seed in range(3)
            for name, of_controls in curves.items()
            for control, curve in enumerate(of_controls)
            for shots, accuracy in enumerate(curve)
        ]
    )


def of_curves(curves: dict[str, list[list[float]]]) -> list[str]:
    return answers(verdicts_of(show_ablations, made_up(curves)))


def test_verdicts_are_against_the_control_that_costs_most():
    """Of sinks: 0.4 lost after five examples, and 0 or 0.2 by the controls. Of terms: 0.2, and 0.1 or 0.3."""
    dense = [0.5, 0.6, 0.7, 0.8, 0.85, 0.9]
    curves = {
        DENSE: [dense],
        HIDDEN: [[0.5] * 6],
        OTHERS: [dense, [0.5, 0.5, 0.5, 0.6, 0.65, 0.75]],
        ATTENDED: [[0.5, 0.5, 0.5, 0.6, 0.65, 0.7]],
        OATS: [dense],
        WITHOUT: [[0.5, 0.5, 0.5, 0.6, 0.65, 0.7]],
        RANDOM: [[0.5, 0.6, 0.7, 0.7, 0.75, 0.8], [0.5, 0.5, 0.5, 0.5, 0.55, 0.6]],
    }
    assert of_curves(curves) == ["holds", "holds", "fails", "fails"]
    curves[HIDDEN] = [[0.1, 0.2, 0.3, 0.4, 0.45, 0.5]]  # as much without examples
    assert of_curves(curves)[:2] == ["holds", "fails"]
    # At chance already without examples: what is lost grows with what there was.
    curves[HIDDEN] = [[1 / RULES.values] * 6]
    assert of_curves(curves)[:2] == ["holds", "not decided"]
    curves[ATTENDED] = [[0.5, 0.5, 0.4, 0.4, 0.35, 0.2]]
    assert of_curves(curves)[0] == "fails"
