"""First-token sinks, drained values and large norms in models of the bigram-backcopy task (Guo et al. 2024).

The models come from `theodolite train backcopy`, in the folders of one folder, each with the weights of evenly spaced
steps. What a head does is measured on one half of the texts, after it was chosen on the other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor

from theodolite.attention.inputs import AttentionInputs
from theodolite.attention.summary import SINK_THRESHOLD
from theodolite.corpus.groups import halves
from theodolite.judging import Criterion, Estimate, all_of, judge
from theodolite.models import OpenModel, open_model
from theodolite.models.hooks import Hooks, hooked
from theodolite.papers.catch_tag_release.backcopy_training import CHECKED, NAME, Backcopy
from theodolite.papers.experiment import Study, experiment, of_models
from theodolite.papers.training.task_models import models_of
from theodolite.report.drawing import sinks as drawing
from theodolite.report.outcome import Outcome
from theodolite.system.progress import ShowStage, shown
from theodolite.system.wording import counted

COMMAND = "theodolite train backcopy"
GUO = "Guo et al. 2024"

MEASURES = {
    "to_first": "attention to the first token from letters, which need no head",
    "to_first_trigger": "attention to the first token from triggers, which need one",
    "value_ratio": "norm of the first token's value over the mean of others",
    "norm_ratio": "norm of the first token in the stream, over the others' mean",
    "first_norm": "norm of the first token in the residual stream",
    "copy_loss": "loss after triggers, nats",
    "bigram_loss": "loss after letters beyond the bigrams' entropy, nats",
}
"""Columns of the table by step, with what they are."""

SINK = Criterion("at least", SINK_THRESHOLD, "mean attention that makes a sink in the literature")
DORMANT = Criterion("more than", 0.0, "more than from triggers")
DRAINED = Criterion("at most", 0.5, "“drained” read as: half the norm of others (ours)")
MASSIVE = Criterion("at least", 3.0, "“peak” read as: three times the norm of others (ours)")
LINEAR = Criterion("within", 0.15, "of one half, what linear growth has (ours)")
SLOWER = Criterion("at most", 0.1, "a tenth of the growth with Adam (ours)")


@dataclass(frozen=True)
class FirstToken:
    """What a model does with the first token: attention by head and layer, norms by residual layer; of each text."""

    to_first: Float64[Tensor, "texts layers heads"]
    to_first_trigger: Float64[Tensor, "texts layers heads"]
    value_ratio: Float64[Tensor, "texts layers heads"]
    first_norm: Float64[Tensor, "texts streams"]
    norm_ratio: Float64[Tensor, "texts streams"]


class _FirstTokenHooks(Hooks):
    def __init__(self, trigger: Tensor, letter: Tensor) -> None:
        self.trigger, self.letter = trigger.double(), letter.double()
        self.heads: list[tuple[Tensor, Tensor, Tensor]] = []
        self.streams: list[tuple[Tensor, Tensor]] = []

    def stream(self, layer: int, hidden: Tensor) -> None:
        norms = hidden.double().norm(dim=-1)
        self.streams.append((norms[:, 0], norms[:, 0] / norms[:, 1:].mean(1)))

    def attention(self, layer: int, inputs: AttentionInputs) -> Tensor:
        weights = inputs.to_keys(torch.arange(inputs.key.shape[2])).double().softmax(-1)
        paid = [
            (weights[..., 0] * chosen[:, None]).sum(-1) / chosen.sum(-1, keepdim=True).clamp_min(1)
            for chosen in (self.letter, self.trigger)
        ]
        norms = inputs.value.double().norm(dim=-1)
        self.heads.append((*paid, norms[..., 0] / norms[..., 1:].mean(-1)))
        return (weights.to(inputs.value.dtype) @ inputs.value).transpose(1, 2)


def first_token(model: OpenModel, task: Backcopy, count: int = CHECKED) -> FirstToken:
    """Measured on texts that no step drew."""
    ids = task.texts(count)[:, :-1]
    trigger = torch.from_numpy(task.is_trigger(ids.numpy()))
    letter = ~trigger
    letter[:, 0] = False
    hooks = _FirstTokenHooks(trigger, letter)
    with hooked(model, hooks):
        model.forward(ids)
    heads = [torch.stack(of_layers, dim=1) for of_layers in zip(*hooks.heads, strict=True)]
    streams = [torch.stack(of_layers, dim=1) for of_layers in zip(*hooks.streams, strict=True)]
    return FirstToken(*heads, *streams)


def backcopy_table(
    folder: Path, show: ShowStage = lambda what, done, total: None, task: Backcopy | None = None
) -> pd.DataFrame:
    """One row per model and step of its series: the `MEASURES`, of one head and one residual layer of each model.

    The head is the one that pays the first token most, and the layer the inner one where the first token's norm stands
    out most, when training ends; both on one half of the texts, of which the other half is measured.
    """
    task = task or Backcopy()
    choose, measured_on = halves(CHECKED)
    rows = []
    for place in shown(models_in(folder), "measuring models", show):
        settings = json.loads((place / "training.json").read_text(encoding="utf-8"))
        steps = sorted((place / "series").iterdir(), key=lambda path: int(path.name))
        last = first_token(open_model(steps[-1], device="cpu"), task)
        of_layers = last.to_first[choose].mean(0)
        layer, head = divmod(int(of_layers.argmax()), of_layers.shape[1])
        inner = last.norm_ratio[choose].mean(0)[
            :-1
        ]  # behind the last block nothing is read but the next token
        stream = int(inner.argmax())
        for path in steps:
            model = open_model(path, device="cpu")
            measures = first_token(model, task)
            rows.append(
                {"folder": place.name, "optimizer": settings["optimizer"], "layers": settings["layers"]}
                | {"seed": settings["seed"], "step": int(path.name), "layer": layer, "head": head}
                | {"stream": stream}
                | {
                    name: float(getattr(measures, name)[measured_on, layer, head].mean())
                    for name in ("to_first", "to_first_trigger", "value_ratio")
                }
                | {
                    name: float(getattr(measures, name)[measured_on, stream].mean())
                    for name in ("norm_ratio", "first_norm")
                }
                | task.losses(model.hf, CHECKED)
            )
    return pd.DataFrame(rows)


@experiment(
    "sinks/backcopy",
    "Why a first-token sink grows: models of bigrams with triggers, over their training",
    "Sinks, drained values and large norms of the first token arise together where a head has nothing to do; the norm "
    f"grows linearly with Adam, not with SGD ({GUO}); the paper's sinks catch, tag and release (section 2)",
    needs=(COMMAND,),
    scaled_down="small models trained here",
)
def backcopy(study: Study, outcome: Outcome) -> None:
    purpose = "sinks/backcopy is read from a folder of training runs"
    folder = study.training_folder(NAME, purpose, COMMAND, outcome)
    show_growth(outcome, backcopy_table(folder, study.show))


def show_growth(outcome: Outcome, table: pd.DataFrame) -> None:
    """Verdicts, levels and curves of models, as `backcopy_table` gives them."""
    outcome.tables["steps"] = table
    last = table.loc[table.groupby("folder")["step"].idxmax()]
    for (optimizer, layers), rows in last.groupby(["optimizer", "layers"]):
        name = _name(optimizer, layers)
        for measure, what in MEASURES.items():
            outcome.read(f"{what}; {name}", str(_over_seeds(rows[measure])))
        _judge_sink(outcome, rows, name)
        if layers > 1:
            _mean(
                outcome,
                f"The first token has a residual-state peak; {name} ({GUO})",
                "norm over the mean of others, in the inner layer where it stands out most",
                rows["norm_ratio"],
                MASSIVE,
            )
    _judge_growth(outcome, table)
    outcome.figure(
        "growth",
        "The first token over training",
        drawing.by_step(table.assign(kind=[*map(_name, table["optimizer"], table["layers"])]), MEASURES),
        "Over the steps, one line per model, on texts that it was not trained on. Head and layer were chosen on "
        "other texts.",
        "attention to the first token that rises as the value drains, and norms that go on growing with AdamW alone.",
        GUO,
        wide=True,
    )


def _name(optimizer: str, layers: int) -> str:
    return f"{counted(layers, 'layer')}, {dict(adamw='AdamW', sgd='SGD')[optimizer]}"


def _mean(outcome: Outcome, claim: str, what: str, values: pd.Series, criterion: Criterion) -> None:
    outcome.claim(claim, f"{what}, mean over models", _over_seeds(values), criterion)


def _over_seeds(values: pd.Series) -> Estimate:
    return Estimate.mean(values, "seeds")


def _judge_sink(outcome: Outcome, rows: pd.DataFrame, name: str) -> None:
    _mean(
        outcome,
        f"The first token is a sink where heads have nothing to do; {name} ({GUO})",
        MEASURES["to_first"],
        rows["to_first"],
        SINK,
    )
    claim = f"The head is dormant at letters and active at triggers; {name} ({GUO})"
    at_letters = judge(
        claim, f"{MEASURES['to_first']}, mean over models", _over_seeds(rows["to_first"]), SINK
    )
    less = _over_seeds(rows["to_first"] - rows["to_first_trigger"])
    what = "attention to the first token from letters less that from triggers, mean over models"
    outcome.verdicts.append(all_of(claim, [at_letters, judge(claim, what, less, DORMANT)]))
    _mean(
        outcome,
        f"The first token's value is drained; {name} ({GUO})",
        MEASURES["value_ratio"],
        rows["value_ratio"],
        DRAINED,
    )


def growth_of(rows: pd.DataFrame) -> tuple[float, float]:
    """Of one model's steps: how much the first token's norm grew, and which share of that in the second half."""
    by_step = rows.sort_values("step").set_index("step")["first_norm"]
    begin, end = by_step.iloc[0], by_step.iloc[-1]
    half = np.interp(by_step.index[-1] / 2, by_step.index, by_step)
    return float(end - begin), float((end - half) / (end - begin))


def _judge_growth(outcome: Outcome, table: pd.DataFrame) -> None:
    grown = pd.DataFrame(
        [
            {"optimizer": optimizer, "layers": layers, "seed": seed}
            | dict(zip(("growth", "late"), growth_of(rows), strict=True))
            for (optimizer, layers, seed), rows in table.groupby(["optimizer", "layers", "seed"])
        ]
    )
    outcome.tables["growth"] = grown
    for layers, rows in grown[grown["layers"] > 1].groupby("layers"):  # a single layer has no inner stream
        by_seed = rows.pivot(index="seed", columns="optimizer", values="growth")
        if "adamw" in by_seed:
            late = rows[rows["optimizer"] == "adamw"]["late"]
            _mean(
                outcome,
                f"With Adam the first token's norm grows linearly; {counted(layers, 'layer')} ({GUO})",
                "share of the growth in the second half of training, less one half",
                late - 0.5,
                LINEAR,
            )
        if {"adamw", "sgd"} <= set(by_seed):
            both = by_seed.dropna()
            _mean(
                outcome,
                f"With SGD the first token's norm does not grow; {counted(layers, 'layer')} ({GUO})",
                "growth with SGD over that with AdamW, paired by seed",
                both["sgd"] / both["adamw"],
                SLOWER,
            )


def models_in(folder: str | Path) -> Sequence[Path]:
    """The models of the task in the folders of a folder, in the order of their names."""
    return [place for place in models_of(folder, NAME) if (place / "series").is_dir()]


def is_backcopy_folder(folder: str | Path) -> bool:
    """Whether a folder has folders of such models."""
    return Path(folder).is_dir() and bool(models_in(folder))


def backcopy_provenance(folder: str | Path) -> dict[str, Any]:
    """The provenance of `sinks/backcopy`."""
    return of_models(folder, models_in(folder), "GPT-2", "backcopy", texts=CHECKED)
