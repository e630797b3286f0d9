"""Oracles: `transformers`' OPT, torch's own cross-entropy, closed forms of fairseq's source."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from theodolite_papers.localization.decoder import (
    OFFSET,
    Decoder,
    DecoderShape,
    as_opt,
    fairseq_sinusoids,
    next_token_loss,
)

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
