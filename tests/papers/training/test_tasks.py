"""Oracles: Python's own addition, `transformers` generating token by token, closed forms, one run against another."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.papers.shared import quiet
from theodolite.errors import UsageError
from theodolite_papers.training.models import PUBLISHED, train_task_model
from theodolite_papers.training.tasks import IGNORED, Additions, Characters

TINY = replace(PUBLISHED["addition"], layers=1, heads=2, width=16, batch=8, steps=6, checkpoint_every=2)


@pytest.fixture
def play(tmp_path: Path) -> Path:
    """A text of three lines, over and over."""
    path = tmp_path / "play.txt"
    path.write_text("To be, or not.\nÀ la carte!\n\n" * 200, encoding="utf-8")
    return path


def test_additions_are_right_and_as_long_as_asked() -> None:
    """Oracle: Python's integers. The digits of the operands are uniform: 4 standard errors of their share."""
    examples = Additions().draw(3000, np.random.default_rng(0))
    sizes = np.zeros(11)
    for example in examples:
        first, second = example.prompt.removesuffix("=").split("+")
        assert int(example.answer.strip()[::-1]) == int(first) + int(second)
        assert example.answer.endswith("\n")
        assert str(int(first)) == first
        assert len(example.answer) - 1 <= 10
        assert len("".join(example)) <= Additions().length == 33
        sizes[len(first)] += 1
    assert sizes[:5].sum() == 0
    # A sum of 11 digits is drawn again, which only happens to the longest operands.
    assert np.abs(sizes[5:9] / 3000 - 1 / 6).max() < 0.05
    one_digit = Additions((1, 1)).draw(200, np.random.default_rng(1))
    assert any(len(example.answer) == 3 for example in one_digit)  # 9+9=81 backwards, and its line break


def test_additions_are_whole_at_full_length_and_cut_below() -> None:
    """Oracle: the text read back; the same seed gives the same contexts."""
    task = Additions()
    corpus = task.corpus(33, 20, 3)
    assert corpus.sha256 == task.corpus(33, 20, 3).sha256 != task.corpus(33, 20, 4).sha256
    for row in corpus.contexts:
        prompt, answer = "".join(task.characters[i] for i in row).split("=")
        first, second = prompt.split("+")
        assert int(first) + int(second) == int(answer.strip()[::-1])
        assert (len(first), len(second), len(answer)) == (10, 10, 11)
    texts = ["".join(task.characters[i] for i in row) for row in task.corpus(24, 50).contexts]
    assert [len(text) for text in texts] == [24] * 50
    assert len({text.index("+") for text in texts}) > 3
    with pytest.raises(UsageError, match="use a --length from 4 to 33"):
        task.corpus(34, 1)


def test_digits_have_a_name_and_a_longest_example() -> None:
    """Oracle: Python's own sums; the largest have all the digits there are."""
    assert Additions.named("addition") == Additions()
    assert Additions.named("docs") is None
    for digits, name, largest in (((10, 10), "addition:10", 9999999999), ((3, 6), "addition:3-6", 499999)):
        task = Additions(digits)
        assert task.name == name
        assert Additions.named(name) == task
        assert task.length == len(f"{largest}+{largest}={2 * largest}\n")
        inputs, _ = task.batch(0, 8, 0)
        assert inputs.shape == (8, task.length - 1)
        assert task.sha256 != Additions().sha256
    for wrong in ("addition:", "addition:0", "addition:6-3", "addition:1-2-3", "addition:x", "addition:99"):
        with pytest.raises(UsageError, match="is not a number of digits"):
            Additions.named(wrong)


def test_a_batch_asks_for_the_answer_and_nothing_else() -> None:
    """Oracle: the text itself, read back."""
    task = Additions()
    inputs, targets = task.batch(3, 16, 0)
    again, _ = task.batch(3, 16, 0)
    other, _ = task.batch(4, 16, 0)
    assert torch.equal(inputs, again)
    assert not torch.equal(inputs, other)
    for row, target in zip(inputs, targets, strict=True):
        asked = target != IGNORED
        answer = "".join(task.characters[i] for i in target[asked])
        prompt = "".join(task.characters[i] for i in row[: int(asked.nonzero()[0]) + 1])
        first, second = prompt.removesuffix("=").split("+")
        assert answer == str(int(first) + int(second))[::-1] + "\n"


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_the_folder_opens_with_the_positions_asked_for(tmp_path: Path, positions: str) -> None:
    """Oracle: `transformers`, and shuffled position ids, which only a model that has positions notices."""
    out = tmp_path / "model"
    result = train_task_model(
        out, Additions(), replace(TINY, positions=positions), threads=1, console=quiet()
    )
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.model_type == {"learned": "gpt2", "rotary": "gpt_neox"}[positions]
    assert ("wpe" in str(model.state_dict().keys())) == (positions == "learned")
    assert result == json.loads((out / "training.json").read_text())
    assert result["parameters"] == sum(p.numel() for p in model.parameters())
    ids = Additions().batch(0, 2, 0)[0]
    positions_apart = torch.arange(32).flip(0).expand(2, -1)
    with torch.no_grad():
        logits, apart = model(ids).logits, model(ids, position_ids=positions_apart).logits
    assert (logits - apart).abs().max() > 1e-4


def test_accuracy_counts_the_answers_that_are_right() -> None:
    """Oracle: a model of three lines that knows addition, but errs on every sum that ends with 7."""

    class Adder(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> object:
            task = Additions()
            logits = torch.zeros(*input_ids.shape, len(task.characters))
            for row, out in zip(input_ids, logits, strict=True):
                text = "".join(task.characters[i] for i in row)
                prompt, written = text.split("=")
                answer = str(sum(map(int, prompt.split("+"))))[::-1] + "\n"
                answer = "0" + answer[1:] if answer[0] == "7" else answer
                out[
                    -1, task.characters.index(answer[len(written)] if len(written) < len(answer) else "0")
                ] = 1
            return type("Output", (), {"logits": logits})

    task = Additions()
    for digits in ((1, 1), (5, 10)):
        examples = Additions(digits).draw(300, np.random.default_rng([*digits, 1 << 40]))
        wrong = sum(example.answer[0] == "7" for example in examples)
        assert wrong > 10
        assert task.accuracy(Adder(), digits, 300) == pytest.approx(1 - wrong / 300)


def test_characters_are_tokens_and_strangers_are_left_out(tmp_path: Path, play: Path) -> None:
    """Oracle: Python's strings, and the loss by transformers on the file's last tenth."""
    out = tmp_path / "model"
    config = replace(TINY, schedule="cosine", bfloat16=False)
    result = train_task_model(out, Characters.of_file(play, 16), config, threads=1, console=quiet())
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.decode(tokenizer("be À€\n")["input_ids"]) == "be À\n"
    text = play.read_text(encoding="utf-8")
    held = text[round(len(text) * 0.9) :]
    windows = torch.tensor(tokenizer(held)["input_ids"])[: len(held) // 17 * 17].view(-1, 17)
    model = AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        logits = model(input_ids=windows[:, :-1]).logits.double().log_softmax(-1)
    wanted = -logits.gather(2, windows[:, 1:, None]).mean()
    assert result["validation_loss"] == pytest.approx(float(wanted), rel=1e-5)


def test_rates_are_as_published() -> None:
    """Closed forms: 100 steps up, then a cosine to a tenth, or a line to nothing."""
    characters, addition = PUBLISHED["characters"], PUBLISHED["addition"]
    assert characters.rate(0) == pytest.approx(1e-5)
    assert characters.rate(99) == characters.rate(100) == 1e-3
    assert characters.rate(2550) == pytest.approx(1e-3 * (0.1 + 0.9 * 0.5))
    assert addition.rate(5050) == pytest.approx(0.5e-4)
    assert addition.rate(9999) == pytest.approx(1e-4 / 9900)
    assert math.isclose(addition.rate(50), 0.51e-4)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"positions": "alibi"}, "choose learned or rotary"),
        ({"steps": 0}, "steps is 0; it must be positive"),
        ({"warm_up": 0}, "warm_up is 0; it must be positive"),
        ({"learning_rate": math.nan}, "the learning rate is nan; it must be above 0 and at most 1"),
        ({"seed": 1 << 32}, "^seed is 4294967296; it must be from 0 to 4294967295.$"),
        ({"threads": 0}, "^threads is 0; it must be positive.$"),
        ({"threads": 100_000}, "^threads is 100000; it must be 1024 at most.$"),
    ],
)
def test_what_cannot_be_trained_is_said_in_a_line(tmp_path, change, says):
    """Oracle: the words."""
    sizes = {name: value for name, value in change.items() if name != "threads"}
    config, running = replace(PUBLISHED["addition"], **sizes), {"threads": change.get("threads", 1)}
    with pytest.raises(UsageError, match=says):
        train_task_model(tmp_path / "m", Additions(), config, console=quiet(), **running)
    with pytest.raises(UsageError, match="cannot be read as UTF-8 text"):
        Characters.of_file(tmp_path / "missing.txt")
    assert not list(tmp_path.iterdir())
