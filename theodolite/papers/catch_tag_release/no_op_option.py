"""Do sinks need the tag? Models whose heads have a no-op option, and models whose heads have none.

A head that has nothing to add must still pay its attention to something. If that were all that sinks are for, a head
with a no-op option that carries no value (a softmax off by one, a learned sink logit) would form none. The paper's
sinks write a tag, which no no-op option can do. The models come from `theodolite train escape`;
those of a seed saw the same tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from theodolite.attention.inputs import AttentionInputs
from theodolite.attention.summary import SINK_THRESHOLD, least_queries
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.judging import Criterion, Estimate
from theodolite.models import OpenModel, open_model
from theodolite.models.hooks import Hooks, hooked
from theodolite.papers.catch_tag_release.no_op_training import CLAIM, held_out_of, place_of
from theodolite.papers.experiment import Study, experiment, of_trainings
from theodolite.papers.training.models import NO_OPS
from theodolite.report.drawing import sinks as drawing
from theodolite.report.measures import ZHANG
from theodolite.report.outcome import Outcome
from theodolite.sinks.trace import trace_sinks
from theodolite.system.progress import ShowStage, shown
from theodolite.system.wording import counted, number

COMMAND = "theodolite train escape"

CONTEXTS = 256
"""Of each seed's held-out text that its models are measured on."""

BATCH = 32

NAMES = {
    "none": "plain softmax",
    "off-by-one": "softmax off by one",
    "learned": "learned sink logit",
}

MEASURES = {
    "loss": "held-out loss, nats per token",
    "sinks": "share of (context, head) pairs with a sink",
    "stretches": "share of (context, head) pairs with a sink, local ones included",
    "caught": "share of queries that a sink catches",
    "tag": "η² of the head's output by being caught, mean over caught queries",
    "first": "attention to the first token",
    "most_first": "attention to the first token, of the head that pays it most",
    "escaped": "attention that goes to no token",
    "massive": "largest entry of the residual stream over the median",
}
"""Columns of the table, with what they are."""

HALF_OF_SINKS = Criterion(
    "at least", 0.5, "“need” read as: half of the sinks remain with a no-op option (ours)"
)
NO_WORSE = Criterion("at least", -0.02, "no worse by more than 0.02 nats (ours)")


class _NoOpHooks(Hooks):
    """Of one model: by head, attention to the first token and to none, and contexts with a sink; the stream's peak."""

    def __init__(self, layers: int, heads: int) -> None:
        zeros = torch.zeros(layers, heads, dtype=torch.float64)
        self.first, self.escaped, self.sinks, self.stretches = (zeros.clone() for _ in range(4))
        self.massive: list[Tensor] = []

    def stream(self, layer: int, hidden: Tensor) -> None:
        sizes = hidden.abs().flatten(1)
        self.massive.append(sizes.amax(1) / sizes.median(1).values)

    def attention(self, layer: int, inputs: AttentionInputs) -> Tensor:
        length = inputs.key.shape[2]
        logits = inputs.to_keys(torch.arange(length)).double()
        assert inputs.sink is not None
        column = inputs.sink.double().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        weights = torch.cat([logits, column], -1).softmax(-1)
        to_no_op, weights = weights[..., -1], weights[..., :-1]
        self.first[layer] += weights[:, :, 1:, 0].mean(2).sum(0)  # position 0 sees nothing else
        self.escaped[layer] += to_no_op[:, :, 1:].mean(2).sum(0)
        global_sinks, local_sinks = sinks_of(weights)
        self.sinks[layer] += global_sinks.any(-1).sum(0)
        self.stretches[layer] += (global_sinks | local_sinks).any(-1).sum(0)
        return (weights.to(inputs.value.dtype) @ inputs.value).transpose(1, 2)


def sinks_of(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Which keys are sinks, and which catch a stretch: (contexts, heads, T), of attention (contexts, heads, T, T).

    Read off whole matrices, by the criteria of `accumulate.catches`.
    """
    length = weights.shape[-1]
    queries_of_key = torch.arange(length, 0, -1)
    global_sinks = (weights.sum(2) / queries_of_key > SINK_THRESHOLD) & (
        queries_of_key - 1 >= least_queries(length)
    )
    highest, best_key = weights.max(-1)
    catches = (highest > SINK_THRESHOLD) & (best_key != torch.arange(length))
    caught_queries = torch.zeros_like(highest).scatter_add_(2, best_key, catches.to(highest.dtype))
    return global_sinks, caught_queries >= least_queries(length)


def measured(model: OpenModel, corpus: Corpus) -> dict[str, float]:
    """The `MEASURES` of one model."""
    contexts, length = corpus.contexts.shape
    sums, loss = _NoOpHooks(model.layers, model.heads), 0.0
    with hooked(model, sums):
        for ids in corpus.contexts.split(BATCH):
            logits = model.logits(ids)[:, :-1].double()
            loss += float(cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"))
    trace = trace_sinks(model, corpus, stretches=True)
    tokens = trace.traces[(trace.traces["kind"] != "learned") & trace.traces["tag"].notna()]
    caught = trace.traces[trace.traces["kind"] != "learned"]["caught"]
    return {
        "loss": loss / (contexts * (length - 1)),
        "sinks": float(sums.sinks.mean()) / contexts,
        "stretches": float(sums.stretches.mean()) / contexts,
        "caught": float(caught.sum()) / (model.layers * model.heads),
        "tag": float(np.average(tokens["tag"], weights=tokens["caught"]))
        if tokens["caught"].sum()
        else math.nan,
        "first": float(sums.first.mean()) / contexts,
        "most_first": float(sums.first.max()) / contexts,
        "escaped": float(sums.escaped.mean()) / contexts,
        "massive": float(torch.cat(sums.massive).max()),
    }


def no_op_table(folder: Path, show: ShowStage = lambda what, done, total: None) -> pd.DataFrame:
    """One row per model: no-op option (column `escape`), seed and the `MEASURES`."""
    rows = []
    models = [(seed, no_op) for seed in seeds_of(folder) for no_op in NO_OPS]
    for seed, no_op in shown(models, "measuring models", show):
        model = open_model(place_of(folder, no_op, seed), device="cpu")
        tokenizer: Any = model.tokenizer
        corpus = Corpus.from_path(held_out_of(folder, seed), tokenizer, model.longest or 0, CONTEXTS, seed)
        rows.append({"escape": no_op, "seed": seed, **measured(model, corpus)})
    return pd.DataFrame(rows)


def seeds_of(folder: Path) -> list[int]:
    """The seeds whose models are all there."""
    seeds = sorted(int(path.stem.rpartition("-")[2]) for path in folder.glob("held-out-*.jsonl"))
    return [seed for seed in seeds if all(place_of(folder, no_op, seed).is_dir() for no_op in NO_OPS)]


@experiment(
    "sinks/escape",
    "Do sinks need the tag? Models with a no-op option, and without",
    "Sinks are the first step of catch, tag, release (section 2); where a head can attend to nothing, they are not "
    "needed for that",
    needs=(COMMAND,),
    scaled_down="small models trained here",
)
def no_op_option(study: Study, outcome: Outcome) -> None:
    purpose = "sinks/escape is read from a folder of training runs"
    folder = study.training_folder("escapes", purpose, COMMAND, outcome)
    compare_no_ops(outcome, no_op_table(folder, study.show))


def compare_no_ops(outcome: Outcome, table: pd.DataFrame) -> None:
    """Verdicts, means with their intervals, and a figure of models, as `no_op_table` gives them."""
    outcome.tables["models"] = table
    for no_op in NO_OPS[1:]:
        for name, scope in (("sinks", "whole-context sinks"), ("stretches", "sinks, local ones included")):
            claim = f"Heads with a no-op option still form {scope}: {NAMES[no_op]} (section 2: sinks are there to tag)"
            with_no_op, without = _paired(table, no_op, name)
            if not (without > 0).all():
                why = f"a seed's model with a plain softmax has no {scope}: there is nothing to compare"
                outcome.cannot_test(claim, why)
                continue
            over = f"{scope} with {NAMES[no_op]} over those with a plain softmax, paired by seed"
            outcome.claim(claim, over, Estimate.mean(with_no_op / without, "seeds"), HALF_OF_SINKS)
        with_no_op, without = _paired(table, no_op, "loss")
        outcome.claim(
            f"A head that can form sinks needs no no-op option: {NAMES[no_op]} does not lower the loss (ours)",
            f"loss with {NAMES[no_op]} less that with a plain softmax, paired by seed",
            Estimate.mean(with_no_op - without, "seeds"),
            NO_WORSE,
        )
    for name, label in MEASURES.items():
        outcome.read(label, "; ".join(f"{NAMES[no_op]} {_level(table, no_op, name)}" for no_op in NO_OPS))
    outcome.figure(
        "escape",
        "With a no-op option and without",
        drawing.by_no_op(table, NAMES, MEASURES),
        "One dot per model, lines join those of a seed, which saw the same tokens in the same order.",
        "whether the sinks, and what they tag, fall from left to right.",
        f"{ZHANG}, sections 1.4 and 2; the no-op options are ours",
        wide=True,
    )


def _paired(table: pd.DataFrame, no_op: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    by_seed = table.pivot(index="seed", columns="escape", values=name)
    return by_seed[no_op].to_numpy(np.float64), by_seed["none"].to_numpy(np.float64)


def _level(table: pd.DataFrame, no_op: str, name: str) -> str:
    values = table[table["escape"] == no_op][name].dropna().to_numpy(np.float64)
    return str(Estimate.mean(values, "seeds")) if len(values) else "none"


def is_no_op_folder(folder: str | Path) -> bool:
    """Whether a folder is one of `theodolite train escape`, finished or not."""
    return (Path(folder) / CLAIM).is_file()


def no_op_provenance(folder: str | Path) -> dict[str, Any]:
    """The provenance of `sinks/escape`.

    Raises:
        UsageError: not all models of a seed are trained yet.
    """
    seeds: Sequence[int] = seeds_of(Path(folder))
    if not seeds:
        raise UsageError(
            f"{folder} has no seed whose models are all trained: resume with `{COMMAND} --out {folder}`"
        )
    return of_trainings(
        f"{counted(len(NO_OPS) * len(seeds), 'model')} in {Path(folder).name}",
        "gpt-oss, one expert",
        escapes={
            "folder": str(folder),
            "seeds": list(seeds),
            "contexts": CONTEXTS,
            "threshold": number(SINK_THRESHOLD),
            "training": json.loads((Path(folder) / CLAIM).read_text(encoding="utf-8")),
        },
    )
