"""Oracles: Adam's first step in closed form with the d×d penalty, `transformers`' attentions, runs against runs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from theodolite.errors import UsageError, WorkError
from theodolite.jobs.job import Unfinished
from theodolite_papers.localization.decoder import (
    OFFSET,
    Decoder,
    DecoderShape,
    as_opt,
    fairseq_sinusoids,
    next_token_loss,
)
from theodolite_papers.localization.locater_training import (
    GridText,
    LocaterTraining,
    Recipe,
    Setting,
    TextFiles,
    kept_text,
    published_rate,
)

RECIPE = Recipe(length=32, batch=4, vocabulary=300, measure_every=5, measured_windows=6, checkpoint_every=4)
SETTING = Setting(layers=2, width=8, scale=100.0, mean=0.5, weight_decay=0.1)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TextFiles:
    """Two texts of drawn words."""
    folder = tmp_path_factory.mktemp("texts")
    random = np.random.default_rng(0)
    words = ["to", "be", "or", "not", "that", "is", "the", "question", "slings", "and", "arrows", "sea"]
    for name, count in (("train.txt", 4000), ("held.txt", 900)):
        drawn = random.choice(words, size=count)
        (folder / name).write_text(" ".join(drawn).replace("sea ", "sea\n"), encoding="utf-8")
    return TextFiles(folder / "train.txt", folder / "held.txt")


@pytest.fixture(scope="module")
def text(files: TextFiles) -> GridText:
    return files.read(RECIPE)


def test_windows_predict_every_token_once(files: TextFiles, text: GridText) -> None:
    """Oracle: the tokenizer's own ids, and the text that they decode to."""
    held = files.held_out.read_text(encoding="utf-8")
    ids = text.tokenizer.encode(held, add_special_tokens=False).ids
    targets = text.held_out[:, 1:].flatten().tolist()
    assert targets == ids[1 : 1 + len(targets)]
    assert len(ids) - 1 - len(targets) < 32
    assert torch.equal(text.held_out[1:, 0], text.held_out[:-1, -1])
    assert text.tokens_per_word == pytest.approx(len(ids) / (len(held.split()) + held.count("\n")))


def test_words_as_published(files: TextFiles, tmp_path: Path) -> None:
    """Oracle: `str.split`: one token a word, one a line end, unknown ones alike; kept and loaded the same."""
    words, work = replace(RECIPE, vocabulary=None), Unfinished(tmp_path, {}, folder=tmp_path / "grid")
    text = kept_text(work, files, words)
    assert text.tokens_per_word == 1
    known = set(files.train.read_text(encoding="utf-8").split())
    assert sorted(text.tokenizer.get_vocab().values()) == list(range(len(known) + 2))
    ids = text.tokenizer.encode("to be\nnever", add_special_tokens=False).ids
    assert [text.tokenizer.id_to_token(i) for i in ids] == ["to", "be", "</s>", "<unk>"]
    loaded = kept_text(work, files, words)
    assert torch.equal(loaded.train, text.train)
    assert loaded.tokenizer.to_str() == text.tokenizer.to_str()
    with pytest.raises(UsageError, match="another text or vocabulary"):
        kept_text(work, files, RECIPE)


def test_texts_that_cannot_be_used(files: TextFiles, tmp_path: Path) -> None:
    """Oracle: the messages."""
    with pytest.raises(UsageError, match="cannot be read"):
        replace(files, held_out=tmp_path / "none.txt").read(RECIPE)
    (tmp_path / "short.txt").write_text("to be or not", encoding="utf-8")
    with pytest.raises(UsageError, match="give a text of 33 or more"):
        replace(files, held_out=tmp_path / "short.txt").read(RECIPE)


def test_an_epoch_takes_a_window_once(text: GridText) -> None:
    """Oracle: sets of windows; another seed and another epoch have another order, another setting the same."""
    per_epoch = len(text.train) // 4
    rows = torch.cat([text.batch(step, 4, seed=0) for step in range(per_epoch)])
    assert len({tuple(row.tolist()) for row in rows}) == len(rows) == per_epoch * 4
    assert not torch.equal(text.batch(0, 4, seed=0), text.batch(per_epoch, 4, seed=0))
    assert not torch.equal(text.batch(0, 4, seed=0), text.batch(0, 4, seed=1))


@pytest.mark.parametrize(("reduction", "share"), [("mean", 1.0), ("sum", 1 / (4 * 32))])
def test_first_step_in_closed_form(reduction, share, text, tmp_path):
    """Oracle: p (1 − rate·decay) − rate·g/(|g| + 1e-8), g by autograd of kept logits and of d×d matrices.

    Against the loss summed over 4 × 32 tokens the penalty weighs so much less.
    """
    recipe = replace(RECIPE, dropout=0.0, bfloat16=False)
    training = LocaterTraining(tmp_path, replace(SETTING, reduction=reduction), recipe, text, "cpu")
    torch.manual_seed(0)
    model = Decoder(training.model.shape)
    window = text.batch(0, 4, 0)
    logits = model.streams(window[:, :-1])[-1] @ model.unembedding.mT
    loss = functional.cross_entropy(logits.mT, window[:, 1:])
    for block in model.blocks:
        matrix = block.projections.weight[:8].mT @ block.projections.weight[8:16]
        loss = loss + share * (100 * matrix.square().sum() + 0.5 * (matrix.trace() - 1) ** 2)
    loss.backward()
    training.trainer.advance(1)
    rate = published_rate(8)
    for (name, before), after in zip(model.named_parameters(), training.model.parameters(), strict=True):
        gradient = before.grad if before.grad is not None else torch.zeros_like(before)
        expected = before * (1 - rate * 0.1) - rate * gradient / (gradient.abs() + 1e-8)
        undecided = (gradient != 0) & (gradient.abs() < 1e-6)  # |g|/(|g| + 1e-8) is decided by rounding
        if name.endswith("projections.bias"):
            undecided[8:16] = (
                True  # of the keys: no logit's softmax depends on them, so that g is rounding alone
            )
        assert undecided.float().mean() < 0.4
        torch.testing.assert_close(after[~undecided], expected[~undecided], rtol=0, atol=0.01 * rate)


def test_training_loss_is_the_mean_since_the_last_measurement(text: GridText, tmp_path: Path) -> None:
    """Oracle: steps one by one without dropout, their losses in float32 by torch."""
    recipe = replace(RECIPE, dropout=0.0, bfloat16=False)
    training = LocaterTraining(tmp_path / "a", SETTING, recipe, text, "cpu")
    losses = []
    for step in range(5):
        window = text.batch(step, 4, 0)
        losses.append(float(training.model.losses(window[:, :-1], window[:, 1:]).mean()))
        training.trainer.advance(step + 1)
    recorded = training.tables()[0].set_index("step")["training_loss"]
    assert recorded[1] == pytest.approx(losses[0], abs=1e-5)
    assert recorded[5] == pytest.approx(np.mean(losses[2:]), abs=1e-5)


def test_measures_against_transformers(text: GridText, tmp_path: Path) -> None:
    """Oracle: the written model's attentions and weights: entropy by scipy's formula, W_QK as a d×d matrix, ρ by
    definition from logits recovered as ln attention (equal up to a constant, which the definition removes)."""
    training = LocaterTraining(tmp_path, replace(SETTING, scale=0.0, mean=0.0), RECIPE, text, "cpu")
    training.trainer.advance(5)
    training.finish()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager").eval()
    windows = text.held_out
    with torch.no_grad():
        attentions = model(input_ids=windows[:4, :-1], output_attentions=True).attentions
        logits = model(input_ids=windows[:, :-1]).logits
    heads = training.tables()[1].set_index(["step", "layer"])
    for layer in range(2):
        weights = attentions[layer][:, 0].double()
        entropy = -torch.xlogy(weights, weights).sum(-1).mean()
        row = heads.loc[(5, layer)]
        assert row["entropy"] == pytest.approx(float(entropy), rel=1e-5)
        attention = model.model.decoder.layers[layer].self_attn
        matrix = (attention.q_proj.weight.mT @ attention.k_proj.weight).double().detach()
        assert row["trace"] == pytest.approx(float(matrix.trace()), rel=1e-4, abs=1e-7)
        assert row["trace_of_square"] == pytest.approx(float((matrix @ matrix).trace()), rel=1e-4, abs=1e-7)
        assert row["frobenius_squared"] == pytest.approx(float(matrix.square().sum()), rel=1e-4)
        last = weights[:, -1].log()
        value = (last - last.mean(-1, keepdim=True) + 1) / 32
        rho = ((value >= 0) & (value <= 1)).double().mean(0)
        measured_rho = load_file(tmp_path / "propagation.safetensors")["propagation"][-1, layer]
        assert (measured_rho - rho).abs().max() <= 0.25  # one context of four may lie on the edge
        assert (measured_rho - rho).abs().mean() < 0.01
    losses = functional.cross_entropy(logits.mT, windows[:, 1:], reduction="none").double().mean(1)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["held_out_loss"] == pytest.approx(float(losses.mean()), rel=1e-5)
    assert summary["held_out_loss_se"] == pytest.approx(
        float(losses.std() / math.sqrt(len(losses))), rel=1e-4
    )
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("to be")["input_ids"]


def test_seeds_pair_the_settings(text: GridText, tmp_path: Path) -> None:
    """Oracle: equality. Settings of one seed begin alike, another seed does not; a penalty changes what follows."""
    settings = {"plain": replace(SETTING, scale=0.0, mean=0.0), "penalised": SETTING}
    settings |= {"printed": replace(SETTING, gradient="published"), "other": replace(SETTING, seed=1)}
    trainings = {
        name: LocaterTraining(tmp_path / name, setting, RECIPE, text, "cpu")
        for name, setting in settings.items()
    }

    def weights() -> dict[str, torch.Tensor]:
        return {name: of.model.blocks[0].projections.weight.clone() for name, of in trainings.items()}

    begin = weights()
    assert torch.equal(begin["plain"], begin["penalised"])
    assert not torch.equal(begin["plain"], begin["other"])
    for training in trainings.values():
        training.trainer.advance(3)
    after = weights()
    assert not torch.equal(after["plain"], after["penalised"])
    assert not torch.equal(after["printed"], after["penalised"])
    first = [trainings[name].history("losses")[0, 1] for name in ("plain", "penalised")]
    assert first[0] == first[1]


def test_refuses(text: GridText, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the messages."""
    LocaterTraining(tmp_path, SETTING, RECIPE, text, "cpu")
    with pytest.raises(UsageError, match=r"training run of another model, corpus or options \(mean 0"):
        LocaterTraining(tmp_path, replace(SETTING, mean=1.0), RECIPE, text, "cpu")
    for wrong, words in (
        (replace(SETTING, width=7), "even width"),
        (replace(SETTING, mean=-1.0), "negative"),
        (replace(SETTING, seed=-1), "seed is -1"),
        (replace(SETTING, reduction="max"), "choose mean or sum"),
    ):
        with pytest.raises(UsageError, match=words):
            LocaterTraining(tmp_path / "no", wrong, RECIPE, text, "cpu")
    broken = LocaterTraining(tmp_path / "nan", SETTING, RECIPE, text, "cpu")
    broken.model.unembedding.data.fill_(math.nan)
    with pytest.raises(WorkError, match="is nan before step 1"):
        broken.trainer.advance(2)


SHAPE = DecoderShape(vocabulary=23, width=16, layers=2, length=32, dropout=0.1)


def made(shape: DecoderShape = SHAPE) -> Decoder:
    torch.manual_seed(0)
    decoder = Decoder(shape).eval()
    for parameter in decoder.parameters():  # norms and biases too away from 1 and 0
        parameter.data += 0.1 * torch.randn_like(parameter)
    return decoder


def test_the_same_function_as_opt(tmp_path: Path) -> None:
    """Oracle: `transformers`' OPT with LayerNorm after its sublayers, written and opened again."""
    decoder = made()
    as_opt(decoder).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    window = torch.randint(0, 23, (3, 33))
    ids, targets = window[:, :-1], window[:, 1:]
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    expected = functional.cross_entropy(logits.mT, targets, reduction="none")
    torch.testing.assert_close(decoder.losses(ids, targets), expected, rtol=1e-5, atol=1e-5)
    loss = decoder.loss(ids, targets, torch.float32)
    torch.testing.assert_close(loss, expected.mean(), rtol=1e-5, atol=1e-5)


def test_loss_and_gradients_in_chunks() -> None:
    """Oracle: torch's cross-entropy and autograd in float64, on a count of tokens that is no multiple of a chunk."""
    torch.manual_seed(1)
    hidden = torch.randn(700, 8, dtype=torch.float64, requires_grad=True)
    matrix = torch.randn(31, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 31, (700,))
    ours = next_token_loss(hidden, matrix, targets, torch.float64)
    theirs = functional.cross_entropy(hidden @ matrix.mT, targets)
    torch.testing.assert_close(ours, theirs)
    gradients = [torch.autograd.grad(3 * loss, (hidden, matrix)) for loss in (ours, theirs)]
    torch.testing.assert_close(gradients[0], gradients[1])


def test_bfloat16_is_close_and_not_biased() -> None:
    """Oracle: float64. The loss within 2e-3, gradients within 1 % of their norm, at the published sizes."""
    torch.manual_seed(2)
    hidden = functional.layer_norm(torch.randn(4096, 32), (32,)).requires_grad_()
    matrix = (torch.randn(2048, 32) * 0.5).requires_grad_()
    targets = torch.randint(0, 2048, (4096,))
    ours = next_token_loss(hidden, matrix, targets, torch.bfloat16)
    exact = functional.cross_entropy(hidden.double() @ matrix.double().mT, targets)
    assert abs(ours.item() - exact.item()) < 2e-3
    for gradients, expected in zip(
        torch.autograd.grad(ours, (hidden, matrix)), torch.autograd.grad(exact, (hidden, matrix)), strict=True
    ):
        assert (gradients - expected).norm() < 0.01 * expected.norm()


def test_positions_are_fairseqs() -> None:
    """Oracle: the formula of fairseq's SinusoidalPositionalEmbedding, entry by entry, with padding index 1."""
    table = fairseq_sinusoids(5, 8)
    for row in range(5):
        for column in range(4):
            angle = (row + OFFSET) * 10000 ** (-column / 3)
            assert math.isclose(table[row, column], math.sin(angle), abs_tol=1e-5)
            assert math.isclose(table[row, column + 4], math.cos(angle), abs_tol=1e-5)


def test_initial_weights_have_fairseqs_spread() -> None:
    """Oracle: variances in closed form (embedding 1/d; xavier with gain 1/√2: 1/(2d)), within five standard errors."""
    torch.manual_seed(3)
    decoder = Decoder(DecoderShape(500, 64, 1, 8, 0.0))
    block = decoder.blocks[0]
    for values, variance in (
        (decoder.embedding, 1 / 64),
        (decoder.unembedding, 1 / 64),
        (block.projections.weight, 1 / 128),
        (block.output.weight, 1 / 64),
    ):
        error = variance * math.sqrt(2 / values.numel())
        assert abs(values.detach().double().var().item() - variance) < 5 * error
    assert not block.output.bias.any()
