"""Oracles: curves whose shape is known in closed form, numpy written out, and transformers' own hidden states."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from theodolite.corpus.corpus import Corpus
from theodolite.theory.smoothness import normalised_gram, sinusoidal
from theodolite_papers.hidden_geometry.positional_basis import roughness, turns
from theodolite_papers.hidden_geometry.separation import CONTEXTS_PER_DOCUMENT, chosen_contexts
from theodolite_papers.hidden_geometry.smoothness import (
    directions_needed,
    norms_and_cosines,
    random_stream,
    spike,
)


def test_roughness_is_one_in_random_order_and_small_on_a_curve():
    """Oracle: E of von Neumann's ratio is 1 for independent draws; on a circle the steps are chords."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(400, 64, 8, generator=generator, dtype=torch.float64)
    ratios = roughness(noise)
    assert ratios.mean() == pytest.approx(1.0, abs=4 * ratios.std() / math.sqrt(400))
    count = 200
    angle = 2 * math.pi * torch.arange(count, dtype=torch.float64) / count
    circle = torch.stack([angle.cos(), angle.sin()], -1)[None]
    chord = (2 * math.sin(math.pi / count)) ** 2
    assert roughness(circle)[0] == pytest.approx(chord / 2 * (count - 1) / count, rel=1e-9)


@pytest.mark.parametrize("wanted", [0.4, 1.0, 3.5])
def test_turns_are_those_of_a_circle_and_none_on_a_line(wanted):
    """Oracle: the angle that was put in (a whole number of turns keeps the centre; others move it a little)."""
    angle = 2 * math.pi * wanted * torch.linspace(0, 1, 400, dtype=torch.float64)
    curve = torch.stack([angle.cos(), angle.sin()], -1)[None]
    if wanted >= 1:
        assert turns(curve)[0] == pytest.approx(wanted, abs=0.1)
    line = torch.stack([angle, 2 * angle], -1)[None]
    assert turns(line)[0] <= 0.5


def test_a_diagonal_stands_out_by_what_lies_beside_it():
    """Oracle: the cosine of two positions of the sinusoidal encoding, Σ cos(Δ·ω)/(d/2), in closed form."""
    positions, width = 96, 32
    gram = normalised_gram(sinusoidal(positions, width))
    frequencies = 10000 ** (-np.arange(0, width, 2) / width)
    assert float(spike(gram)) == pytest.approx(1 - np.cos(3 * frequencies).mean(), rel=1e-9)
    assert float(spike(torch.eye(64, dtype=torch.float64))) == 1.0


def test_directions_needed_count_the_energy():
    """Oracle: a diagonal matrix, whose singular values are its entries."""
    values = torch.tensor([3.0, 2.0, 1.0, 0.5], dtype=torch.float64)  # energies 9, 4, 1, 0.25 of 14.25
    assert int(directions_needed(values.diag())) == 2  # 13/14.25 = 0.91
    assert int(directions_needed(torch.eye(10, dtype=torch.float64))) == 9


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
