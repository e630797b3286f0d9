"""Random letters, twice: oracles are the definition, and a reader that looks for what came before."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from theodolite.papers.training.repeats_training import Repeats
from theodolite.papers.training.tasks import IGNORED

TASK = Repeats()


def test_texts_repeat_themselves():
    texts, period = TASK.draw(100, np.random.default_rng(0))
    assert set(period) == set(range(TASK.least, TASK.most + 1))
    for text, distance in zip(texts, period, strict=True):
        assert (text[distance:] == text[:-distance]).all()
    inputs, targets = TASK.batch(0, 100, 0)
    rows, period = TASK.draw(100, np.random.default_rng([0, 0]))
    np.testing.assert_array_equal(inputs, rows[:, :-1])
    for row, asked, distance in zip(rows, targets.numpy(), period, strict=True):
        # The first letter of the repetition cannot be known, all later ones can.
        assert (asked[:distance] == IGNORED).all()
        np.testing.assert_array_equal(asked[distance:], row[distance + 1 :])


def test_an_induction_head_is_right_and_a_guess_is_not():
    """Oracle: what followed the same two letters before; where letters repeat by chance it may be wrong."""

    def induces(input_ids, use_cache):
        logits = torch.zeros(*input_ids.shape, TASK.letters)
        for row, text in enumerate(input_ids.tolist()):
            for place in range(2, len(text)):
                for earlier in range(place - 1, 0, -1):
                    if text[earlier - 1 : earlier + 1] == text[place - 1 : place + 1]:
                        logits[row, place, text[earlier + 1]] = 1.0
                        break
                else:
                    last = [e for e in range(place) if text[e] == text[place]]
                    if last:
                        logits[row, place, text[last[0] + 1]] = 0.5
        return SimpleNamespace(logits=logits)

    def guesses(input_ids, use_cache):
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, TASK.letters))

    assert TASK.accuracy(induces, 32) > 0.95
    assert TASK.accuracy(guesses, 200) == pytest.approx(1 / TASK.letters, abs=0.02)
