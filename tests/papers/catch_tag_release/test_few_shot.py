"""Oracles: prompts read back, models that are readers of their own, eager attention, one run against another."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from tests.papers.shared import answers, outcome_of, quiet, verdicts_of
from theodolite.cli.app import app
from theodolite.corpus.few_shot_task import RULES, TEST_STREAM, prompt_ids
from theodolite.errors import UsageError
from theodolite.evaluate.few_shot import batch_of_prompts, few_shot_accuracy, right_answers
from theodolite.models import open_model
from theodolite_papers.catalogue import made_by
from theodolite_papers.catch_tag_release import few_shot
from theodolite_papers.catch_tag_release.few_shot import (
    ATTENDED,
    DENSE,
    HIDDEN,
    OATS,
    OTHERS,
    PROMPT_SEED,
    RANDOM,
    WITHOUT,
    PromptAttention,
    ablation_table,
    attention_of_prompts,
    few_shot_provenance,
    figure_3,
    is_few_shot,
    models_in,
    other_keys,
    share_of,
    shots_table,
    show_ablations,
    show_accuracy,
)
from theodolite_papers.experiment import Outcome, Study
from theodolite_papers.training import tasks
from theodolite_papers.training.tasks import FEW_SHOT, IGNORED, FewShot, train_task_model

COUNT = 40


class Reader(torch.nn.Module):
    """Bayes' reader: it keeps the rules that agree with all examples so far, and knows nothing but the text."""

    device = torch.device("cpu")

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> object:
        rules, prior = RULES.table()
        logits = torch.zeros(*input_ids.shape, len(RULES.characters))
        for row, out in zip(input_ids, logits, strict=True):
            left, item = prior.copy(), {}
            for place, token in enumerate(RULES.characters[i] for i in row):
                if token == "\n":
                    item = {}
                elif token in "abcdef":
                    item["abcdef".index(token) // 3] = "abcdef".index(token) % 3
                elif token in "ABC":
                    left = left * (rules[:, 3 * item[0] + item[1]] == "ABC".index(token))
                elif token == ":":
                    says = rules[:, 3 * item[0] + item[1]]
                    out[place, 2:5] = torch.from_numpy(np.bincount(says, weights=left, minlength=3))
        return type("Output", (), {"logits": logits})


def test_a_batch_asks_for_the_labels_and_nothing_else():
    """Oracle: the text itself."""
    task = FewShot()
    inputs, targets = task.batch(3, 16, 0)
    assert torch.equal(inputs, task.batch(3, 16, 0)[0])
    assert not torch.equal(inputs, task.batch(4, 16, 0)[0])
    assert not torch.equal(inputs, task.batch(3, 16, 1)[0])
    assert inputs.shape == targets.shape == (16, task.length - 1)
    for row, target in zip(inputs, targets, strict=True):
        text = "".join(task.characters[i] for i in row)
        asked = [place for place, character in enumerate(text) if character == ":"]
        assert (target != IGNORED).nonzero().flatten().tolist() == asked
        labels = ["".join(task.characters[i] for i in target[place : place + 1]) for place in asked]
        assert labels[:-1] == [text[place + 1] for place in asked[:-1]]
        assert labels[-1] in "ABC"


def test_bayes_reader_is_as_good_as_is_possible():
    """Oracle: the exact accuracy of `few_shot_task.py`, within 4 standard errors, at every number of examples."""
    accuracy = np.array(FewShot()._accuracy(Reader(), 800))
    best = RULES.best_accuracy()
    assert np.all(np.abs(accuracy - best) < 4 * np.sqrt(best * (1 - best) / 800))


def test_answers_are_right_where_the_reader_is():
    """Oracle: the reader's choice at every colon, one prompt at a time."""
    prompts = RULES.draw(20, np.random.default_rng([5, TEST_STREAM]))
    ids, asked, labels = (torch.from_numpy(part) for part in (prompts.ids, prompts.asked, prompts.labels))
    progress: list[tuple[int, int]] = []
    right = right_answers(
        Reader(),
        ids,
        asked,
        labels,
        RULES.label_ids,
        batch=7,
        show_progress=lambda done, total: progress.append((done, total)),
    )
    for row, places, label, given in zip(ids, asked, labels, right, strict=True):
        for word, place in enumerate(places):
            logits = Reader()(row[None, : place + 1], False).logits[0, -1]
            assert bool(given[word]) == (int(logits[2:5].argmax()) == int(label[word]))
    assert progress == [(0, 20), (7, 20), (14, 20), (20, 20)]
    assert (batch_of_prompts(36, None), batch_of_prompts(10**6, None)) == (4096 // 36, 1)


def test_the_folder_opens_and_says_how_good_the_model_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Oracle: `transformers` on the folder's own tokenizer; by way of the command."""
    monkeypatch.setattr(tasks, "FEW_SHOT_TESTED", 40)
    options = ["--out", str(tmp_path / "a"), "--steps", "4", "--batch", "3", "--seed", "5", "--threads", "1"]
    command = CliRunner().invoke(app, ["train", "few-shot", *options, "--json"])
    assert command.exit_code == 0, command.stderr
    result = json.loads((tmp_path / "a" / "training.json").read_text())
    assert (result["task"], result["steps"], result["batch"], result["seed"]) == ("few-shot", 4, 3, 5)
    said = json.loads(command.stdout)
    lines = said["said"]
    assert len(lines) == 6
    assert (said["folder"], said["training"]) == (str(tmp_path / "a"), result)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert model.config.model_type == "gpt_neox"
    assert model.config.max_position_embeddings == RULES.length
    prompts = RULES.draw(40, np.random.default_rng([0, TEST_STREAM]))
    ids, asked, labels = prompt_ids(prompts, RULES, tokenizer)
    with torch.no_grad():
        logits = model(ids).logits.double()
    for word in range(6):
        chosen = logits[torch.arange(40), asked[:, word]][:, labels].argmax(1).numpy()
        share = (chosen == prompts.labels[:, word]).mean()
        assert result["accuracy_by_shots"][word] == pytest.approx(share)
        assert lines[word].startswith(
            f"{word} example{'s' * (word != 1)}: accuracy {share:.1%} (the best possible: "
        )
    assert result["best_by_shots"] == RULES.best_accuracy().tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    out = tmp_path_factory.mktemp("trained")
    for seed in (0, 1):
        config = replace(FEW_SHOT, layers=1, heads=2, width=16, batch=4, steps=3, seed=seed, bfloat16=False)
        train_task_model(out / f"few-{seed}", FewShot(), config, threads=1, console=quiet())
    (out / "other").mkdir()
    (out / "other" / "training.json").write_text('{"task": "characters"}')
    return out


@pytest.fixture(autouse=True)
def few(monkeypatch):
    sizes = {"PROMPTS": 60, "CALIBRATION": 32, "SPARSITIES": (0.5,), "ABLATION_PROMPTS": COUNT}
    for name, value in sizes.items():
        monkeypatch.setattr(few_shot, name, value)


def shown(table: pd.DataFrame) -> Outcome:
    outcome = outcome_of("sinks/figure3")
    show_accuracy(outcome, table)
    return outcome


def test_every_model_and_method_answers_the_same_prompts(folder):
    assert [place.name for place in models_in(folder)] == ["few-0", "few-1"]
    table = shots_table(folder)
    assert len(table) == 2 * 5 * 6
    dense_rows = table[(table["folder"] == "few-1") & (table["model"] == DENSE)]
    direct = few_shot_accuracy(open_model(folder / "few-1"), prompts=60, seed=PROMPT_SEED)
    np.testing.assert_array_equal(dense_rows["accuracy"], direct["accuracy"])
    np.testing.assert_array_equal(dense_rows["accuracy_se"], direct["accuracy_se"])
    outcome = shown(table)
    assert len(outcome.verdicts) == 5
    assert [exhibit.key for exhibit in outcome.exhibits] == ["accuracy-50"]
    assert {"dense", "OATS", "Wanda"} <= {trace.name for trace in outcome.exhibits[0].figure.data}


def made_up(curves: dict[str, list[list[float]]], spread: float = 1e-4) -> pd.DataFrame:
    """Accuracies of three models, by what was done to them and its controls, after so many examples."""
    random = np.random.default_rng(0)
    rows = [
        (name, f"m{seed}", seed, control, shots, accuracy + spread * random.normal())
        for seed in range(3)
        for name, of_controls in curves.items()
        for control, curve in enumerate(of_controls)
        for shots, accuracy in enumerate(curve)
    ]
    table = pd.DataFrame(rows, columns=["model", "folder", "seed", "control", "shots", "accuracy"])
    return table.assign(accuracy_se=0.01, prompts=60, sparsity=0.5, hidden=0.0)


def test_verdicts_follow_the_numbers():
    curves = {
        "dense": [[0.5, 0.55, 0.6, 0.65, 0.7, 0.75]],
        "OATS": [[0.5, 0.55, 0.6, 0.65, 0.7, 0.72]],
        "Wanda": [[0.5] * 6],
        "SparseGPT": [[0.4, 0.45, 0.5, 0.55, 0.6, 0.62]],
        "magnitude": [[0.4] * 6],
    }
    sharp, blurred = (shown(made_up(curves, spread)) for spread in (1e-4, 0.5))
    # The lead over SparseGPT is the same at 0 and at 5.
    assert answers(sharp) == ["holds", "holds", "holds", "fails", "not decided"]
    assert set(answers(blurred)) == {"not decided"}
    assert not sharp.unjudged


def test_the_folder_is_known_and_others_are_refused(folder):
    assert is_few_shot(folder)
    assert made_by([figure_3]) == "theodolite train few-shot"
    study = Study(few_shot_provenance(folder))
    assert study.provenance["few_shot"]["models"] == ["few-0", "few-1"]
    del study.provenance["few_shot"]
    with pytest.raises(UsageError, match="pass the folder that `theodolite train few-shot` wrote"):
        study.outcome(figure_3)


@pytest.fixture(scope="module")
def sharp_folder(tmp_path_factory: pytest.TempPathFactory):
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


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.from_numpy(RULES.draw(COUNT, np.random.default_rng([PROMPT_SEED, TEST_STREAM])).ids)


def test_sinks_are_those_of_the_models_own_attention(sharp_folder, ids):
    """Oracle: eager attention of transformers, and the criterion: more than 0.3 of the queries' attention."""
    eager = transformers.GPTNeoXForCausalLM.from_pretrained(
        sharp_folder / "few-0", attn_implementation="eager"
    )
    with torch.no_grad():
        attentions = eager(ids, output_attentions=True).attentions
    length = ids.shape[1]
    queries = torch.arange(length, 0, -1)
    found = attention_of_prompts(open_model(sharp_folder / "few-0", device="cpu"), ids, 7)
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


def test_every_model_answers_under_every_intervention(sharp_folder):
    table = ablation_table(sharp_folder)
    assert table.groupby("model", sort=False)["control"].nunique().to_dict() == {
        DENSE: 1, HIDDEN: 1, OTHERS: 2, ATTENDED: 1, OATS: 1, WITHOUT: 1, RANDOM: 2
    }  # fmt: skip
    direct = few_shot_accuracy(open_model(sharp_folder / "few-0"), prompts=COUNT, seed=PROMPT_SEED)
    dense = table[table["model"] == DENSE]
    np.testing.assert_array_equal(dense["accuracy"], direct["accuracy"])
    accuracies = table.groupby("model")["accuracy"].apply(list)
    assert accuracies[HIDDEN] != accuracies[DENSE]
    assert accuracies[WITHOUT] != accuracies[OATS]


def of_curves(curves: dict[str, list[list[float]]]) -> list[str]:
    return answers(verdicts_of(show_ablations, made_up(curves), of="sinks/examples"))


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
