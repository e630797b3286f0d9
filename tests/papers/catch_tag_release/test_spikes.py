"""Oracle: numbers that were made up."""

from __future__ import annotations

import numpy as np
import torch

from tests.papers.shared import answers, outcome_of
from theodolite_papers.catch_tag_release import spikes as experiment
from theodolite_papers.catch_tag_release.pruned_sinks import DENSE


def test_verdicts_follow_the_numbers():
    """Made up: held constant nothing is lost; without the activations hardly a sink is left and two nats are lost."""
    costs = {
        DENSE: 0.0,
        "REMOVED": 2.0,
        "DIMENSIONS": 0.1,
        "CONSTANT": 0.0,
        "HIDDEN": 1.0,
        "KEYS": 1.0,
        "BOTH": 0.9,
    }
    noise = 0.01 * torch.randn(40, generator=torch.Generator().manual_seed(0)).double()
    rows = {
        name if name == DENSE else getattr(experiment, name): {
            "loss": (3.0 + cost + noise.roll(place)).numpy(),
            "attention": (0.4 + noise).numpy(),
            "sinks": np.full(40, 20.0 if cost < 2 else 0.5),
        }
        for place, (name, cost) in enumerate(costs.items())
    }
    outcome = outcome_of("sinks/spikes")
    experiment.judge_text(outcome, rows)
    assert answers(outcome) == ["holds", "holds", "holds", "not decided", "fails"]
