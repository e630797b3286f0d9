"""Shares of logit variance against dense matrices, for every kind of attention; coarser splits."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from tests.accumulate.test_attention import KINDS, make
from theodolite.attention.inputs import AttentionInputs
from theodolite.errors import UsageError
from theodolite.measure.constituents import Constituents, grouped, share_sums, shares_of
from theodolite.theory.decomposition import PARTS, decompose_by_groups
from theodolite.theory.unbiased import Jackknifed

BATCH, HEADS, LENGTH, WIDTH = 3, 4, 150, 8


def _split(kind: str, dtype: torch.dtype = torch.float64):
    """Attention inputs of a kind, and five random parts that sum to its queries and keys."""
    inputs = make(kind, dtype)
    generator = torch.Generator().manual_seed(9)

    def parts(whole):
        drawn = torch.randn(4, *whole.shape, generator=generator, dtype=torch.float64).to(dtype)
        return torch.cat([drawn, (whole - drawn.sum(0))[None]])

    return parts(inputs.query), parts(inputs.key), inputs


def _dense_shares(query, key, inputs, head: int) -> tuple[np.ndarray, float]:
    """Shares of one head by definition: every matrix whole, row by row, in numpy."""
    query = query[:, :, head].double().numpy()
    key = key[:, :, head // (HEADS // key.shape[2])].double().numpy()
    products, additive, total = np.zeros((5, 5)), 0.0, 0.0
    for context in range(BATCH):
        logits = np.einsum("aid,bjd->abij", query[:, context], key[:, context]) * inputs.scaling
        bias = np.zeros((LENGTH, LENGTH))
        if inputs.bias is not None:
            bias = bias + inputs.bias.double().numpy()[0, head]
        whole = logits.sum((0, 1)) + bias
        for i in range(1, LENGTH):
            if inputs.mask is not None:
                seen = inputs.mask.expand(BATCH, HEADS, LENGTH, LENGTH)[context, head, i].numpy().copy()
            else:
                seen = np.arange(LENGTH) <= i if inputs.causal else np.ones(LENGTH, dtype=bool)
            seen[0] = False
            if not seen.any():
                continue
            row = whole[i, seen] - whole[i, seen].mean()
            part = logits[:, :, i, seen]
            products += ((part - part.mean(-1, keepdims=True)) * row).sum(-1)
            additive += float(((bias[i, seen] - bias[i, seen].mean()) * row).sum())
            total += float((row**2).sum())
    return products / total, additive / total


@pytest.mark.parametrize("kind", KINDS)
def test_shares_equal_the_dense_computation(kind):
    """Oracle: numpy on whole matrices."""
    query, key, inputs = _split(kind)
    shares, additive = (of.value for of in shares_of(share_sums(query, key, inputs)))
    for head in range(HEADS):
        expected, expected_additive = _dense_shares(query, key, inputs, head)
        np.testing.assert_allclose(shares[head], expected, rtol=1e-9, atol=1e-12)
        assert float(additive[head]) == pytest.approx(expected_additive, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(shares.sum((1, 2)) + additive, torch.ones(HEADS, dtype=torch.float64))


def test_one_context_has_no_standard_error_and_even_logits_no_shares():
    sizes = {"products": (5, 5), "additive": (), "total": ()}
    sums = {name: torch.zeros(1, 2, *size, dtype=torch.float64) for name, size in sizes.items()}
    assert all(of.value.isnan().all() and of.error.isnan().all() for of in shares_of(sums))


def test_noise_of_means_adds_nothing_to_shares_and_intervals_cover():
    """Oracle: the shares with the planted mean and pos, of 2,000 contexts. Of 16 contexts eight are split, one of each
    group, around the means of the next two groups: content that attends to its like would pass for position else.
    """
    length, width = 24, 24
    draw = functools.partial(torch.randn, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    time = torch.arange(length, dtype=torch.float64)[:, None] / length
    pos = torch.cos(torch.pi * time * torch.tensor([1.0, 2.0, 3.0])).double() @ draw(3, width) / 2
    pos[1:] -= pos[1:].mean(0)
    mean, w_q = draw(width), draw(width, 8) / 5
    w_k = w_q / 2 + draw(width, 8) / 15

    def contexts(count: int) -> torch.Tensor:
        return mean + pos + 0.7 * draw(count, 1, width) + 1.5 * draw(count, length, width)

    def split(h, means, positions, groups) -> dict[str, torch.Tensor]:
        parts = decompose_by_groups(h, means, positions, *groups)
        sides = []
        for w, group in zip((w_q, w_k), groups, strict=True):
            own = parts.mean[group][:, None].expand_as(h), parts.pos[group]
            level = (parts.level - parts.mean[group])[:, None].expand_as(h)
            every = (*own, level, parts.resid(group, len(h)), torch.zeros_like(h))
            sides.append(torch.stack([(part @ w)[:, None] for part in every]))
        inputs = AttentionInputs(sides[0].sum(0), sides[1].sum(0), sides[1].sum(0), 0.35, causal=True)
        return share_sums(*sides, inputs)

    one = torch.zeros(2000, dtype=torch.int64)
    truth = shares_of(split(contexts(2000), mean[None], pos[None], (one, one)))[0].value
    names = ("position", "context", "cross", "pos-pos", "cvec-cvec")
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(200):
        h = contexts(16)
        rows = h.unflatten(0, (8, 2)).mean(1)
        means = rows[:, 1:].mean(1)
        turn = torch.arange(8)
        sums = split(h[::2], means, rows - means[:, None], ((turn + 1) % 8, (turn + 2) % 8))
        of_pairs = shares_of(sums)[0]
        value, without = grouped(of_pairs.value), grouped(of_pairs.without)
        for name in names:
            found[name].append((float(value[name]), float(Jackknifed(value[name], without[name]).error)))
    for name in names:
        value, error = np.array(found[name]).T
        expected = float(grouped(truth)[name])
        assert abs(value.mean() - expected) < 0.1 * error.mean() + 2.5 * value.std() / len(value) ** 0.5, name
        assert 0.9 <= (abs(value - expected) <= 2.365 * error).mean() <= 0.99, name


@pytest.mark.parametrize("groups", [{"a": PARTS[:4]}, {"a": PARTS, "b": ["pos"]}, {"a": [*PARTS, "x"]}])
def test_groups_must_take_each_part_once(groups):
    query = torch.zeros(5, 1, 2, 4, 3, dtype=torch.float64)
    with pytest.raises(UsageError, match="must be in one group"):
        Constituents(PARTS, query, query, make("causal"), 0.0).coarse(groups)
