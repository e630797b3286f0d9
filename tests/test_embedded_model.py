"""Oracles: closed forms, one run against another, `transformers`; definitions token by token, binomial shares."""

from __future__ import annotations

import inspect
import math
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.papers.shared import quiet
from theodolite.corpus.documents import Document
from theodolite.errors import UsageError, WorkError
from theodolite_papers.training.models import LearningRate
from tools import embedded_model as embedded
from tools.embedded_model import (
    EmbeddedConfig,
    Source,
    Streams,
    bigram_loss,
    mixed_with_tasks,
    split_sources,
    train_embedded_model,
)

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
        patch.setattr(embedded, "python_sources", sources)
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "model"
    return out, train_embedded_model(out, config=WITH_TASKS, threads=1, console=quiet())


def test_the_folder_opens_and_gives_the_losses_of_the_result(trained):
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
    monkeypatch.setattr(embedded, "python_sources", lambda: [Source("x", 1.0, documents)])
    result = train_embedded_model(tmp_path / "model", config=config, threads=1, console=quiet())
    # A bigram model knows the 8 symbols, and that 1 in 16 ends a line: which none of the held-out ones does.
    assert result.bigram_loss["x"] == pytest.approx(math.log(8 * 16 / 15), abs=0.1)
    # All that a line leaves to chance after its first symbol is the second: log 8 of 15 tokens.
    assert math.log(8) / 15 < result.validation_loss["x"] < 0.6 * result.bigram_loss["x"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"heads": 3}, "width of 16 does not divide into 3 heads"),
        ({"vocabulary": 5000}, "not of 5000; ask for a smaller one"),
        ({"length": 100_000}, "one context takes 100001; give more text"),
    ],
)
def test_impossible_trainings_are_one_line_and_leave_nothing(tmp_path: Path, change: dict, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        train_embedded_model(tmp_path / "m", config=replace(SMALL, **change), console=quiet())
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_and_a_broken_loss_are_refused(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="exists; give another folder"):
        train_embedded_model(tmp_path, config=SMALL, console=quiet())
    monkeypatch.setattr(LearningRate, "at", lambda self, step: math.nan)
    with pytest.raises(WorkError, match="loss was nan at step 1"):
        train_embedded_model(tmp_path / "m", config=SMALL, threads=1, console=quiet())
    assert not (tmp_path / "m").exists()


def test_the_card_states_data_steps_losses_and_the_call(trained):
    out, result = trained
    text = (out / "README.md").read_text(encoding="utf-8")
    for name in ("first", "second"):
        assert f"| {result.validation_loss[name]:.3f} | {result.bigram_loss[name]:.3f} |" in text
    assert "6 steps of" in text
    assert "384 tokens in all" in text
    assert "python -m tools.embedded_model --out model --steps 6 --seed 0 --threads 1" in text
    assert text.count("In 30%") == 2


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
    loss = embedded._training_loss(model, (tokens, predictable), config)
    assert len(expected) < 3 * 16
    assert float(loss) == pytest.approx(sum(expected) / len(expected), rel=1e-5)


def test_documents_that_share_text_or_a_label_stay_together() -> None:
    shared = (
        "This paragraph of more than one hundred and twenty characters occurs in two documents, " + "x" * 40
    )
    texts = [some_text(seed) for seed in range(60)]
    texts[3] += "\n\n" + shared + "\n\nend"
    texts[50] = "start\n\n" + shared.replace(" ", "\n  ")
    first = Source("first", 1.0, tuple(Document(text, f"a{i}") for i, text in enumerate(texts[:30])))
    second = Source("second", 1.0, tuple(Document(text, f"b{i}") for i, text in enumerate(texts[30:])))
    third = Source("third", 1.0, tuple(Document(some_text(200 + i), f"a{i}") for i in range(30)))
    pairs = [({"a3"}, {"b20"}), *(({f"a{i}"}, {f"a{i}"}) for i in range(30))]
    for seed in range(20):
        training, held = split_sources([first, second, third], seed)
        for train_side, out, source in zip(training, held, (first, second, third), strict=True):
            assert {*train_side.documents, *out.documents} == set(source.documents)
            sizes = [sum(len(document.text) for document in side.documents) for side in (out, source)]
            assert 0.0 < sizes[0] / sizes[1] < 0.15
        labels = {document.label for source in held for document in source.documents}
        assert all((left <= labels) == (right <= labels) for left, right in pairs)
        inside = [{document.label for document in source.documents} for source in held]
        assert inside[0] == inside[2]


def test_bigram_loss_is_that_of_counts_by_hand() -> None:
    random = np.random.default_rng(1)
    train = tuple(random.integers(0, 5, size=size).astype(np.int32) for size in (80, 200))
    contexts = torch.from_numpy(random.integers(0, 5, size=(3, 7)))
    streams = Streams(("a", "b"), np.array([0.7, 0.3]), train, (contexts, contexts))
    counts: Counter = Counter()
    for ids, share in zip(train, streams.shares, strict=True):
        for pair in pairwise(ids.tolist()):
            counts[pair] += share * 280 / len(ids)
    total = sum(counts.values())

    def loss(k: float) -> float:
        losses = []
        for row in contexts.tolist():
            for a, b in pairwise(row):
                single = (sum(n for (_, y), n in counts.items() if y == b) + 1) / (total + 5)
                after = sum(n for (x, _), n in counts.items() if x == a)
                losses.append(-math.log((counts[a, b] + k * single) / (after + k)))
        return sum(losses) / len(losses)

    assert bigram_loss(streams, contexts, 5) == pytest.approx(
        min(loss(2.0**n) for n in range(-4, 16)), rel=1e-12
    )


def test_batches_follow_from_seed_and_step_and_keep_the_shares() -> None:
    train = (np.arange(0, 100, dtype=np.int32), np.arange(100, 400, dtype=np.int32))
    streams = Streams(("a", "b"), np.array([0.25, 0.75]), train, ())
    batches = [streams.batch(step, size=16, length=9, seed=0) for step in range(200)]
    assert torch.equal(batches[7], streams.batch(7, size=16, length=9, seed=0))
    assert not torch.equal(batches[7], batches[8])
    assert not torch.equal(batches[7], streams.batch(7, size=16, length=9, seed=1))
    rows = torch.cat(batches)
    assert ((rows.diff(dim=1)) == 1).all()
    share = (rows[:, 0] < 100).double().mean()
    assert abs(share - 0.25) < 4 * math.sqrt(0.25 * 0.75 / len(rows))
    starts = rows[rows[:, 0] < 100][:, 0]
    assert (starts.min(), starts.max()) == (0, 90)


def test_tasks_are_mixed_in_as_often_as_they_should_and_as_they_are_said_to_be() -> None:
    """Oracle: the definitions, token by token; binomial shares."""
    config = EmbeddedConfig(repeats=0.25, backcopies=0.25, vocabulary=500)
    text = torch.arange(1000, 1065).repeat(4000, 1)
    tokens, predictable = mixed_with_tasks(text.clone(), 7, config, [0, 5])
    again, _ = mixed_with_tasks(text.clone(), 7, config, [0, 5])
    other, _ = mixed_with_tasks(text.clone(), 7, config, [0, 6])
    assert torch.equal(tokens, again)
    assert not torch.equal(tokens, other)
    kinds, periods, triggers = Counter(), list[int](), 0
    for row, known in zip(tokens.tolist(), predictable.tolist(), strict=True):
        if max(row[1:]) < 500:
            kinds["random repeat"] += 1
            period = known.index(True, 1) - 1
            periods.append(period)
            assert min(row[1:]) >= 1
            assert known == [True] + [False] * period + [True] * (64 - period)
            assert row[1 + period :] == row[1:-period]
        elif all(known) and row.count(1001) > 1:
            kinds["repeat of text"] += 1
            period = row.index(1001, 2) - 1
            assert 8 <= period <= 32
            assert row[1:] == [1001 + place % period for place in range(64)]
        elif 7 in row:
            kinds["backcopy"] += 1
            places = [place for place, token in enumerate(row) if token == 7]
            triggers += len(places)
            expected = list(range(1000, 1065))
            for place in places:
                expected[place : place + 2] = [7, row[place - 1]]
                assert row[place - 1] == 1000 + place - 1
            assert row == expected
            assert [place for place, is_known in enumerate(known) if not is_known] == places
        else:
            assert row == list(range(1000, 1065))
            assert all(known)
    for kind, share in {"random repeat": 1 / 6, "repeat of text": 1 / 12, "backcopy": 1 / 4}.items():
        assert abs(kinds[kind] / 4000 - share) < 4 * math.sqrt(share * (1 - share) / 4000)
    assert (min(periods), max(periods)) == (8, 32)
    assert triggers / kinds["backcopy"] == pytest.approx(0.2 * 21, rel=0.05)


def test_docstrings_are_those_that_inspect_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Document(Path(textwrap.__file__).read_text(encoding="utf-8"), "textwrap.py")
    monkeypatch.setattr(embedded, "stdlib_sources", lambda: [source])
    prose = {document.label: document.text for document in embedded.stdlib_docstrings()}["textwrap.py"]
    shown = (textwrap, textwrap.TextWrapper, textwrap.TextWrapper.fill, textwrap.wrap, textwrap.dedent)
    places = [prose.index(inspect.getdoc(thing) or "?") for thing in shown]
    assert places == sorted(places)  # in reading order
    assert embedded.docstrings("def f(:") == ""
