"""Oracles: closed forms, one run against another, `transformers`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.papers.shared import quiet
from theodolite.corpus.documents import Document
from theodolite.errors import UsageError, WorkError
from theodolite_papers.training import command, embedded_text, embedded_training, training_loop
from theodolite_papers.training.embedded_text import Source, mixed_with_tasks, split_sources
from theodolite_papers.training.embedded_training import EmbeddedConfig, train_embedded_model
from theodolite_papers.training.models import embedded_model
from theodolite_papers.training.training_loop import LearningRate

SMALL = EmbeddedConfig(
    layers=1,
    heads=2,
    width=16,
    length=16,
    vocabulary=270,
    batch=4,
    steps=6,
    checkpoint_every=2,
    bfloat16=False,
    repeats=0.0,
    backcopies=0.0,
)


WITH_TASKS = replace(SMALL, repeats=0.3, backcopies=0.3)


def some_text(seed: int, words: int = 120) -> str:
    random = np.random.default_rng(seed)
    return " ".join(random.choice(["alpha", "beta", "gamma", "delta", "(", ")", "\n\n"], size=words))


def sources() -> list[Source]:
    first = tuple(Document(some_text(seed), f"a{seed}") for seed in range(40))
    second = tuple(Document(some_text(100 + seed), f"b{seed}") for seed in range(40))
    return [Source("first", 1.0, first), Source("second", 3.0, second)]


@pytest.fixture(scope="module", autouse=True)
def few_sources() -> Iterator[None]:
    """Two texts in the place of Python's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedded_text, "python_sources", sources)
        yield


@pytest.fixture(scope="module")
def config() -> EmbeddedConfig:
    return WITH_TASKS


@pytest.fixture(scope="module")
def trained(tmp_path_factory, config):
    out = tmp_path_factory.mktemp("trained") / "model"
    return out, train_embedded_model(out, config=config, threads=1, console=quiet())


def test_the_folder_opens_and_gives_the_losses_of_the_result(trained, config):
    out, result = trained
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert model.dtype == torch.float32
    assert (model.config.model_type, model.config.max_position_embeddings) == ("llama", 16)
    assert tokenizer.decode(tokenizer("naïve\n  text")["input_ids"]) == "<|endoftext|>naïve\n  text"
    assert tokenizer.convert_tokens_to_ids("<|endoftext|>") == tokenizer.eos_token_id == 0
    assert result.parameters == sum(p.numel() for p in model.parameters())
    assert result.tokens_seen == 6 * 4 * 16
    _, held = split_sources(sources(), SMALL.seed)
    for source in held:
        total, count = 0.0, 0
        for document in source.documents:
            ids = torch.tensor(tokenizer(document.text, add_special_tokens=False)["input_ids"])
            for start in range(0, len(ids) - 16, 17):
                window = ids[start : start + 17].clone()
                window[0] = 0  # <|endoftext|>
                with torch.no_grad():
                    logits = model(input_ids=window[None, :-1]).logits[0].double().log_softmax(-1)
                total -= float(logits.gather(1, window[1:, None]).sum())
                count += 16
        assert count == result.validation_tokens[source.name]
        assert result.validation_loss[source.name] == pytest.approx(total / count, rel=1e-5)
    assert not list(out.parent.glob("*.partial"))


def test_it_learns_what_a_bigram_model_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Every line repeats two symbols: each follows from the one before the last, whatever the bigrams are.
    random = np.random.default_rng(0)
    pairs = ["".join(random.choice(list("ABCDEFGH"), size=2)) for _ in range(600)]
    documents = tuple(Document(pair * 8, str(number)) for number, pair in enumerate(pairs))
    config = replace(
        SMALL, layers=2, width=32, length=15, vocabulary=257, batch=32, steps=150, learning_rate=1e-2
    )
    monkeypatch.setattr(embedded_text, "python_sources", lambda: [Source("x", 1.0, documents)])
    result = train_embedded_model(tmp_path / "model", config=config, threads=1, console=quiet())
    # A bigram model knows the 8 symbols, and that 1 in 16 ends a line: which none of the held-out ones does.
    assert result.bigram_loss["x"] == pytest.approx(math.log(8 * 16 / 15), abs=0.1)
    # All that a line leaves to chance after its first symbol is the second: log 8 of 15 tokens.
    assert math.log(8) / 15 < result.validation_loss["x"] < 0.6 * result.bigram_loss["x"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"heads": 3}, "width of 16 does not divide into 3 heads"),
        ({"steps": 0}, "steps is 0; it must be positive"),
        ({"vocabulary": 5000}, "not of 5000; ask for a smaller one"),
        ({"length": 100_000}, "one context takes 100001; give more text"),
        (
            {"repeats": 0.7, "backcopies": 0.4},
            "shares of the contexts, at least 0 each and at most 1 together",
        ),
        ({"repeats": -0.1}, "repeats are -0.1 and backcopies 0.0"),
    ],
)
def test_impossible_trainings_are_one_line_and_leave_nothing(tmp_path: Path, change: dict, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        train_embedded_model(tmp_path / "m", config=replace(SMALL, **change), console=quiet())
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_a_broken_loss_and_a_full_disk(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="exists; give another folder"):
        train_embedded_model(tmp_path, config=SMALL, console=quiet())
    at = LearningRate.at
    monkeypatch.setattr(LearningRate, "at", lambda self, step: math.nan)
    with pytest.raises(WorkError, match="loss was nan at step 1"):
        train_embedded_model(tmp_path / "m", config=SMALL, threads=1, console=quiet())
    monkeypatch.setattr(LearningRate, "at", at)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(training_loop, "write_checked", full)
    with pytest.raises(WorkError, match="No space left on device"):
        train_embedded_model(tmp_path / "m", config=SMALL, threads=1, console=quiet())
    assert not (tmp_path / "m").exists()


def test_the_card_states_data_steps_losses_and_the_call(trained, config):
    out, result = trained
    text = (out / "README.md").read_text(encoding="utf-8")
    for name in ("first", "second"):
        assert f"| {result.validation_loss[name]:.3f} | {result.bigram_loss[name]:.3f} |" in text
    assert "6 steps of" in text
    assert "384 tokens in all" in text
    assert (
        "train_embedded_model('model', config=EmbeddedConfig(layers=1, heads=2, width=16, length=16" in text
    )
    assert "In 30% of the contexts" in text
    assert "In 30%, the token before" in text


def test_options_that_are_not_given_are_the_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the configuration that reaches the trainer."""
    asked = []

    def train(out: Path, config: EmbeddedConfig) -> SimpleNamespace:
        asked.append(config)
        return SimpleNamespace(validation_loss={})

    monkeypatch.setattr(command, "train_embedded_model", train)
    for options in ({}, {"steps": 9, "batch": None}):
        command.train_embedded(tmp_path / "m", options, seed=3)
    assert asked == [EmbeddedConfig(seed=3), EmbeddedConfig(steps=9, seed=3)]


def test_a_model_begins_with_the_deviation_that_is_asked_for() -> None:
    """Oracle: the standard deviation of n normal numbers, to four of its standard errors."""
    torch.manual_seed(0)
    embeddings = embedded_model(EmbeddedConfig(initial_deviation=0.07)).get_input_embeddings().weight
    assert float(embeddings.detach().std()) == pytest.approx(0.07, rel=4 / math.sqrt(2 * embeddings.numel()))


def test_the_loss_leaves_out_what_cannot_be_predicted() -> None:
    """Oracle: the mean by hand, of a model that gives each token the same logits."""
    config = replace(SMALL, repeats=1.0)
    logits = torch.randn(16, 270)

    def model(input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        assert not input_ids[:, 0].any()
        return SimpleNamespace(logits=logits.expand(len(input_ids), -1, -1))

    tokens, predictable = mixed_with_tasks(torch.zeros(3, 17, dtype=torch.int64), 7, config, [0, 0])
    expected = [
        float(logits[place].logsumexp(0) - logits[place, row[place + 1]])
        for row, known in zip(tokens, predictable, strict=True)
        for place in range(16)
        if known[place + 1]
    ]
    loss = embedded_training._training_loss(model, (tokens, predictable), config)
    assert len(expected) < 3 * 16
    assert float(loss) == pytest.approx(sum(expected) / len(expected), rel=1e-5)
