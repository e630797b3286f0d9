"""The survey on Ray against the survey of one process, while workers and nodes die."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import checkpoints
from tests.calls import call, same_bytes
from tests.ray_nodes import kill_a_reader, two_nodes
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError, WorkError
from theodolite.models import open_model
from theodolite.models.source import Source
from theodolite.models.verification import VERIFIED_LENGTH
from theodolite.passes import on_ray
from theodolite.passes.on_ray import connected, survey_on_ray
from theodolite.passes.run import Run
from theodolite.passes.survey import survey

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")

BATCH, CONTEXTS, LENGTH = 2, 27, 32
chaos = pytest.mark.chaos


@pytest.fixture(scope="module")
def cluster() -> Iterator:
    with two_nodes() as nodes:
        yield nodes


@pytest.fixture(scope="module", autouse=True)
def few_threads() -> Iterator[None]:
    """Sums of float32 depend on how many threads share them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """In each test again: another module's, in between, may have left others."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    """27 contexts in batches of 2: 14 chunks, the last of which is not a full batch."""
    drawn = Corpus.random_tokens(checkpoints.VOCABULARY, LENGTH, CONTEXTS)
    labels = torch.arange(CONTEXTS) % 3
    return Corpus("drawn", drawn.contexts, labels, ["a", "b", "c"], 0)


@pytest.fixture(scope="module")
def alone(opened, corpus, tmp_path_factory) -> Run:
    return survey(opened("gpt2"), corpus, tmp_path_factory.mktemp("alone") / "run", batch=BATCH)


@pytest.mark.slow
def test_a_worker_killed_in_the_middle_changes_no_byte(cluster, alone, opened, corpus, tmp_path, monkeypatch):
    """One of two workers is killed while it reads its second chunk or a later one. Oracle: one process."""
    pids: list[int] = []
    killer = threading.Thread(target=kill_a_reader, args=(pids,))

    class Slow(on_ray.Worker):
        def read(self, chunk):
            time.sleep(0.5)
            return super().read(chunk)

    def show(what: str, done: int, total: int) -> None:
        if done and not killer.ident:
            killer.start()

    monkeypatch.setattr(on_ray, "Worker", Slow)
    out = tmp_path / "run"
    run = survey_on_ray(opened("gpt2"), corpus, out, batch=BATCH, actors=2, show_progress=show)
    killer.join()
    assert pids
    same_bytes(alone.folder, out)
    assert {**run.provenance, "wall_seconds": 0} == {**alone.provenance, "wall_seconds": 0}


@chaos
def test_without_room_it_is_said_what_a_worker_needs(cluster, opened, corpus, tmp_path, monkeypatch):
    import ray

    @ray.remote(num_cpus=1)
    class Other:
        def ready(self) -> None:
            """Answer, and so hold the place."""

    others = [Other.remote() for _ in range(2)]
    ray.get([other.ready.remote() for other in others])
    time.sleep(1)  # until all of Ray knows
    monkeypatch.setattr(on_ray, "LIMIT", 3.0)
    with pytest.raises(
        WorkError, match=r"^waited 0.05 minutes for a worker, which needs of one node 1 CPU: end what"
    ):
        survey_on_ray(opened("gpt2"), corpus, tmp_path / "run", batch=BATCH)
    assert not (tmp_path / "run").exists()


@chaos
def test_a_worker_that_cannot_start_is_said_in_a_line(cluster, opened, corpus, monkeypatch, capfd):
    class Broken(on_ray.Worker):
        def __init__(self, *task):
            raise ImportError("no module of this name")

    monkeypatch.setattr(on_ray, "Worker", Broken)
    with pytest.raises(
        WorkError, match=r"^a worker died before it did anything: try `python -c 'import theod"
    ):
        survey_on_ray(opened("gpt2"), corpus, batch=BATCH, actors=1)
    assert capfd.readouterr() == ("", "")


@chaos
def test_a_node_that_is_lost_changes_no_byte(alone, cluster, opened, corpus, tmp_path, monkeypatch):
    """There is room to restart its worker only where the other one was, which has read all else."""
    victim, reading = cluster.list_all_nodes()[-1], tmp_path / "reading"
    doomed = victim.node_id

    class Doomed(on_ray.Worker):
        def read(self, chunk):
            import ray

            if ray.get_runtime_context().get_node_id() == doomed:
                reading.touch()
                time.sleep(600)
            while chunk.first and not reading.exists():  # its turn must come
                time.sleep(0.05)
            return super().read(chunk)

    counts: list[int] = []

    def show(what: str, done: int, total: int) -> None:
        if what == "reading contexts":
            counts.append(done)
        if reading.exists() and len(cluster.list_all_nodes()) == 2:
            cluster.remove_node(victim, allow_graceful=False)

    monkeypatch.setattr(on_ray, "Worker", Doomed)
    run = survey_on_ray(opened("gpt2"), corpus, tmp_path / "run", batch=BATCH, show_progress=show)
    assert counts == sorted(counts)
    assert {0, CONTEXTS} < set(counts)
    same_bytes(alone.folder, run.folder)


@pytest.mark.slow
def test_an_interrupted_survey_goes_on_on_ray_and_alone(alone, cluster, opened, corpus, tmp_path):
    """One process goes on from what Ray has left, and Ray from what one process has."""

    def stop_at(contexts: int):
        def show(what: str, done: int, total: int) -> None:
            if done >= contexts:
                raise KeyboardInterrupt

        return show

    def on_one(*args, **options):
        return survey_on_ray(*args, actors=1, **options)

    for number, (begin, end, stop) in enumerate([(on_one, survey, 6), (survey, on_one, 14)]):
        out, seen = tmp_path / str(number), []
        with pytest.raises(KeyboardInterrupt):
            begin(opened("gpt2"), corpus, out, batch=BATCH, show_progress=stop_at(stop))
        run = end(
            opened("gpt2"),
            corpus,
            out,
            batch=BATCH,
            show_progress=lambda _, done, __, seen=seen: seen.append(done),
        )
        assert seen[0] >= (stop if end is on_one else 0)
        same_bytes(alone.folder, run.folder)
    assert not list(tmp_path.glob("*.partial"))


@chaos
def test_contexts_that_kill_every_worker_are_given_up(cluster, opened, corpus, tmp_path, monkeypatch):
    class Dying(on_ray.Worker):
        def read(self, chunk):
            if chunk.first:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().read(chunk)

    monkeypatch.setattr(on_ray, "Worker", Dying)
    with pytest.raises(
        WorkError, match="3 processes of a worker died, the last when it read contexts 2 to 3"
    ):
        survey_on_ray(opened("gpt2"), corpus, tmp_path / "run", batch=BATCH, actors=1)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_what_a_worker_raises_is_raised_as_itself(cluster, corpus, tmp_path):
    """The token that overflows is none of those on which an opened model is verified."""
    model = checkpoints.build("gpt2")
    verified = Source.of_transformers(model).sample(VERIFIED_LENGTH)
    token = next(int(one) for one in corpus.contexts[5] if one not in verified)
    with torch.no_grad():
        model.transformer.wte.weight[token] = 1e38
    model.save_pretrained(tmp_path)
    checkpoints.byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(WorkError, match=r"^hidden states of layer 0 hold NaN or infinite values"):
        survey_on_ray(open_model(tmp_path), corpus, batch=BATCH, actors=1)


@chaos
def test_a_node_with_another_checkpoint_is_refused(cluster, checkpoint, corpus, tmp_path):
    folder = shutil.copytree(checkpoint("gpt2"), tmp_path / "model")
    model = open_model(folder)
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: value + 1 for name, value in weights.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(UsageError, match=r"^node .* would measure something else: model is"):
        survey_on_ray(model, corpus, batch=BATCH, actors=1)


def test_a_finished_run_is_not_read_again(alone, opened, corpus, monkeypatch):
    """Nor is a cluster looked for, or where it is refused; that one process wrote it makes no difference."""
    monkeypatch.setattr(on_ray, "connected", None)
    calls: list[int] = []
    again = survey_on_ray(
        opened("gpt2"),
        corpus,
        alone.folder,
        batch=BATCH,
        show_progress=lambda what, done, total: calls.append(done),
    )
    assert not calls
    assert again.heads.equals(alone.heads)
    with pytest.raises(
        UsageError, match=r"holds a run of another model, corpus or options \(--seed 0 there, 1"
    ):
        survey_on_ray(opened("gpt2"), corpus, alone.folder, batch=BATCH, seed=1)


@pytest.mark.slow
def test_wrong_calls_are_refused(cluster, opened, corpus, monkeypatch):
    model = opened("gpt2")
    with pytest.raises(UsageError, match="0 actors read nothing"):
        survey_on_ray(model, corpus, actors=0)
    with model.intervention("keys masked"), pytest.raises(UsageError, match="anew, without keys masked"):
        survey_on_ray(model, corpus)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    with pytest.raises(UsageError, match="no node of the Ray cluster has the 3 CPUs"):
        survey_on_ray(model, corpus)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere", "auto"])
def test_an_address_where_no_cluster_answers_is_refused_in_a_line(address, monkeypatch):
    import ray

    def slow(**_):
        raise Exception("The current node timed out during startup.\nMany lines follow.")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    says = f"no Ray cluster at {address}"
    if address == "auto":
        monkeypatch.setattr(ray, "init", slow)
        says = r"no Ray cluster .*timed out during startup"
    with pytest.raises(UsageError, match=says), connected(address):
        pass


def test_without_ray_one_line_says_what_to_install(opened, corpus, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"needs Ray: pip install '\.\[ray\]' in"):
        survey_on_ray(opened("gpt2"), corpus)


COMMAND = """
import time
import theodolite.passes.on_ray as d
class Slow(d.Worker):
    def read(self, *given):
        time.sleep(0.5)
        return super().read(*given)
d.Worker = Slow
from theodolite.cli.app import main
main()
"""


@chaos
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_the_command_stops_at_a_signal_and_goes_on(number, cluster, checkpoint, tmp_path):
    """Ctrl-C reaches every process of a terminal's group; here it comes to a cluster that the command has started.

    So does the SIGHUP of a closed terminal.

    The same command without workers goes on from what they left, and ends with the bytes of one process.
    """
    text, out = tmp_path / "text.txt", tmp_path / "run"
    text.write_text(
        "The theodolite stands on its tripod; one reads the angle twice, and then a third time. " * 90
    )
    # Enough contexts for the signal to come while slow workers read them, however late.
    size = ["--length", "32", "--contexts", "192", "--batch", "1"]
    read = ["survey", checkpoint("gpt2"), "--corpus", text, *size, "--json"]
    arguments = [*map(str, read), "--out", str(out), "--actors", "1", "--ray"]
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "run.partial" / "chunk-000.safetensors").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    started = psutil.Process(process.pid).children(recursive=True)
    assert any("raylet" in child.name() for child in started)
    # None but this machine may give a cluster of its own code to run.
    listening = [one for child in started for one in child.net_connections() if one.status == "LISTEN"]
    assert listening
    assert {one.laddr.ip.removeprefix("::ffff:") for one in listening if one.laddr} == {"127.0.0.1"}
    os.killpg(process.pid, number)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130, stderr
    assert stderr.rstrip().endswith("error: interrupted; rerun the command to resume")
    assert "Traceback" not in stderr
    assert not psutil.wait_procs(started, timeout=120)[1]
    for folder in (out, tmp_path / "alone"):
        status, _, stderr = call(*read, "--out", folder)
        assert status == 0, stderr
    same_bytes(tmp_path / "alone", out)


@pytest.mark.parametrize(
    ("arguments", "address"),
    [(["--ray"], "local"), (["--ray", "--json"], "local"), (["--ray", "auto"], "auto"), ([], None)],
)
def test_an_address_may_follow_or_not(arguments, address, checkpoint, text, monkeypatch):
    seen: list[str | None] = []

    def asked(model, corpus, out, *, address=None, **options):
        seen.append(address)
        raise UsageError("asked")

    monkeypatch.setattr("theodolite.passes.on_ray.survey_on_ray", asked)
    monkeypatch.setattr("theodolite.passes.survey.survey", asked)
    assert call("survey", checkpoint("gpt2"), "--corpus", text, "--length", 16, *arguments)[0] == 2
    assert seen == [address]
