"""Nothing that a program has set elsewhere changes a number; what it had set is there afterwards; passes wait.

The oracle of every number is the same call in a state that nobody has touched, to the last bit.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel
from transformers.initialization import no_tie_weights

from tests.models.entries import CORPUS, ENTRIES, difference
from tests.models.settings import STATES, seen, set_to
from theodolite.errors import UsageError
from theodolite.models import OpenModel, open_model
from theodolite.models.guard import guarded, measures
from theodolite.models.open import open_streamed
from theodolite.passes.survey import survey
from theodolite.sinks.interventions import attention_knockout

FAMILIES = ("gpt2", "llama3")
TOGETHER = (
    *["autocast", "training", "bfloat16", "meta", "inference", "numpy"],
    "rounded products",
    "no attention",
)


@contextmanager
def all_states(model: OpenModel) -> Iterator[None]:
    with ExitStack() as states:
        for state in TOGETHER:
            states.enter_context(STATES[state](model))
        yield


def in_threads(*works: Callable[[], Any]) -> list[Any]:
    """What each gives, begun at the same moment."""
    begin = threading.Barrier(len(works))

    def run(work: Callable[[], Any]) -> Any:
        begin.wait()
        return work()

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(run, works))


@pytest.fixture(scope="module")
def clean(opened):
    """clean(family, entry) → what it gives in a state that nobody has touched."""
    return functools.cache(lambda family, entry: ENTRIES[entry](opened(family)))


@pytest.mark.parametrize(
    ("entry", "family"), [(entry, FAMILIES[number % 2]) for number, entry in enumerate(ENTRIES)]
)
def test_all_states_at_once_change_no_number(entry, family, opened, clean):
    model, expected = opened(family), clean(family, entry)
    with all_states(model):
        before = seen(model)
        ours = ENTRIES[entry](model)
        assert seen(model) == before
    assert not difference(ours, expected)


@pytest.mark.parametrize("state", [state for state in STATES if state not in TOGETHER])
def test_each_state_changes_no_survey_and_stays(state, opened, clean):
    model, expected = opened("gpt2"), clean("gpt2", "survey")
    with STATES[state](model):
        before = seen(model)
        ours = survey(model, CORPUS)
        assert seen(model) == before
    assert not difference(ours, expected)


@pytest.mark.parametrize(
    ("backend", "name", "given", "inside"),
    [
        (torch.backends.mkldnn.matmul, "fp32_precision", "bf16", "ieee"),
        (torch.backends.cudnn, "allow_tf32", True, False),
        (torch.backends.cudnn, "allow_tf32", False, False),
        (torch.backends.cudnn.rnn, "fp32_precision", "ieee", "ieee"),
    ],
)
def test_rounding_is_kept_in_whichever_of_two_ways_it_was_said(backend, name, given, inside):
    """PyTorch refuses to answer in one of its two ways what was said in the other."""
    with set_to(lambda: getattr(backend, name), lambda value: setattr(backend, name, value), given):
        with guarded(torch.nn.Linear(2, 2)):
            assert getattr(backend, name) == inside
        assert getattr(backend, name) == given


def test_states_are_as_they_were_after_an_error(opened):
    model = opened("gpt2")

    def stop(what: str, done: int, total: int) -> None:
        if what == "reading contexts" and done:
            raise KeyboardInterrupt

    with all_states(model):
        before = seen()
        with pytest.raises(KeyboardInterrupt):
            survey(model, CORPUS, batch=1, show_progress=stop)
        assert seen() == before
        with pytest.raises(UsageError, match="this needs a Corpus"):
            survey(model, "notes.txt")
        assert seen() == before


def test_threads_measure_one_model(opened, clean):
    """Without an intervention among them: while one is open, it is so for all threads, and runs say so."""
    model = opened("llama3")
    names = ("survey", "survey", "trace", "outliers", "constituents", "forward")
    expected = [clean("llama3", name) for name in names]
    found = in_threads(*(lambda name=name: ENTRIES[name](model) for name in names))
    assert not difference(found, expected)


def test_two_threads_measure_two_models_while_the_default_dtype_is_another(opened, clean):
    """The setting is of the process: the first who leaves must not put it back under the other one's feet."""
    expected = [clean(name, "survey") for name in FAMILIES]
    with STATES["bfloat16"](opened("gpt2")):
        ours = in_threads(*(lambda name=name: survey(opened(name), CORPUS) for name in FAMILIES))
        assert not difference(ours, expected)


def test_a_model_is_made_while_no_other_is(checkpoint, monkeypatch):
    """While transformers makes one, it ties no weights of any, in no thread. Oracle: the model opened alone."""
    alone, begun = open_streamed(checkpoint("bert")), threading.Event()
    path = checkpoint("gpt2")
    load = GPT2LMHeadModel.from_pretrained

    def slowly(*args: Any, **kwargs: Any) -> Any:
        with no_tie_weights():
            begun.set()
            time.sleep(0.5)
        return load(*args, **kwargs)

    monkeypatch.setattr(GPT2LMHeadModel, "from_pretrained", slowly)
    thread = threading.Thread(target=lambda: open_model(path))
    thread.start()
    assert begun.wait(60)
    beside = open_streamed(checkpoint("bert"))
    thread.join()
    assert len(list(beside.hf.parameters())) == len(list(alone.hf.parameters()))


def test_an_intervention_begins_between_passes(opened):
    """A pass that is under way ends as it began; one that begins later says under what."""
    model, reading, runs = opened("gpt2"), threading.Event(), []
    told: list[tuple[str, int]] = []

    def show(what: str, done: int, total: int) -> None:
        if what == "reading contexts" and done == 1:
            reading.set()
            time.sleep(0.5)  # the other thread tries to change the model now

        told.append((what, done))

    @contextmanager
    def noted() -> Iterator[None]:
        assert told[-1] == ("making tables", 1)
        yield

    thread = threading.Thread(target=lambda: runs.append(survey(model, CORPUS, batch=1, show_progress=show)))
    thread.start()
    assert reading.wait(60)
    with model.intervention("noted", noted()), attention_knockout(model, 0, 0, [0]):
        under = survey(model, CORPUS, batch=1)
    thread.join()
    assert not difference(runs[0].heads, survey(model, CORPUS, batch=1).heads)
    assert "interventions" not in runs[0].provenance["fingerprint"]
    assert under.provenance["fingerprint"]["interventions"]
    assert difference(under.heads, runs[0].heads)


def test_the_model_that_is_measured_is_the_one_that_the_call_names(opened):
    """Oracle: the modules' own flags; another model, before it among the arguments, is left alone."""
    first, second = opened("gpt2"), opened("llama3")

    @measures("model")
    def modes(other: Any, model: Any) -> tuple[bool, bool]:
        return other.hf.training, model.hf.training

    with STATES["training"](first), STATES["training"](second):
        assert modes(first, second) == modes(first, model=second) == (True, False)
        assert second.hf.training
