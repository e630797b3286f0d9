"""What every test shares: few threads, quiet libraries, one checkpoint of each family a run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed says at import that it has found no other
# Tests on a GPU have a run of their own (tests/gpu); all others are about the CPU, also where there is a GPU.
if os.environ.get("THEODOLITE_GPU_TESTS_ON") == "cuda":
    os.environ.setdefault("TRITON_INTERPRET", "0")
else:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Triton kernels are run by its interpreter, on the CPU, where a test asks for them.
    os.environ.setdefault("TRITON_INTERPRET", "1")

if "PYTEST_XDIST_WORKER" in os.environ:
    # Two processes side by side have a core each, and so have the commands that they start.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

HANDS_OUT = "PYTEST_XDIST_WORKER" not in os.environ and any(
    word.startswith(("-n", "--numprocesses")) for word in sys.argv[1:]
)
"""Whether this process only hands tests out to others, and needs none of the libraries."""

if not HANDS_OUT:
    import torch
    import transformers
    from threadpoolctl import threadpool_limits

    from tests import checkpoints
    from tests.browser import BROWSER
    from tests.calls import call
    from theodolite.models import OpenModel, open_model
    from tools import real_models, small_models

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    if os.environ.get("OMP_NUM_THREADS") == "1":
        # Pytest's plugins had imported NumPy before its variable was set, and its threads wait for each other busily.
        threadpool_limits(1)

FAST_FAMILIES = {"gpt2", "bert", "bloom", "llama3", "gemma2", "gpt_oss"}
"""Of the fast run: learned positions, an encoder, ALiBi, grouped queries, capped logits and windows, learned sinks."""

FAMILIES = FAST_FAMILIES | {
    "llama2",
    "mistral",  # windows in every layer
    "phi3",  # queries, keys and values of one matrix
    "gpt_neox",  # partly rotary, attention beside the MLP
    "qwen3",  # norms of queries and keys
    "vit",  # images
    "gemma3",  # the text half of a model of texts and images
    "mixtral",  # experts
    "t5",  # an encoder-decoder, relative biases
    "deepseek_v3",  # latent attention
    "bamba",  # state spaces
    "qwen3_next",  # linear attention
    "xlnet",  # contexts in the second dimension
    "gemma3n_text",  # several residual streams
}
"""Of the full run; all others are for `make families`, which gives --all-families."""

GPU_TESTS_ON = os.environ.get("THEODOLITE_GPU_TESTS_ON", "")

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    and threading.current_thread() is threading.main_thread()
):
    # As a shell leaves it, which runs tests in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory):
    """checkpoint(family, dtype) → the folder of a tiny random model of that family; to be read, not changed."""
    root = tmp_path_factory.mktemp("checkpoints")

    def folder(family: str, dtype: str = "float32") -> Path:
        path = root / dtype / family
        return path if path.exists() else checkpoints.write(family, path, dtype=getattr(torch, dtype))

    return folder


@pytest.fixture
def copied(checkpoint, tmp_path: Path):
    """copied(family) → a copy of its folder, to be changed."""
    return lambda family: shutil.copytree(checkpoint(family), tmp_path / f"copy of {family}")


@pytest.fixture(scope="session")
def opened(checkpoint):
    """opened(family) → that model, opened."""
    cache: dict[str, OpenModel] = {}

    def model(family: str) -> OpenModel:
        if family not in cache:
            cache[family] = open_model(checkpoint(family))
        return cache[family]

    return model


@pytest.fixture(scope="session")
def real():
    """real(name) → what to open of a real model; the test is skipped where that has not been fetched."""
    return lambda name: real_models.real_model(name) or pytest.skip(f"needs {name}: make real-models")


@pytest.fixture
def anew(checkpoint):
    """anew(family, dtype) → that model, opened for a test that changes it."""
    return lambda *which: open_model(checkpoint(*which))


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option of `make families`."""
    parser.addoption(
        "--all-families", action="store_true", help="run the tests of families alone, on every family"
    )


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of texts of three labels."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    texts = [
        {"text": f"row {number} of {label} " * 30, "kind": label} for label in "abc" for number in (0, 1)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in texts))
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A file of text."""
    path = tmp_path / "text.txt"
    path.write_text(
        "The theodolite stands on its tripod; one reads the angle twice, and then a third time. " * 60
    )
    return path


@pytest.fixture(scope="module")
def chromium():
    """A browser that knows no host but this machine."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    options = ["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=BROWSER, args=options)
        yield browser
        browser.close()


def _written(command: str, model: Path, rows: Path, folder: Path, *options: object) -> Path:
    """The folder that a command wrote about the rows."""
    read = (model, "--corpus", rows, "--label-by", "column:kind", "--length", 32, *options)
    status, _, stderr = call(command, *read, "--out", folder)
    assert status == 0, stderr
    return folder


@pytest.fixture(scope="session")
def surveyed(checkpoint, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a survey of a tiny GPT-2, with its page: of two contexts a label. To be read, not changed."""
    folder = tmp_path_factory.mktemp("surveyed") / "run"
    return _written("survey", checkpoint("gpt2"), rows, folder, "--per-label", 2)


@pytest.fixture(scope="session")
def traced(checkpoint, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of a trace of four contexts."""
    return _written(
        "trace", checkpoint("gpt2"), rows, tmp_path_factory.mktemp("traced") / "run", "--contexts", 4
    )


@pytest.hookimpl(tryfirst=True)  # before marks choose what is run
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose the families that are tested; a test of several is slow on all but the fast ones."""
    of_families = {item: _family(item) for item in items if isinstance(item, pytest.Function)}
    of_families = {item: family for item, family in of_families.items() if family}
    has_fast = {item.function for item, family in of_families.items() if family in FAST_FAMILIES}
    for item, family in of_families.items():
        if item.function in has_fast and family not in FAST_FAMILIES:
            item.add_marker("slow")
    if config.getoption("--all-families"):
        kept = list(of_families)
    else:
        # "llama" is what `tools/small_models.py` calls llama2.
        others = {*checkpoints.FAMILIES, *(case.name for case in small_models.cases())} - FAMILIES - {"llama"}
        kept = [item for item in items if of_families.get(item) not in others]
    config.hook.pytest_deselected(items=list(set(items) - set(kept)))
    items[:] = kept


def _family(item: pytest.Function) -> str | None:
    """The family that a test is parametrised with."""
    return item.callspec.params.get("family") if hasattr(item, "callspec") else None
