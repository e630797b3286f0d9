"""Pruning on Ray against the pruning of one process, while workers die."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from tests import checkpoints
from tests.prune.families import write
from tests.prune.test_streamed import in_memory, tensors_in
from tests.ray_nodes import kill_a_reader, two_nodes
from theodolite.cli.app import app
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError, WorkError
from theodolite.models import OpenModel, open_model
from theodolite.models.streamed import open_streamed
from theodolite.passes import ray_actors, ray_cluster
from theodolite.prune import Pruned, prune_model, ray_pruning
from theodolite.prune.ray_pruning import PruningWorker, prune_on_ray

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")

BATCH, CONTEXTS = 2, 39
OPTIONS = {"sparsity": 0.5, "batch": BATCH, "iterations": 3}


@pytest.fixture(scope="module")
def cluster() -> Iterator:
    with two_nodes() as nodes:
        yield nodes


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    """20 batches, of which the last is not full, in 16 shards of one or two."""
    return Corpus.random_tokens(checkpoints.VOCABULARY, 24, CONTEXTS)


@pytest.fixture(scope="module")
def anew(tmp_path_factory):
    """A model that a test may prune."""
    root = tmp_path_factory.mktemp("models")
    return lambda family: open_model(write(family, root / family))


def assert_same(model: OpenModel, pruned: Pruned, other: OpenModel, alone: Pruned) -> None:
    """Every byte of the weights, and the table."""
    expected = other.hf.state_dict()
    found = model.hf.state_dict()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert pruned.table.equals(alone.table)
    assert pruned.provenance["fingerprint"] == alone.provenance["fingerprint"]


def assert_bytes_of_one_process(family: str, method: str, anew, corpus: Corpus) -> None:
    model, other = anew(family), anew(family)
    pruned = prune_on_ray(model, corpus, method, actors=2, errors=True, **OPTIONS)
    assert_same(model, pruned, other, prune_model(other, corpus, method, errors=True, **OPTIONS))


def test_the_bytes_are_those_of_one_process(cluster, anew, corpus):
    """Oracle: `prune_model`."""
    assert_bytes_of_one_process("gpt2", "wanda", anew, corpus)


@pytest.mark.parametrize(("family", "method"), [("mixtral", "oats"), ("gpt2", "magnitude")])
def test_the_bytes_are_those_of_one_process_by_any_method(family, method, crew, anew, corpus):
    """Oracle: `prune_model`."""
    assert_bytes_of_one_process(family, method, anew, corpus)


def test_full_moments_have_the_same_bytes_for_any_number_of_workers(crew, anew, corpus):
    """And those of one process to the last bits of sums; the error of each matrix tells."""
    models = [anew("gpt2") for _ in range(3)]
    one, two = (
        prune_on_ray(model, corpus, "sparsegpt", actors=actors, **OPTIONS)
        for model, actors in zip(models, (1, 2), strict=False)
    )
    assert_same(models[0], one, models[1], two)
    alone = prune_model(models[2], corpus, "sparsegpt", **OPTIONS)
    torch.testing.assert_close(
        torch.tensor(two.table["error"]), torch.tensor(alone.table["error"]), rtol=1e-6, atol=0
    )


@pytest.mark.slow
def test_workers_of_a_cluster_stream_a_model(cluster, corpus, tmp_path):
    assert_streamed("wanda", corpus, tmp_path)


def slow_worker(seconds: float) -> type:
    """A worker with which one can interfere; made in a function, so that Ray sends it along."""

    class Slow(PruningWorker):
        def read(self, layer, shard):
            time.sleep(seconds)
            return super().read(layer, shard)

    return Slow


@pytest.mark.parametrize(
    "patience",
    [
        pytest.param(60.0, id="started again"),
        pytest.param(0.0, id="taken over by the other", marks=pytest.mark.slow),
    ],
)
def test_a_worker_killed_in_the_middle_changes_no_byte(patience, cluster, anew, corpus, monkeypatch):
    """Oracle: `prune_model`. The contexts of the one that died go through the first block again."""
    pids: list[int] = []
    told: list[str] = []
    killer = threading.Thread(target=kill_a_reader, args=(pids,))

    def show(done: int, total: int) -> None:
        if done > total / 2 and not killer.ident:
            monkeypatch.setattr(ray_pruning, "PATIENCE", patience)
            killer.start()

    monkeypatch.setattr(ray_pruning, "PruningWorker", slow_worker(0.1))
    monkeypatch.setattr(ray_actors, "NOTICE", ray_actors.LIMIT)  # workers start slowly on a busy machine
    model, other = anew("gpt2"), anew("gpt2")
    pruned = prune_on_ray(model, corpus, "wanda", actors=2, show_progress=show, say=told.append, **OPTIONS)
    killer.join()
    assert_same(model, pruned, other, prune_model(other, corpus, "wanda", **OPTIONS))
    assert len(pids) == len(told) == 1
    assert f"process {pids[0]} was lost when it " in told[0]


def stop_half_way(done: int, total: int) -> None:
    if done > total / 2:
        raise KeyboardInterrupt


@pytest.mark.slow
def test_contexts_that_kill_every_worker_are_given_up_and_finished_blocks_stay(
    cluster, anew, corpus, tmp_path, monkeypatch
):
    class Dying(PruningWorker):
        def read(self, layer, shard):
            if layer == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().read(layer, shard)

    monkeypatch.setattr(ray_pruning, "PruningWorker", Dying)
    monkeypatch.setattr(ray_actors, "DEATHS", 2)
    monkeypatch.setattr(ray_pruning, "DEATHS", 2)
    out = tmp_path / "out"
    with pytest.raises(
        WorkError, match="2 worker processes, the last when it read shard 0 of the text in block 1"
    ):
        prune_on_ray(anew("gpt2"), corpus, "wanda", actors=1, out=out, **OPTIONS)
    assert (tmp_path / "out.partial" / "block-000.safetensors").is_file()
    monkeypatch.undo()
    model, other = anew("gpt2"), anew("gpt2")
    pruned = prune_on_ray(model, corpus, "wanda", actors=1, out=out, **OPTIONS)
    assert_same(model, pruned, other, prune_model(other, corpus, "wanda", **OPTIONS))


class Crew:
    """Workers in this process, one of which is lost once, as it is asked for something."""

    lost_at: tuple[int, str]
    comes_back: bool

    def __init__(self, kind, job, count, say) -> None:
        self.kind, self.job, self.count, self.say = kind, job, count, say
        self.actors = {number: kind(job) for number in range(count)}
        self.losses = 0

    def alive(self) -> list[int]:
        return sorted(self.actors)

    def lose(self, number: int, doing: str) -> None:
        self.say(f"the worker on node {number} was lost when it {doing}")
        del self.actors[number]
        if self.comes_back:
            self.actors[number] = self.kind(self.job)

    def __getitem__(self, number: int) -> SimpleNamespace:
        def method(name):
            def remote(*given):
                if (number, name) == self.lost_at and not self.losses:
                    self.losses += 1
                    return (LOST, LOST) if name == "read" else LOST
                return getattr(self.actors[number], name)(*given)

            call = SimpleNamespace(remote=remote)
            call.options = lambda **_: call
            return call

        return SimpleNamespace(**{name: method(name) for name in ("begin", "read", "advance", "verify_end")})


LOST = object()


@pytest.fixture
def crew(monkeypatch) -> type[Crew]:
    """In the place of a cluster."""

    def fetched(answer, doing):
        if answer is LOST:
            raise ray_cluster.WorkerLost
        return answer

    ray = SimpleNamespace(
        put=lambda given: given, get=lambda given: given, wait=lambda answers, timeout: (answers, [])
    )
    own = type("Own", (Crew,), {"lost_at": (-1, ""), "comes_back": True})
    monkeypatch.setattr(ray_pruning, "Workers", own)
    monkeypatch.setattr(ray_pruning, "connected", lambda address: nullcontext())
    monkeypatch.setattr(ray_pruning, "offered", lambda threads: ("cpu", 3))
    monkeypatch.setattr(ray_pruning, "imported_ray", lambda: ray)
    monkeypatch.setattr(ray_pruning, "fetched", fetched)
    monkeypatch.setattr(ray_pruning, "SECONDS", 0.0)
    monkeypatch.setattr(ray_pruning, "PATIENCE", 0.0)
    return own


@pytest.mark.parametrize("comes_back", [True, False])
@pytest.mark.parametrize("name", ["begin", "read", "advance", "verify_end"])
def test_whatever_a_worker_was_asked_as_it_was_lost_no_byte_changes(
    name, comes_back, crew, anew, corpus, monkeypatch
):
    """Oracle: `prune_model`."""
    crew.lost_at, crew.comes_back = (1, name), comes_back
    told: list[str] = []
    model, other = anew("gpt2"), anew("gpt2")
    pruned = prune_on_ray(model, corpus, "wanda", say=told.append, **OPTIONS)
    assert_same(model, pruned, other, prune_model(other, corpus, "wanda", **OPTIONS))
    assert len(told) == 1
    assert told[0].startswith("the worker on node 1 was lost when it ")


@pytest.mark.parametrize("name", ["", "begin", "read", "advance", "verify_end"])
def test_workers_stream_a_model_as_one_process_does(name, crew, corpus, tmp_path, monkeypatch):
    """Oracle: `prune_model` of the model in memory. Workers hold the current block alone, and one of them is lost."""

    class Watched(PruningWorker):
        def read(self, layer, shard):
            read = super().read(layer, shard)
            assert in_memory(self.opened()) == [layer]
            return read

    monkeypatch.setattr(ray_pruning, "PruningWorker", Watched)
    crew.lost_at = (1, name)
    assert_streamed("oats", corpus, tmp_path)


def assert_streamed(method: str, corpus: Corpus, place: Path) -> None:
    folder = write("gpt2", place / "gpt2")
    prune_model(open_model(folder), corpus, method, out=place / "whole", **OPTIONS)
    prune_on_ray(open_streamed(folder), corpus, method, actors=2, out=place / "streamed", **OPTIONS)
    expected, found = tensors_in(place / "whole"), tensors_in(place / "streamed")
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[key], found[key]) for key in expected)


def test_finished_blocks_are_gone_on_from_in_this_process_and_by_workers(crew, anew, corpus, tmp_path):
    """Oracle: a run that was not stopped."""
    prune_model(anew("gpt2"), corpus, "oats", out=tmp_path / "whole", **OPTIONS)
    expected = tensors_in(tmp_path / "whole")
    for name, begin, go_on in (("a", prune_on_ray, prune_model), ("b", prune_model, prune_on_ray)):
        with pytest.raises(KeyboardInterrupt):
            begin(anew("gpt2"), corpus, "oats", out=tmp_path / name, show_progress=stop_half_way, **OPTIONS)
        assert (tmp_path / f"{name}.partial" / "block-000.safetensors").is_file()
        go_on(anew("gpt2"), corpus, "oats", out=tmp_path / name, **OPTIONS)
        found = tensors_in(tmp_path / name)
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[key], found[key]) for key in expected)


def test_what_is_finished_is_read_without_a_cluster(crew, anew, corpus, tmp_path, monkeypatch):
    """And what is something else is refused without one."""
    model, out = anew("gpt2"), tmp_path / "out"
    pruned = prune_on_ray(model, corpus, "wanda", out=out, **OPTIONS)
    monkeypatch.undo()
    monkeypatch.setattr(ray_pruning, "connected", None)
    again = anew("gpt2")
    assert_same(again, prune_on_ray(again, corpus, "wanda", out=out, **OPTIONS), model, pruned)
    with pytest.raises(UsageError, match=r"holds a pruning of another model, text or settings \(--sparsity"):
        prune_on_ray(anew("gpt2"), corpus, "wanda", out=out, **OPTIONS | {"sparsity": 0.4})


def test_what_workers_cannot_do_is_refused(anew, corpus, tmp_path, monkeypatch):
    """Before any cluster is looked for."""
    model = anew("gpt2")
    for options in ({"recover": 3}, {"sparsity_by": "owl"}):
        with pytest.raises(UsageError, match="--ray: no worker has all of the text: leave out --"):
            prune_on_ray(model, corpus, "oats", 0.5, **options)
    with pytest.raises(UsageError, match="blocks of a streamed model are read from its files and not kept"):
        prune_on_ray(open_streamed(write("gpt2", tmp_path / "gpt2")), corpus, "oats", 0.5)
    with pytest.raises(UsageError, match="prune_on_ray has no option nosuch: give those of prune_model"):
        prune_on_ray(model, corpus, "wanda", 0.5, nosuch=1)
    with pytest.raises(UsageError, match="0 actors read nothing"):
        prune_on_ray(model, corpus, "wanda", 0.5, actors=0)
    with model.intervention("keys masked"), pytest.raises(UsageError, match="anew, without keys masked"):
        prune_on_ray(model, corpus, "wanda", 0.5)
    with pytest.raises(UsageError, match="in memory, and each worker opens a checkpoint"):
        prune_on_ray(open_model(checkpoints.build("gpt2")), corpus, "wanda", 0.5)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"needs `pip install theodolite\[ray\]`"):
        prune_on_ray(model, corpus, "wanda", 0.5)


@pytest.mark.parametrize(("arguments", "address"), [(["--ray"], "local"), (["--ray", "auto"], "auto")])
def test_the_command_asks_workers(arguments, address, tmp_path, monkeypatch):
    seen: list[tuple[str, int | None]] = []

    def asked(model, corpus, method, sparsity, *, address, actors, **options):
        seen.append((address, actors))
        raise UsageError("asked")

    monkeypatch.setattr(ray_pruning, "prune_on_ray", asked)
    (tmp_path / "text.txt").write_text("one two three four " * 200)
    command = ["prune", str(write("gpt2", tmp_path / "gpt2")), "--corpus", str(tmp_path / "text.txt")]
    more = ["--length", "16", "--out", str(tmp_path / "out"), "--actors", "2", *arguments]
    result = CliRunner().invoke(app, [*command, *more])
    assert result.exit_code == 2
    assert seen == [(address, 2)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ray", "--device", "cpu"], "--ray: each worker has one device: leave out --device"),
        (["--ray", "--recover", "3"], "leave out --recover"),
        (["--ray", "--sparsity-by", "owl"], "leave out --sparsity-by"),
        (["--actors", "2"], "without --ray there are no workers: leave out --actors"),
    ],
)
def test_options_that_say_nothing_are_refused(arguments, message, tmp_path):
    result = CliRunner().invoke(app, ["prune", "--out", str(tmp_path / "out"), *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
