"""Oracles: prompts read back, models that are readers of their own, one run against another."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from theodolite.cli.app import app
from theodolite.corpus.few_shot_task import RULES, TEST_STREAM, prompt_ids
from theodolite.errors import UsageError
from theodolite.evaluate.few_shot import batch_of_prompts, right_answers
from theodolite_papers.training import tasks as few_shot
from theodolite_papers.training.tasks import IGNORED, FewShot


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
    for row, places, label, answers in zip(ids, asked, labels, right, strict=True):
        for word, place in enumerate(places):
            logits = Reader()(row[None, : place + 1], False).logits[0, -1]
            assert bool(answers[word]) == (int(logits[2:5].argmax()) == int(label[word]))
    assert progress == [(0, 20), (7, 20), (14, 20), (20, 20)]


def test_batches_are_positive():
    assert batch_of_prompts(36, None) == 4096 // 36
    assert batch_of_prompts(10**6, None) == 1
    with pytest.raises(UsageError, match="a batch of 0 prompts reads nothing"):
        batch_of_prompts(36, 0)


def test_the_folder_opens_and_says_how_good_the_model_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Oracle: `transformers` on the folder's own tokenizer; by way of the command."""
    monkeypatch.setattr(few_shot, "CHECKED", 40)
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
