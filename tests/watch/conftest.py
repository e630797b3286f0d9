"""A real small training run that collapses, recorded by the monitor, for the tests of its page."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests import checkpoints
from theodolite.train.monitor import GeometryMonitor, GeometryWarning

IDS = torch.randint(checkpoints.VOCABULARY, (8, 24), generator=torch.Generator().manual_seed(1))
LOOKS = (*range(0, 10), 12, 16, 17, 30)
"""Steps at which the fixture looks, uneven."""


@contextmanager
def training(folder: Path, first: int = 0) -> Iterator[object]:
    """`step(number)`: one step of a training run whose layer 0, head 1 collapses, with a look after it."""
    torch.manual_seed(0)
    model = checkpoints.build("gpt2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = GeometryMonitor(model, IDS[:2], every=1, spectra_every=2, folder=folder)

    def step(number: int) -> float:
        loss = model(input_ids=IDS, labels=IDS).loss
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GeometryWarning)
            monitor(number, loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.transformer.h[0].attn.c_attn.weight[:, 8:16] *= 2
        return float(loss.detach())

    yield step


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `output_dir` of that training run, which has ended."""
    output = tmp_path_factory.mktemp("watched") / "out"
    with training(output / "geometry") as step:
        for number in LOOKS:
            step(number)
    return output
