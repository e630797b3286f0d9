"""Several devices that share the matrices of a block: CPUs here, of which there may be as many as one asks for."""

from __future__ import annotations

import threading

import pytest
import torch
from typer.testing import CliRunner

from tests.prune.families import write
from tests.prune.test_streamed import corpus_of, tensors_in
from theodolite.cli.app import app
from theodolite.errors import UsageError, WorkError
from theodolite.models import open_model
from theodolite.models.block_matrices import block_matrices
from theodolite.prune import prune_model
from theodolite.prune.devices import usable_devices
from theodolite.prune.moments import InputMoments
from theodolite.prune.settings import PruningSettings

CASES = (
    ("llama3", {"method": "sparsegpt", "sparsity": 0.5}),
    ("gpt2", {"method": "wanda", "sparsity": 0.5}),
    ("mixtral", {"method": "oats", "sparsity": 0.5, "iterations": 3}),
    ("llama3", {"method": "gptq", "bits": 4, "group": 16}),
)


@pytest.mark.parametrize(("family", "options"), CASES)
def test_the_result_does_not_depend_on_how_many_there_are(family, options, tmp_path):
    """Oracle: one matrix after the other: all tensors and the table, byte by byte, in the same order."""
    folder = write(family, tmp_path / family)
    models = [open_model(folder) for _ in range(3)]
    alone, *shared = (
        prune_model(model, corpus_of(), devices=["cpu"] * number, **options)
        for number, model in zip((0, 2, 5), models, strict=True)
    )
    expected = models[0].hf.state_dict()
    for pruned, model in zip(shared, models[1:], strict=True):
        assert pruned.table.equals(alone.table)
        assert all(map(torch.equal, model.hf.state_dict().values(), expected.values()))
        assert pruned.provenance["fingerprint"] == alone.provenance["fingerprint"]
        assert model.interventions == models[0].interventions


def test_those_with_one_factor_stay_together_and_the_largest_are_first(tmp_path, monkeypatch):
    """Oracle: Llama's matrices by name; on one device the order of the calls is the order of the work."""
    pruned, threads = [], set()
    original = PruningSettings.prune

    def noted(self, matrix, moments, device=None):
        threads.add(threading.current_thread())
        pruned.append((matrix.layer, matrix.name))
        return original(self, matrix, moments, device)

    monkeypatch.setattr(PruningSettings, "prune", noted)
    model = open_model(write("llama3", tmp_path / "llama3"))
    prune_model(model, corpus_of(), "sparsegpt", 0.5, devices=("cpu",))
    first = [name for layer, name in pruned if layer == 0]
    assert set(first[:1]) <= {"mlp.down_proj", "mlp.gate_proj"}
    at = first.index("q")
    assert first[at : at + 3] == ["q", "k", "v"]
    assert threading.main_thread() not in threads
    matrices = block_matrices(open_model(tmp_path / "llama3"))[0]
    assert InputMoments(matrices).together(matrices) == [[number] for number in range(len(matrices))]


def test_each_thread_computes_as_the_caller_does(tmp_path, monkeypatch):
    """Whatever another thread has set before: how sums are split decides their last bits."""
    own, own_start, seen = PruningSettings.prune, threading.Thread.start, []

    def start(thread):
        other = threading.Thread(target=torch.set_num_threads, args=(1,))
        own_start(other)
        other.join()
        own_start(thread)

    def prune(self, *arguments):
        seen.append(torch.get_num_threads())
        return own(self, *arguments)

    monkeypatch.setattr(PruningSettings, "prune", prune)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        monkeypatch.setattr(threading.Thread, "start", start)
        model = open_model(write("gpt2", tmp_path / "gpt2"))
        prune_model(model, corpus_of(), "wanda", 0.5, devices=["cpu", "cpu"])
        assert set(seen) == {3}
    finally:
        torch.set_num_threads(before)


def test_it_stops_between_matrices_and_goes_on_from_finished_blocks(tmp_path):
    """Oracle: a run on no device of its own, that was not stopped."""
    folder, parts = write("llama3", tmp_path / "llama3"), tmp_path / "parts"

    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    def prune(out, **options):
        return prune_model(open_model(folder), corpus_of(), "sparsegpt", 0.5, out=out, **options)

    prune(tmp_path / "whole")
    running = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        prune(parts, devices=("cpu", "cpu"), show_progress=stop)
    assert threading.active_count() == running
    assert (tmp_path / "parts.partial" / "block-000.safetensors").is_file()
    assert not (tmp_path / "parts.partial" / "block-001.safetensors").is_file()
    prune(parts, devices=("cpu", "cpu", "cpu"))
    expected, found = tensors_in(tmp_path / "whole"), tensors_in(parts)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_what_a_device_raises_is_raised(tmp_path, monkeypatch):
    def failing(self, matrix, moments, device=None):
        raise WorkError(f"{matrix.name} failed")

    monkeypatch.setattr(PruningSettings, "prune", failing)
    model, running = open_model(write("llama3", tmp_path / "llama3")), threading.active_count()
    with pytest.raises(WorkError, match="failed"):
        prune_model(model, corpus_of(), "wanda", 0.5, devices=("cpu", "cpu"))
    assert threading.active_count() == running


def test_devices_that_cannot_be_are_refused(monkeypatch):
    with pytest.raises(UsageError, match="cannot use device tpu"):
        usable_devices(["cpu", "tpu"])
    with pytest.raises(UsageError, match="devices is 'cpu': give a list of names"):
        usable_devices("cpu")
    monkeypatch.setattr("theodolite.prune.devices.usable_device", torch.device)
    with pytest.raises(UsageError, match=r"several kinds \(cpu, cuda\) differ in last bits"):
        usable_devices(["cuda:0", "cpu"])


def test_the_command_takes_them_with_commas(tmp_path, monkeypatch):
    seen = []

    def asked(model, corpus, method, sparsity, *, devices, **options):
        seen.append(devices)
        raise UsageError("asked")

    monkeypatch.setattr("theodolite.prune.prune_model", asked)
    text = tmp_path / "text.txt"
    text.write_text("one two three four " * 200)
    command = ["prune", str(write("gpt2", tmp_path / "gpt2")), "--corpus", str(text), "--length", "16"]
    for given in ([], ["--devices", "cpu, cpu"]):
        result = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "out"), *given])
        assert "asked" in result.stderr
    assert seen == [[], ["cpu", "cpu"]]
