"""Tables of tags: η² and its error against simulation, its chance against permutations, what is undefined."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from tests.attention.test_catches import random_catches, sums_of_squares
from theodolite.accumulate.tags import HEAD_OUTPUT, Tags, measured, released
from theodolite.attention.catches import Catches
from theodolite.measure.tags import traced_heads, traces, written
from theodolite.theory.unbiased import ratio

LENGTH, WIDTH, D = 20, 4, 10
W_O = torch.randn(2, WIDTH, D, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
Context = tuple[Catches, torch.Tensor, torch.Tensor, torch.Tensor]


def one_context(seed: int, length: int = LENGTH, signal: float = 0.0) -> Context:
    """Catches, outputs and values (heads, T, WIDTH), hidden states (T, D) of a context."""
    generator = np.random.default_rng(seed)
    catches = random_catches(generator, length)
    output, value = (torch.from_numpy(generator.standard_normal((2, length, WIDTH))) for _ in range(2))
    hidden = torch.from_numpy(generator.standard_normal((length, D)))
    for row, own in enumerate(catches.caught):
        output[catches.head[row], own] += signal * row
        hidden[own] += signal * row
    return catches, output, value, hidden


def summed(contexts: list[Context], into: Tags | None = None, numbers: Sequence[int] | None = None) -> Tags:
    """As the tracer adds up contexts of one layer, of at most eight; `numbers`: which ones, in order 0, 1, …"""
    tags = into or Tags(1, WIDTH, 8)
    for number, (catches, output, value, hidden) in zip(
        numbers or range(len(contexts)), contexts, strict=False
    ):
        ids = torch.arange(output.shape[1]) % 3
        sums, place = measured(catches, output, value, W_O @ W_O.mT)
        rows = tags.update(0, catches, ids, sums, number)
        tags.add_place(rows, HEAD_OUTPUT, place, number)
        for layer in (0, 1):
            tags.add_place(rows, 1 + layer, released(catches, hidden * (1 + layer)), number)
    return tags


def tables(tags: Tags, contexts: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Both tables."""
    through = written(tags.state(), 0, W_O)
    table, _ = traces(tags.state(), through, contexts, LENGTH, str)
    heads, _ = traced_heads(tags.state(), through, contexts)
    return table, heads


def test_chance_is_the_mean_over_random_groupings():
    """Oracle: permutations of who is caught, at the head's output through W_O."""
    generator = np.random.default_rng(1)
    contexts = [one_context(seed, signal=1.0) for seed in range(3)]
    heads = tables(summed(contexts), 3)[1]
    for head in (0, 1):
        draws = np.empty(400)
        for number in range(len(draws)):
            pair = np.zeros(2)
            for catches, output, _, _ in contexts:
                counts = catches.counted[head].numpy()
                rows = np.flatnonzero(catches.head == head)
                group = (catches.caught[rows].int() * torch.arange(1, len(rows) + 1)[:, None]).sum(0).numpy()
                shuffled = generator.permutation(group[counts])
                if len(np.unique(shuffled)) < 2:
                    continue
                pair += sums_of_squares((output[head] @ W_O[head]).numpy()[counts], shuffled)
            draws[number] = pair[0] / pair[1]
        chance = heads.tag_chance[head]
        assert abs(draws.mean() - chance) < 4 * draws.std() / math.sqrt(len(draws))
        assert heads.tag[head] > chance + 4 * draws.std()


def test_the_error_of_a_ratio_is_its_scatter_over_samples():
    """Oracle: the scatter of the ratio over fresh samples of contexts, whose sums differ in size and share."""
    generator = np.random.default_rng(2)
    share = generator.beta(4, 3, (8, 3000, 5))
    total = generator.gamma(5, 1, (8, 3000, 5)) * (1 + share)
    b, t = torch.from_numpy(share * total), torch.from_numpy(total)
    found = ratio(b.sum(dim=2), t.sum(dim=2))
    assert float(found.error.mean()) == pytest.approx(float(found.value.std()), rel=0.05)
    # And each interval (Student's t of eight groups) holds the truth about as often as it should.
    truth = float(b.sum() / t.sum())
    within = (found.value - truth).abs() < 2.365 * found.error
    assert float(within.double().mean()) == pytest.approx(0.95, abs=0.02)


def _catching(catches: Catches, all_of_them: bool) -> Catches:
    """The first head's sinks catch every token that is counted, or none."""
    caught = catches.caught.clone()
    caught[catches.of == 0] = False
    caught[0] = catches.counted[0] & all_of_them
    return replace(catches, caught=caught)


@pytest.mark.parametrize("all_of_them", [True, False])
def test_a_sink_that_catches_all_or_none_has_no_tag(all_of_them):
    """With one group there is nothing to compare: no η² (not 0), and such a context does not dilute others'."""
    contexts = [one_context(seed, signal=1.0) for seed in (3, 4)]
    one_group = [(_catching(catches, all_of_them), *rest) for catches, *rest in contexts]
    table, heads = tables(summed(one_group), 2)
    own = table[table["head"] == 0]
    undefined = ["tag", "tag_se", "tag_chance", "tag_shifted", "before", "after", "released", "gain"]
    undefined += ["gain_se", "alignment", "tagged"]
    assert own[undefined].isna().all().all()
    assert (own.released_layer == -1).all()
    assert (own.dimension == -1).all()
    assert own.caught.gt(0).any() == all_of_them
    assert heads.loc[heads["head"] == 0, ["tag", "tag_chance", "after"]].isna().all().all()
    # Beside contexts with two groups.
    alone = tables(summed(contexts), 2)[1].set_index("head")
    both = tables(summed(contexts + one_group), 4)[1].set_index("head")
    for name in ("tag", "tag_chance", "after"):
        assert both.loc[0, name] == pytest.approx(alone.loc[0, name], rel=1e-12), name
