"""Compare QK-Clip where attention collapses with LocAteR, with normalised queries and keys, and with nothing.

`python -m benchmarks.qk_clip --out docs/results/qk-clip.json` trains a small model with each remedy at three
learning rates, and prints a table. Strengths are few and named before: none is chosen
by what comes out.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from theodolite.corpus.python_texts import python_topics
from theodolite.passes.run import versions
from theodolite.train import GeometryMonitor, Locater, QKClip
from theodolite.train.monitor import CONTEXTS, GeometryWarning
from theodolite_papers.training.models import LearningRate, gpt2
from theodolite_papers.training.tasks import Characters
from theodolite_papers.training.trainer import BETAS

LEARNING_RATES = {
    "healthy": LearningRate(1e-3),
    "30 times too high": LearningRate(3e-2),
    "rising to 100 times too high": LearningRate(1e-1, warm_up=300),
}
"""One that is well chosen for this model, one far too high from the first step on, and one whose warm-up leads into
failure: the loss falls as it should before it fails."""

LAYERS, HEADS, WIDTH, BATCH = 3, 4, 64, 16
STEPS, SEEDS, LENGTH = 400, (0, 1, 2), 64

SMOOTHED = 20
"""Steps at the end whose losses are averaged."""

NOTHING = "nothing"


@dataclass(frozen=True)
class Remedy:
    """The measures against collapse; those that are None or False are off."""

    threshold: float | None = None
    scale: float | None = None
    normed: bool = False


REMEDIES = {
    NOTHING: Remedy(),
    "QK-Clip, τ = 100": Remedy(threshold=100.0),
    "QK-Clip, τ = 20": Remedy(threshold=20.0),
    "LocAteR, κ₁ = 0.001": Remedy(scale=1e-3),
    "LocAteR, κ₁ = 0.1": Remedy(scale=1e-1),
    "QK-norm": Remedy(normed=True),
}
"""The paper's threshold and a lower one; strengths of docs/training.md, κ₂ = 0.01 with both."""

MEAN = 1e-2
"""κ₂."""

MEASURES = {
    "loss": "loss, nats per character",
    "largest_logit": "largest logit",
    "entropy": "mean entropy, nats",
}


class NormedQueriesKeys(nn.Module):
    """GPT-2's projection with an RMSNorm of each head's queries and keys, as in Qwen 3: gains over a head's width."""

    def __init__(self, projection: nn.Module) -> None:
        super().__init__()
        self.projection = projection
        self.query_norm, self.key_norm = (nn.RMSNorm(WIDTH // HEADS, eps=1e-6) for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return queries, keys and values side by side."""
        query, key, value = self.projection(hidden).chunk(3, dim=-1)
        query = self.query_norm(query.unflatten(-1, (HEADS, -1))).flatten(-2)
        key = self.key_norm(key.unflatten(-1, (HEADS, -1))).flatten(-2)
        return torch.cat([query, key, value], dim=-1)


def trained(
    task: Characters, remedy: Remedy, rate: Callable[[int], float], seed: int, steps: int
) -> dict[str, Any]:
    """Train once, without weight decay or clipping: the mean loss of the last steps, and the last measurement.

    QK-Clip has a look after every step, and clips by it; the last one is before the last clip.
    """
    torch.manual_seed(seed)
    model = gpt2(len(task.characters), task.length, LAYERS, HEADS, WIDTH)
    for block in model.transformer.h if remedy.normed else ():
        block.attn.c_attn = NormedQueriesKeys(block.attn.c_attn)
    optimizer = torch.optim.AdamW(model.parameters(), betas=BETAS, weight_decay=0.0)
    held_out = torch.from_numpy(task.validation[: CONTEXTS * task.length]).view(CONTEXTS, task.length)
    clip = None if remedy.threshold is None else QKClip(model, remedy.threshold)
    locater = None if remedy.scale is None else Locater(model, remedy.scale, MEAN)
    monitor = GeometryMonitor(model, held_out, every=1 if clip else steps, spectra_every=2 * steps)
    losses: list[float] = []

    def loss_of(step: int) -> Tensor:
        inputs, targets = task.batch(step, BATCH, seed)
        logits = model(input_ids=inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        losses.append(loss.item())
        return loss if locater is None else loss + locater()

    clipped = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GeometryWarning)
        monitor(0)
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
            loss = loss_of(step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor(step + 1)
            clipped += 0 if clip is None else len(clip(monitor.last)) > 0
            if not math.isfinite(losses[-1]):
                break
    look = monitor.last
    assert look is not None
    return {
        "steps": len(losses),
        "loss": float(np.mean(losses[-SMOOTHED:])),
        "largest_logit": float(look.heads["largest_logit"].max()),
        "entropy": float(look.heads["entropy"].mean()),
        "steps_that_clipped": clipped,
    }


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Tabulate means over seeds with their range, and the loss less that of nothing, paired by seed."""
    lines = [
        f"| learning rate | against collapse | {' | '.join(MEASURES.values())} | loss less that of nothing |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    places = dict.fromkeys((run["rate"], run["remedy"]) for run in runs)
    for rate, remedy in places:
        of_seed = {
            name: {run["seed"]: run for run in runs if (run["rate"], run["remedy"]) == (rate, name)}
            for name in (remedy, NOTHING)
        }
        seeds = sorted(of_seed[remedy])
        cells = [_spread([of_seed[remedy][seed][name] for seed in seeds]) for name in MEASURES]
        pairs = [of_seed[remedy][seed]["loss"] - of_seed[NOTHING][seed]["loss"] for seed in seeds]
        first, last = (rate, "") if remedy == NOTHING else ("", _interval(pairs))
        lines.append(f"| {first} | {remedy} | {' | '.join(cells)} | {last} |")
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    mean, low, high = (f"{float(f'{value:.3g}'):,g}" for value in (np.mean(values), min(values), max(values)))
    return f"{mean} ({low}–{high})"


def _interval(values: Sequence[float]) -> str:
    """Format the mean and its 95 % interval (Student's t)."""
    half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5
    return f"{np.mean(values):.2f} ± {half:.2f}".replace("-", "−")


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where the runs go, as JSON")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    task = Characters.of_text("\n\n".join(document.text for document in python_topics()), LENGTH)
    runs = []
    for rate, learning_rate in LEARNING_RATES.items():
        for remedy, what in REMEDIES.items():
            for seed in range(options.seeds):
                numbers = trained(task, what, learning_rate.at, seed, options.steps)
                runs.append({"rate": rate, "remedy": remedy, "seed": seed, **numbers})
                print(runs[-1], file=sys.stderr, flush=True)
    if options.out:
        result = {
            "command": "python -m benchmarks.qk_clip --out docs/results/qk-clip.json",
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "versions": versions(),
            "runs": runs,
        }
        options.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(table(runs))


if __name__ == "__main__":
    main()
