"""The task and both architectures: against the construction of the theorem, against torch's own attention, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from theodolite_papers.catch_tag_release.averaging_model import averaging_model
from theodolite_papers.catch_tag_release.averaging_training import (
    FREE_ATTENTION,
    LENGTH,
    WIDTH,
    AveragingRecipe,
    PublishedModel,
    StandardModel,
    attention_to_separator,
    build,
    draw,
    sink_penalty,
    train_averaging,
)

SMALL = AveragingRecipe("standard", WIDTH, 200, 32, 0.01)


def generators(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def constructed(built, s_tag: float) -> PublishedModel:
    """The paper's architecture with the weights of the theorem's construction."""
    model = PublishedModel(generators(0))
    with torch.no_grad():
        model.value_1.copy_(built.value_1)
        model.query_2.copy_(built.query_key)
        model.key_2.copy_(torch.eye(2))
        model.value_2.copy_(built.value_2)
        model.s_num.fill_(0)
        model.s_tag.fill_(s_tag)
    return model


def test_the_papers_architecture_holds_the_construction() -> None:
    """Oracle: `averaging_model`, whose own oracle is numpy."""
    built = averaging_model(9.0, 0.5, 2.0)
    model = constructed(built, 9).double()
    numbers, places = draw(generators(1), 50)
    forward_pass, known = model(numbers.double(), places), built(numbers.double(), places)
    torch.testing.assert_close(forward_pass.output, known.output)
    torch.testing.assert_close(forward_pass.attention, known.attention)
    torch.testing.assert_close(forward_pass.hidden, known.hidden)


@pytest.mark.parametrize("normed", [False, True])
def test_the_standard_architecture(normed: bool) -> None:
    """Oracle: torch's `scaled_dot_product_attention` and `rms_norm` on one sequence of one seed."""
    model = StandardModel(generators(0, 1), normed=normed)
    numbers, places = draw(generators(2, 3), 4)
    row, place = numbers[1, 2], int(places[1, 2])
    matrix = {name: value[1, 0] for name, value in model.matrices.items()}
    stream = row[:, None] * model.slope[1, 0] + model.constant[1, 0]
    stream = torch.cat([stream[:place], model.separator[1, 0], stream[place + 1 :]])
    for layer in (1, 2):
        query, key, value = (stream @ matrix[f"{what}_{layer}"] for what in ("query", "key", "value"))
        if normed and layer == 2:
            query, key = (torch.nn.functional.rms_norm(part, (WIDTH,), eps=1e-6) for part in (query, key))
        heads = (part[None] for part in (query, key, value))
        stream = stream + scaled_dot_product_attention(*heads, is_causal=True)[0] @ matrix[f"output_{layer}"]
    targets = stream[-1] @ model.readout[1, 0]
    torch.testing.assert_close(model(numbers, places).output[1, 2], targets[0], rtol=1e-4, atol=1e-5)


def test_hiding_and_projecting() -> None:
    """[SEP] gets nothing from later tokens, earlier ones do not notice, and nothing is left along the direction."""
    model = StandardModel(generators(0, 1))
    numbers, places = draw(generators(2, 3), 20)
    direction = torch.nn.functional.normalize(torch.randn(2, WIDTH, generator=generators(4)[0]), dim=-1)
    forward_pass, blind_pass = model(numbers, places), model(numbers, places, hide_separator=True)
    after = torch.arange(LENGTH) > places[..., None]
    assert (attention_to_separator(blind_pass, places) * after).abs().max().item() == 0
    assert torch.equal(blind_pass.attention[~after], forward_pass.attention[~after])
    torch.testing.assert_close(blind_pass.attention.sum(-1), torch.ones(2, 20, LENGTH))
    written = model(numbers, places, ablated=direction).written
    assert (written @ direction[:, None, :, None]).abs().max().item() < 1e-5


@pytest.mark.parametrize("recipe", [SMALL, AveragingRecipe("published", 2, 200, 32, 0.05, penalised=True)])
def test_the_first_steps_by_hand(recipe: AveragingRecipe) -> None:
    """Oracle: one seed by itself in float64, Adam, clipping and schedule written out; the penalty has its own test."""
    trained = train_averaging(recipe, (7,), steps=10)
    source = generators(7)
    model = build(recipe, source).double()
    parameters = list(model.parameters())
    first, second = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    losses = []
    for step in range(10):
        numbers, places = draw(source, recipe.batch)
        done = model(numbers.double(), places)
        targets = [row[place + 1 :].mean() for row, place in zip(numbers[0].double(), places[0], strict=True)]
        loss = (done.output[0] - torch.stack(targets)).square().mean()
        losses.append(loss.item())
        charged = loss + (sink_penalty(done, places) if recipe.penalised else 0)
        gradients = torch.autograd.grad(charged, parameters)
        length = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        rate = recipe.rate * (step + 1) / 50 * (0.02 + 0.98 * (1 + math.cos(math.pi * step / 10)) / 2)
        with torch.no_grad():
            for p, g, m, v in zip(parameters, gradients, first, second, strict=True):
                g = g * min(1.0, 1.0 / length)
                m.mul_(0.9).add_(0.1 * g)
                v.mul_(0.999).add_(0.001 * g**2)
                p -= rate * (m / (1 - 0.9 ** (step + 1))) / ((v / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8)
    assert trained.losses[0, 0].item() == pytest.approx(sum(losses) / 10, rel=1e-4)
    for ours, theirs in zip(trained.model.parameters(), parameters, strict=True):
        torch.testing.assert_close(ours.double(), theirs.detach(), rtol=1e-3, atol=1e-4)


def test_seeds_do_not_know_of_each_other() -> None:
    """Oracle: a seed trained alone; only the order of sums differs."""
    together, alone = (train_averaging(SMALL, seeds, steps=20) for seeds in ((3, 4), (4,)))
    for both, parameter in zip(together.model.parameters(), alone.model.parameters(), strict=True):
        torch.testing.assert_close(both[1], parameter[0], rtol=1e-3, atol=1e-4)


def test_the_charge_for_attention() -> None:
    """Oracle: one sequence after the other, by hand; nothing where [SEP] is hidden."""
    model = StandardModel(generators(0))
    with torch.no_grad():
        model.separator.mul_(-20)  # a sink for some
    numbers, places = draw(generators(1), 40)
    forward_pass = model(numbers, places)
    targets = 0.0
    for attention, place in zip(forward_pass.attention[0].tolist(), places[0].tolist(), strict=True):
        paid = [row[place] for row in attention[place + 1 :]]
        targets += max(0.0, sum(paid) / len(paid) - FREE_ATTENTION) / 40
    assert targets > 0
    assert sink_penalty(forward_pass, places).item() == pytest.approx(targets, rel=1e-4)
    assert sink_penalty(model(numbers, places, hide_separator=True), places).item() == 0
