"""The calls that measure a model, on tiny ones: the tests of the guard make them under all conditions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import BuiltinMethodType
from typing import Any

import numpy as np
import pandas as pd
import torch

from tests import checkpoints
from theodolite.comparison.outputs import read_outputs
from theodolite.corpus.corpus import Corpus
from theodolite.corpus.named import make_corpus
from theodolite.corpus.sampling import Choice
from theodolite.evaluate.few_shot import few_shot_answers
from theodolite.evaluate.perplexity import perplexity
from theodolite.explore.panels import view_head
from theodolite.explore.subject import Subject
from theodolite.logits.constituents import constituents
from theodolite.models import OpenModel, open_model
from theodolite.models.open import open_streamed
from theodolite.passes.survey import spectra, survey, survey_heads
from theodolite.passes.survey_pass import SurveyPass
from theodolite.prune.model import prune_model
from theodolite.sinks.interventions import ablate_direction, attention_knockout, without_low_rank
from theodolite.sinks.outliers import find_outliers
from theodolite.sinks.trace import trace_sinks
from theodolite.train.geometry import GeometryReader
from theodolite_papers.catch_tag_release.prompt_trace import trace_prompt
from theodolite_papers.localization.text_as_walk import read_walk

CORPUS = Corpus.random_tokens(checkpoints.byte_tokenizer(), 32, 6)
IDS = CORPUS.contexts
DIRECTION = torch.randn(32, generator=torch.Generator().manual_seed(0))


def explored(model: OpenModel) -> list[Any]:
    subject, ids = Subject("explored", model, survey(model, CORPUS)), tuple(IDS[0].tolist())
    return [
        subject.measured(ids),
        subject.view(ids, 1, 0),
        subject.constituents(ids, 1),
        subject.tags(ids, 1, 0),
    ]


def edited(model: OpenModel) -> list[Any]:
    outputs = []
    for edit in (
        ablate_direction(model, 1, 0, DIRECTION, control=3),
        attention_knockout(model, 1, 0, [0]),
        *([without_low_rank(model, 1, 2, control=1)] if model.id.endswith("gpt2") else []),
    ):
        with edit:
            outputs.append(model.forward(IDS))
    return outputs


def pruned(model: OpenModel) -> list[Any]:
    copy = open_model(model.id)
    return [prune_model(copy, CORPUS, "oats", 0.5, iterations=2), copy.hf.state_dict()]


def merged(model: OpenModel) -> Any:
    first, second = (SurveyPass(model, CORPUS, 0, 2) for _ in range(2))
    first.read(0, 2)
    second.sketches.look_along(first.state()["sketches.directions"])
    second.read(2, 6)
    with torch.inference_mode(False):
        first.merge(second.state())
    return first.state()


def looked(model: OpenModel) -> list[Any]:
    """What the monitor of a training sees without autocast, by which it rounds as training does."""
    with torch.autocast("cpu", enabled=False):
        look = GeometryReader(model.hf, IDS).look()
    return [look.heads, look.layers]


def cut(model: OpenModel) -> list[Any]:
    """Every way to make a corpus; the model lends its tokenizer only."""
    tokenizer: Any = model.tokenizer
    texts = ["A text that is read, and cut. " * 9, "Another."]
    return [
        Corpus.random_tokens(tokenizer, 16, 3),
        Corpus.from_texts(texts, tokenizer, 16, labels=["first", "second"]),
        Corpus.python_docs(tokenizer, 64, 4, held_out=True),
        make_corpus("random", tokenizer, 16, Choice(3)),
    ]


ENTRIES: dict[str, Callable[[OpenModel], Any]] = {
    "survey": lambda model: survey(model, CORPUS),
    "heads": lambda model: survey_heads(model, CORPUS),
    "spectra": spectra,
    "spectra, lazily": lambda model: spectra(open_streamed(model.id)),
    "merged": merged,
    "trace": lambda model: trace_sinks(model, CORPUS, local_sinks=True),
    "prompt": lambda model: trace_prompt(model, IDS[0], 1, 1),
    "outliers": lambda model: find_outliers(model, CORPUS),
    "edited": edited,
    "constituents": lambda model: constituents(model, IDS, 1),
    "outputs": lambda model: read_outputs(model, CORPUS),
    "perplexity": lambda model: perplexity(model, CORPUS),
    "walk": lambda model: read_walk(model, CORPUS, 0).inputs.state(),
    "pruned": pruned,
    "explored": explored,
    "head": lambda model: view_head(model, IDS[0], 1, 1).view,
    "opened": lambda model: open_model(model.id).hf.state_dict(),
    "forward": lambda model: [model.forward(IDS), model.logits(IDS)],
    "weights": lambda model: [model.head_weights(1), model.output_weights(1)],
    "few-shot": lambda model: few_shot_answers(model, prompts=2, shots=1),
    "monitor": looked,
    "corpora": cut,
}


def difference(ours: Any, expected: Any) -> str:
    """Where two results have other numbers, bit for bit; "" if nowhere."""
    mine, theirs = (dict(_parts(each)) for each in (ours, expected))
    if mine.keys() != theirs.keys():
        return f" has or lacks {', '.join(sorted(mine.keys() ^ theirs.keys()))}"
    said = ((name, _other(mine[name], part)) for name, part in theirs.items())
    return next((name + other for name, other in said if other), "")


def _parts(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """All numbers and words of a result, by where they are, but for how long it took."""
    value = value.__self__ if isinstance(value, BuiltinMethodType) else value  # what a list is read by
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    elif isinstance(value, pd.DataFrame):
        value = dict(value)
    elif hasattr(value, "__dict__") and not isinstance(value, WHOLE):
        value = vars(value)
    if not isinstance(value, dict):
        yield at, value
    else:
        for key, part in value.items():
            if "seconds" not in str(key):
                yield from _parts(part, f"{at}/{key}")


WHOLE = (torch.Tensor, pd.Series, np.ndarray, torch.nn.Module, OpenModel)


def _other(ours: Any, expected: Any) -> str:
    if isinstance(expected, torch.Tensor):
        if ours.dtype != expected.dtype:
            return f" is of {ours.dtype}"
        ours, expected = ours.detach().numpy(), expected.detach().numpy()
    if isinstance(expected, pd.Series | float):
        ours, expected = np.asarray(ours), np.asarray(expected)
    if not isinstance(expected, np.ndarray):
        alike = ours is expected or isinstance(expected, torch.nn.Module) or bool(ours == expected)
        return "" if alike else f" is {str(ours)[:60]}, not {str(expected)[:60]}"
    if ours.shape != expected.shape or ours.dtype != expected.dtype:
        return f" has shape {ours.shape} and {ours.dtype}, not {expected.shape} and {expected.dtype}"
    if np.array_equal(ours, expected, equal_nan=expected.dtype.kind == "f"):
        return ""
    return f" is {ours.ravel()[:9]}, not {expected.ravel()[:9]}"
