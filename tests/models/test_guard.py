"""Nothing that a program has set elsewhere changes a number; what it had set is there afterwards; passes wait.

The oracle of every number is the same call in a state that nobody has touched, to the last bit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from tests import checkpoints
from theodolite.comparison.outputs import read_outputs
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.evaluate.perplexity import perplexity
from theodolite.explore.one_head import view_head
from theodolite.explore.view import catch_layer, head_tags, head_view, read_prompt, split_logits
from theodolite.logits.constituents import constituents
from theodolite.models import OpenModel, open_model
from theodolite.models.guard import between_passes, guarded
from theodolite.models.lazy_weights import open_weights
from theodolite.passes.survey import spectra, survey, survey_heads
from theodolite.passes.survey_pass import SurveyPass
from theodolite.passes.walk_pass import read_walk
from theodolite.prune.model import prune_model
from theodolite.sinks.ablation import ablation_test
from theodolite.sinks.interventions import ablate_direction, attention_knockout, without_low_rank
from theodolite.sinks.outliers import find_outliers
from theodolite.sinks.prompt import trace_prompt
from theodolite.sinks.trace import trace_sinks

FAMILIES = ("gpt2", "llama3")
CORPUS = Corpus.random_tokens(checkpoints.byte_tokenizer(), 32, 6)
IDS = CORPUS.contexts
DIRECTION = torch.randn(32, generator=torch.Generator().manual_seed(0))


def explored(model: OpenModel) -> list[Any]:
    read = read_prompt(model, IDS[0])
    caught = catch_layer(read.layers[1].inputs, read.trailing)
    view = head_view(read.tokens, read.layers[1].inputs, caught, 1, 0, read.trailing)
    split = split_logits(model, read, 1, survey(model, CORPUS))
    return [read.measured, view, split, head_tags(model, read, caught, view)]


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


def ablated(model: OpenModel) -> Any:
    traces = trace_sinks(model, CORPUS, stretches=True).traces
    place = (int(traces["layer"][0]), int(traces["head"][0])) if len(traces) else (0, 0)
    try:
        return ablation_test(model, CORPUS, *place, DIRECTION)
    except UsageError as error:  # no head of a random GPT-2 has a sink
        return str(error)


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


ENTRIES: dict[str, Callable[[OpenModel], Any]] = {
    "survey": lambda model: survey(model, CORPUS),
    "heads": lambda model: survey_heads(model, CORPUS),
    "spectra": spectra,
    "spectra, lazily": lambda model: spectra(open_weights(model.id)),
    "merged": merged,
    "trace": lambda model: trace_sinks(model, CORPUS, stretches=True),
    "prompt": lambda model: trace_prompt(model, IDS[0], 1, 1),
    "outliers": lambda model: find_outliers(model, CORPUS),
    "ablation": ablated,
    "edited": edited,
    "constituents": lambda model: constituents(model, IDS, 1),
    "outputs": lambda model: read_outputs(model, CORPUS),
    "perplexity": lambda model: perplexity(model, CORPUS),
    "walk": lambda model: read_walk(model, CORPUS, 0).input_state,
    "pruned": pruned,
    "explored": explored,
    "head": lambda model: view_head(model, IDS[0], 1, 1).view,
    "opened": lambda model: open_model(model.id).hf.state_dict(),
    "forward": lambda model: [model.forward(IDS), model.logits(IDS)],
    "weights": lambda model: [model.head_weights(1), model.output_weights(1)],
}


@contextmanager
def training(model: OpenModel) -> Iterator[None]:
    model.hf.train()
    model.structure.blocks[1].eval()  # frozen on purpose
    before = [module.training for module in model.hf.modules()]
    yield
    assert [module.training for module in model.hf.modules()] == before
    model.hf.eval()


@contextmanager
def set_to(read: Callable[[], Any], write: Callable[[Any], object], value: Any) -> Iterator[None]:
    before = read()
    write(value)
    try:
        now = read()
        yield
        assert read() == now
    finally:
        write(before)


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
        assert torch.get_default_device().type == "meta"
    finally:
        torch.set_default_device(None)  # "cpu" would be a mode that stays


STATES: dict[str, Callable[[OpenModel], AbstractContextManager[Any]]] = {
    "autocast": lambda model: torch.autocast("cpu", torch.bfloat16),
    "training": training,
    "bfloat16": lambda model: set_to(torch.get_default_dtype, torch.set_default_dtype, torch.bfloat16),
    "float64": lambda model: set_to(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "meta": lambda model: default_device(),
    "with meta": lambda model: torch.device("meta"),
    "inference": lambda model: torch.inference_mode(),
    "no gradients": lambda model: torch.no_grad(),
    "gradients": lambda model: torch.enable_grad(),
    "rounded products": lambda model: set_to(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    ),
    "numpy": lambda model: set_to(
        np.geterr, lambda value: np.seterr(**value), dict.fromkeys(np.geterr(), "raise")
    ),
}
TOGETHER = ("autocast", "training", "bfloat16", "meta", "inference", "rounded products", "numpy")


def seen() -> tuple[Any, ...]:
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
        torch.get_float32_matmul_precision(),
        np.geterr(),
    )


def same(ours: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return ours.dtype == expected.dtype and torch.equal(ours.nan_to_num(7.0), expected.nan_to_num(7.0))
    if isinstance(expected, np.ndarray):
        return np.array_equal(ours, expected, equal_nan=expected.dtype.kind == "f")
    if isinstance(expected, pd.DataFrame):
        return bool(ours.equals(expected))
    if isinstance(expected, dict):
        return ours.keys() == expected.keys() and all(
            same(ours[key], value) for key, value in expected.items() if "seconds" not in str(key)
        )
    if isinstance(expected, list | tuple):
        return len(ours) == len(expected) and all(map(same, ours, expected))
    if hasattr(expected, "__dict__") and not isinstance(expected, torch.nn.Module | OpenModel):
        return same(vars(ours), vars(expected))
    return ours is expected or bool(ours == expected) or isinstance(expected, torch.nn.Module)


@pytest.fixture(scope="module")
def clean(opened):
    known: dict[tuple[str, str], Any] = {}

    def result(family: str, entry: str) -> Any:
        if (family, entry) not in known:
            known[family, entry] = ENTRIES[entry](opened(family))
        return known[family, entry]

    return result


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("entry", ENTRIES)
def test_all_states_at_once_change_no_number(entry, family, opened, clean):
    model, expected = opened(family), clean(family, entry)
    with ExitStack() as states:
        for state in TOGETHER:
            states.enter_context(STATES[state](model))
        before = seen()
        ours = ENTRIES[entry](model)
        assert seen() == before
    assert same(ours, expected)


@pytest.mark.parametrize("state", STATES)
def test_each_state_changes_no_survey_and_stays(state, opened, clean):
    model, expected = opened("gpt2"), clean("gpt2", "survey")
    with STATES[state](model):
        before = seen()
        ours = survey(model, CORPUS)
        assert seen() == before
    assert same(ours, expected)


def test_what_a_model_sees(opened):
    """Whatever this machine makes of a precision: in the pass it is what it is at the start of a process."""
    at_start, seen_inside = seen(), []
    hook = (
        opened("llama3").structure.blocks[0].register_forward_pre_hook(lambda *_: seen_inside.append(seen()))
    )
    with hook, ExitStack() as states:
        for state in TOGETHER:
            states.enter_context(STATES[state](opened("llama3")))
        opened("llama3").logits(IDS)
    (inside,) = seen_inside
    assert inside[:3] + inside[5:] == at_start[:3] + at_start[5:]


def test_the_other_way_to_round_products_is_kept_too():
    """PyTorch refuses to answer in one of its two ways what was said in the other."""
    matmul = torch.backends.mkldnn.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("this PyTorch has one way")
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        with guarded(torch.nn.Linear(2, 2)):
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == "bf16"
    finally:
        matmul.fp32_precision = before


def test_states_are_as_they_were_after_an_error(opened):
    model = opened("gpt2")

    def stop(what: str, done: int, total: int) -> None:
        if what == "reading contexts" and done:
            raise KeyboardInterrupt

    with ExitStack() as states:
        for state in TOGETHER:
            states.enter_context(STATES[state](model))
        before = seen()
        with pytest.raises(KeyboardInterrupt):
            survey(model, CORPUS, batch=1, show_progress=stop)
        assert seen() == before
        with pytest.raises(UsageError, match="this needs a Corpus"):
            survey(model, "notes.txt")
        assert seen() == before


def in_threads(*works: Callable[[], Any]) -> list[Any]:
    """What each gives, begun at the same moment."""
    results: dict[int, Any] = {}
    begin = threading.Barrier(len(works))

    def run(number: int) -> None:
        begin.wait()
        results[number] = works[number]()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    return [results[number] for number in range(len(works))]


def test_threads_measure_one_model(opened, clean):
    """Without an intervention among them: while one is open, it is so for all threads, and runs say so."""
    model = opened("llama3")
    names = ("survey", "survey", "trace", "outliers", "constituents", "forward")
    expected = [clean("llama3", name) for name in names]
    for _ in range(3):
        assert same(in_threads(*(lambda name=name: ENTRIES[name](model) for name in names)), expected)


def test_two_threads_measure_two_models_while_the_default_dtype_is_another(opened, clean):
    """The setting is of the process: the first who leaves must not put it back under the other one's feet."""
    names = FAMILIES
    expected = [clean(name, "survey") for name in names]
    with STATES["bfloat16"](opened("gpt2")):
        for _ in range(3):
            ours = in_threads(*(lambda name=name: survey(opened(name), CORPUS) for name in names))
            assert same(ours, expected)


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
    assert same(runs[0].heads, survey(model, CORPUS, batch=1).heads)
    assert "edits" not in runs[0].provenance["fingerprint"]
    assert under.provenance["fingerprint"]["edits"]
    assert not same(under.heads, runs[0].heads)


def test_who_has_the_model_may_measure_it_and_others_wait(opened):
    model, began = opened("gpt2"), threading.Event()

    def other() -> None:
        began.set()
        model.forward(IDS)

    thread = threading.Thread(target=other)
    with between_passes(model.hf):
        thread.start()
        assert began.wait(10)
        model.forward(IDS)
        thread.join(0.2)
        assert thread.is_alive()
    thread.join(60)
    assert not thread.is_alive()


def test_a_pass_that_was_made_in_inference_mode_goes_on_outside_of_it(opened):
    """Oracle: passes that were made outside of it."""
    model = opened("gpt2")
    totals = []
    for mode in (True, False):
        with torch.inference_mode(mode):
            total, part = (SurveyPass(model, CORPUS, 0, 2) for _ in range(2))
        total.read(0, 4)
        part.read(4, 6)
        total.merge(part.state())
        total.restore(total.state())
        totals.append(total.state())
    assert totals[0].keys() == totals[1].keys()
    assert all(torch.equal(totals[0][name], totals[1][name]) for name in totals[0])
