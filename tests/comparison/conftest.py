"""The planted model (`tests/planted.py`), and damaged copies of it, surveyed, traced and asked what heads write."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests import planted
from tests.report.drawn import checked_figures as checked_figures
from theodolite.comparison import read_outputs
from theodolite.corpus.corpus import Corpus
from theodolite.models import OpenModel, open_model
from theodolite.passes.run import Run
from theodolite.passes.survey import survey
from theodolite.sinks.trace import trace_sinks

IDS = planted.contexts(16)
CORPUS = Corpus("planted", IDS, torch.full((len(IDS),), -1), [], 0)
TEXT = "To be, or not to be, that is the question:\nwhether 'tis nobler in the mind to suffer\n" * 12


class Pair(NamedTuple):
    """A survey, and the trace and the outputs beside it."""

    run: Run
    trace: Run
    outputs: Run


def damage(model: torch.nn.Module, how: str) -> None:
    """Change the planted GPT-2's weights."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        if how == "destroyed":  # W_Q of head (0, 2), and so its W_QK
            model.transformer.h[0].attn.c_attn.weight[:, 2 * 16 : 3 * 16] = 0
        elif how == "cut off":  # W_O of head (0, 2): what it writes never reaches the stream
            model.transformer.h[0].attn.c_proj.weight[2 * 16 : 3 * 16] = 0
        elif how == "noisy":
            for block in model.transformer.h:
                for weight in (block.attn.c_attn.weight, block.attn.c_proj.weight):
                    weight += 0.01 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        elif how == "random":
            for parameter in model.parameters():
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))


@pytest.fixture(scope="session")
def damaged(tmp_path_factory):
    """damaged(how) → the folder of the planted model, damaged so; "": as it is."""
    root = tmp_path_factory.mktemp("damaged")

    def folder(how: str = "") -> Path:
        path = root / (how or "planted")
        if not path.exists():
            model = planted.build("gpt2")
            damage(model, how)
            model.save_pretrained(path)
        return path

    return folder


@pytest.fixture(scope="session")
def pair(damaged, tmp_path_factory):
    """pair(how) → survey, trace and outputs of that model, from their folders."""
    root = tmp_path_factory.mktemp("runs")
    done: dict[str, Pair] = {}

    def measured(how: str = "") -> Pair:
        if how not in done:
            model: OpenModel = open_model(damaged(how))
            folder = root / (how or "planted")
            survey(model, CORPUS, folder)
            trace_sinks(model, CORPUS, f"{folder}-sinks")
            read_outputs(model, CORPUS, f"{folder}-outputs")
            done[how] = Pair(*(Run.load(f"{folder}{ending}") for ending in ("", "-sinks", "-outputs")))
        return done[how]

    return measured
