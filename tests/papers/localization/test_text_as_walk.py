"""Oracles: true Gaussian walks (R² 1), independent vectors (autocorrelation −½, no growth), constants, numpy on whole
hidden states, and hidden states that transformers returns itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.papers.shared import assert_whole
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite_papers import Study
from theodolite_papers.catalogue import EXPERIMENTS
from theodolite_papers.localization.text_as_walk import (
    LAGS,
    LEAST_LENGTH,
    MEASURES,
    WalkSums,
    read_walk,
    simulated_walk,
)


def summed(hidden: torch.Tensor, batch: int = 5) -> WalkSums:
    """The sums of (C, T, d) as one layer, read in batches."""
    contexts, length, width = hidden.shape
    sums = WalkSums(1, width, contexts, length)
    for first in range(0, contexts, batch):
        sums.update(0, hidden[first : first + batch], first)
    return sums


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def walk(contexts: int, length: int, width: int) -> torch.Tensor:
    """A walk with an anisotropic Σ; position 0 is left out, so it may be anything."""
    scale = torch.linspace(0.5, 2, width, dtype=torch.float64)
    steps = normal(contexts, length - 1, width) * scale
    return torch.cat([normal(contexts, 1, width, seed=1) * 100, steps.cumsum(1)], 1)


def test_a_true_walk_is_found_to_be_one():
    """Oracle: Assumption 1, simulated: R² = τ/E‖ε‖² = growth = 1, autocorrelation = 0."""
    row = summed(walk(64, 60, 16)).table().iloc[0]
    for name, expected, least in (
        ("r_squared", 1.0, 0.02),
        ("trace_ratio", 1.0, 0.1),
        ("autocorrelation", 0.0, 0.02),
        ("growth", 1.0, 0.1),
    ):
        assert abs(row[name] - expected) < max(least, 4 * row[f"{name}_se"]), name


def test_vectors_that_forget_are_no_walk():
    """Oracle: independent vectors with a common mean: E ε_t·ε_{t+1} = −½E‖ε‖², no growth."""
    row = summed(normal(64, 60, 16) + 3).table().iloc[0]
    assert row["autocorrelation"] == pytest.approx(-0.5, abs=0.02)
    assert abs(row["growth"]) < 0.05
    assert row["r_squared"] < 0.1


def test_sums_are_those_of_numpy_whatever_the_batches():
    """Oracle: numpy on the whole array."""
    hidden = normal(9, 20, 4)
    sums = summed(hidden, batch=4)
    x = hidden[:, 1:].numpy()
    steps = np.diff(x, axis=1)
    np.testing.assert_allclose(sums.gram(0), np.einsum("csd,ctd->st", x, x) / 9)
    flat = steps.reshape(-1, 4)
    np.testing.assert_allclose(sums.covariance(0), flat.T @ flat / len(flat))
    expected = [np.mean((steps[:, : 18 - lag] * steps[:, lag:]).sum(-1)) for lag in range(LAGS + 1)]
    np.testing.assert_allclose(sums.autocorrelations(0), np.array(expected) / expected[0])
    assert sums.steps_shared[0, 5] == 1
    assert sums.steps_shared[5, 18] == 6
    torch.testing.assert_close(summed(hidden, batch=1).gram(0), sums.gram(0))


def test_the_fit_is_that_of_least_squares():
    """Oracle: numpy.linalg.lstsq and its residuals."""
    sums = summed(walk(16, 30, 5) + 1.0)
    row = sums.table().iloc[0]
    gram, shared = sums.gram(0).numpy().ravel(), sums.steps_shared.numpy().ravel()
    (trace,), residual, *_ = np.linalg.lstsq(shared[:, None], gram, rcond=None)
    assert row["r_squared"] == pytest.approx(1 - residual[0] / ((gram - gram.mean()) ** 2).sum())
    steps = torch.diff((walk(16, 30, 5) + 1.0)[:, 1:], dim=1)
    assert row["trace_ratio"] == pytest.approx(trace / float(steps.square().sum(-1).mean()))


def test_standard_errors_are_those_of_repeated_corpora():
    """Oracle: Monte Carlo: the spread of the estimate over corpora drawn anew (an error of 7 degrees of freedom is
    itself known to about 27 %; the mean of 12 to 8 %, their spread to 20 %)."""
    tables = [summed(normal(32, 24, 6, seed=seed)).table() for seed in range(12)]
    values = np.array([table["autocorrelation"][0] for table in tables])
    errors = np.array([table["autocorrelation_se"][0] for table in tables])
    assert np.sqrt((errors**2).mean()) == pytest.approx(values.std(ddof=1), rel=0.6)
    assert summed(normal(5, 24, 6)).table()["r_squared_se"].isna().all()


def test_the_pass_sees_what_the_model_computes(opened):
    """Oracle: hidden states that transformers returns itself; and the length of context that is too short."""
    model = opened("gpt2")
    corpus = Corpus.random_tokens(model.tokenizer, 24, 10)
    read = read_walk(model, corpus, 0)
    with torch.inference_mode():
        states = model.hf.base_model(input_ids=corpus.contexts, output_hidden_states=True).hidden_states
    for layer in range(model.layers):  # the last of them is behind the final norm
        x = states[layer][:, 1:].double()
        expected = torch.einsum("csd,ctd->st", x, x) / 10
        torch.testing.assert_close(read.residual.gram(layer), expected, rtol=1e-5, atol=1e-5)
    norm = model.hf.transformer.h[1].ln_1(states[1])[:, 1:].double()
    expected = torch.einsum("csd,ctd->st", norm, norm) / 10
    torch.testing.assert_close(read.inputs.gram(1), expected, rtol=1e-5, atol=1e-5)
    again = read_walk(model, corpus, 0).inputs.state()
    assert all(torch.equal(again[name], value) for name, value in read.inputs.state().items())
    read_walk(model, Corpus.random_tokens(model.tokenizer, LEAST_LENGTH, 2), 0)
    with pytest.raises(UsageError, match=f"--length {LEAST_LENGTH} or more"):
        read_walk(model, Corpus.random_tokens(model.tokenizer, LEAST_LENGTH - 1, 2), 0)


def test_the_control_walk_has_the_texts_increments(opened):
    """Oracle: a walk with covariance Σ̂ has E‖ε‖² = tr Σ̂, whatever basis it is drawn in."""
    model = opened("gpt2")
    text = read_walk(model, Corpus.random_tokens(model.tokenizer, 40, 32), 0).inputs
    control = simulated_walk(text, 0)
    for layer in range(model.layers):
        simulated, given = (float(sums.covariance(layer).trace()) for sums in (control, text))
        assert simulated == pytest.approx(given, rel=0.1)
    assert (control.table()["r_squared"] > 0.9).all()


def test_the_page_of_the_walk_has_a_text_a_control_and_a_verdict_on_each(surveyed_gpt2):
    run, model, _ = surveyed_gpt2
    outcome = Study(*surveyed_gpt2).outcome(EXPERIMENTS["localization/walk"])
    table = outcome.tables["layers"]
    assert set(table["tokens"]) == {"text", "random tokens", "simulated walk"}
    assert set(MEASURES) < set(table.columns)
    assert len(table) == 3 * model.layers + model.layers + 1
    assert len(outcome.verdicts) == 5
    assert_whole(outcome)
    with pytest.raises(UsageError, match="reads the text of the run again"):
        Study(run, model).outcome(EXPERIMENTS["localization/walk"])
