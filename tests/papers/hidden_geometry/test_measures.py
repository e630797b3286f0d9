"""Oracles: curves whose shape is known in closed form, numpy written out, and transformers' own hidden states."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.papers.shared import answers
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.judging import FAILS, HOLDS, UNDECIDED, UNTESTABLE
from theodolite.theory.smoothness import normalised_gram, sinusoidal
from theodolite_papers import EXPERIMENTS, Study
from theodolite_papers.hidden_geometry.positional_basis import turns
from theodolite_papers.hidden_geometry.separation import CONTEXTS_PER_DOCUMENT, chosen_contexts
from theodolite_papers.hidden_geometry.smoothness import (
    directions_needed,
    norms_and_cosines,
    random_stream,
    spike,
)


@pytest.mark.parametrize("wanted", [0.4, 1.0, 3.5])
def test_turns_are_those_of_a_circle_and_none_on_a_line(wanted):
    """Oracle: the angle that was put in (a whole number of turns keeps the centre; others move it a little)."""
    angle = 2 * math.pi * wanted * torch.linspace(0, 1, 400, dtype=torch.float64)
    if wanted >= 1:
        assert float(turns(torch.stack([angle.cos(), angle.sin()], -1))) == pytest.approx(wanted, abs=0.1)
    assert turns(torch.stack([angle, 2 * angle], -1)) <= 0.5


def test_a_diagonal_stands_out_by_what_lies_beside_it():
    """Oracle: the cosine of two positions of the sinusoidal encoding, Σ cos(Δ·ω)/(d/2), in closed form."""
    positions, width = 96, 32
    gram = normalised_gram(sinusoidal(positions, width))
    frequencies = 10000 ** (-np.arange(0, width, 2) / width)
    assert float(spike(gram)) == pytest.approx(1 - np.cos(3 * frequencies).mean(), rel=1e-9)
    assert float(spike(torch.eye(64, dtype=torch.float64))) == 1.0


def test_directions_needed_count_the_energy():
    """Oracle: energies 9, 4, 1, 0.25 of 14.25, and ten that are alike."""
    assert directions_needed(torch.tensor([9.0, 13.0, 14.0, 14.25]) / 14.25) == 2  # 13/14.25 = 0.91
    assert directions_needed(torch.arange(1, 11, dtype=torch.float64) / 10) == 9


def test_four_most_frequent_labels_are_chosen_and_grouped():
    labels = np.array([5, 1, 1, -1, 2, 2, 2, 3, 4, 4, 4, 4, -1, 3, *[7] * 40])
    places, of = chosen_contexts(labels)
    assert of == [7] * CONTEXTS_PER_DOCUMENT + [4] * 4 + [2] * 3 + [1] * 2  # 1 before 3, as often
    assert labels[places].tolist() == of


def test_streams_are_the_hidden_states_of_the_model(opened):
    """Oracle: `output_hidden_states` of transformers (its last one is after the final norm, so it is left out)."""
    model = opened("gpt2")
    hidden = random_stream(model, 24, 3)
    ids = Corpus.random_tokens(model.required_vocabulary(), 24, 1, 3).contexts
    with torch.inference_mode():
        theirs = model.hf.base_model(input_ids=ids, output_hidden_states=True).hidden_states
    for layer in range(model.layers):
        torch.testing.assert_close(hidden[layer], theirs[layer][0, 1:].double(), rtol=1e-5, atol=1e-6)
    norms, errors, cosines, cosine_errors = norms_and_cosines(hidden)
    lengths = hidden[1].norm(dim=1).numpy()
    assert norms[1] == pytest.approx(lengths.mean())
    assert errors[1] == pytest.approx(lengths.std(ddof=1) / math.sqrt(23))
    both = [
        torch.nn.functional.cosine_similarity(a, b, dim=0).item() for a, b in zip(*hidden[:2], strict=True)
    ]
    assert cosines[0, 1] == pytest.approx(np.mean(both))
    assert cosine_errors[1, 0] == pytest.approx(np.std(both, ddof=1) / math.sqrt(23))
    np.testing.assert_allclose(np.diag(cosines), 1)


FIGURE_25 = EXPERIMENTS["geometry/figure25"]
FALLING, ALTERNATING = np.linspace(1.0, 0.75, 20), np.tile([0.9, 0.1], 10)


@pytest.mark.parametrize(
    ("share", "previous_token", "expected"),
    [
        (FALLING, FALLING**3, [HOLDS, HOLDS, HOLDS]),  # 16 of 20 heads above 0.8, falling with depth
        (FALLING[::-1] * 0.79, FALLING, [FAILS, UNTESTABLE, FAILS]),
        (FALLING[::-1], FALLING, [HOLDS, FAILS, FAILS]),
        # 10 of 20 heads, 0.07 above 0.43: the share of 20 drawn at 0.43 has an sd of 0.11. Alternating shares have a
        # rank correlation near 0 with anything monotone.
        (ALTERNATING, np.linspace(0, 1, 20), [UNDECIDED, UNDECIDED, UNDECIDED]),
    ],
)
def test_heads_laid_down_are_judged(run, share, previous_token, expected):
    """Oracle: heads whose order is laid down, so that shares and rank correlations are known."""
    heads = run.heads.assign(argmax_property=share, previous_token=previous_token, entropy=-share)
    outcome = Study(replace(run, heads=heads)).outcome(FIGURE_25)
    assert answers(outcome) == expected
    assert f"20 heads above 0.8: {np.mean(share > 0.8):.2g}" in outcome.verdicts[0].evidence
    correlations = outcome.tables["correlations"].set_index("with")["rank_correlation"]
    assert correlations["entropy"] == pytest.approx(-1)
    if share is FALLING:
        assert correlations["previous_token"] == pytest.approx(1)
        assert correlations["layer"] < -0.9


def test_a_run_without_the_column_says_so(run):
    bare = replace(run, heads=run.heads.drop(columns="argmax_property", errors="ignore"))
    with pytest.raises(UsageError, match="'argmax_property', which this run lacks"):
        Study(bare).outcome(FIGURE_25)
