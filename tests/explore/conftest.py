"""What the page's tests share: a model with sinks, surveys of tiny models of several families, and served pages."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import checkpoints
from tests.inputs.test_pages import HOSTILE
from theodolite.corpus.corpus import Corpus
from theodolite.explore.subject import Subject
from theodolite.models import OpenModel, open_model
from theodolite.passes.survey import survey_heads

SURVEYED = 32  # tokens per context
PROMPT = "the cat sat on the mat"
SINKS_PROMPT = "the theodolite reads the angle"


def subject_of(name: str, model: OpenModel, length: int = SURVEYED) -> Subject:
    """A model surveyed on random tokens."""
    return Subject(name, model, survey_heads(model, Corpus.random_tokens(model.tokenizer, length, 6, 0)))


@pytest.fixture(scope="session")
def subject(opened):
    """subject(family) → that tiny model, surveyed."""
    made: dict[str, Subject] = {}

    def of(family: str) -> Subject:
        if family not in made:
            made[family] = subject_of(family, opened(family))
        return made[family]

    return of


@pytest.fixture(scope="session")
def sharp_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 whose queries look far more sharply than random ones, so that it has sinks; it has hostile tokens."""
    folder = tmp_path_factory.mktemp("sharp") / "sharp"
    checkpoints.sharp_gpt2(folder, vocab_size=300, n_positions=64, bos_token_id=None, eos_token_id=None)
    tokenizer = checkpoints.byte_tokenizer()
    tokenizer.add_tokens(HOSTILE)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def sharp(sharp_folder: Path) -> Subject:
    return subject_of("sharp", open_model(sharp_folder), 64)


@pytest.fixture(scope="session")
def serving() -> Callable[..., str]:
    """serving(subject, …) → the address of a page of theirs."""
    pytest.importorskip("gradio")
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "True"  # the page says no, whatever the environment says
    from theodolite.explore.page import application, listen, serve

    known: dict[tuple[str, ...], str] = {}

    def address(*subjects: Subject) -> str:
        names = tuple(subject.name for subject in subjects)
        if names not in known:
            ready = threading.Event()

            def started(where: str) -> None:
                known[names] = where
                ready.set()

            arguments = (application(subjects), listen(0), started, threading.Event())
            threading.Thread(target=serve, args=arguments, daemon=True).start()
            assert ready.wait(60)
        return known[names]

    return address
