"""`theodolite compare` as its users meet it: folders and models, files, what is gone on with, one-line errors."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pandas as pd
import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests import checkpoints, planted
from tests.calls import call, error_of
from tests.comparison.conftest import CORPUS, IDS, TEXT
from theodolite.comparison import read_outputs
from theodolite.comparison.command import candidates_of, compare_models, trace_head, without_term
from theodolite.errors import UsageError
from theodolite.models import open_model
from theodolite.models.prompts import Focus
from theodolite.passes.survey import survey
from theodolite.prune import prune_model
from theodolite.sinks.trace import trace_sinks

PROMPT_IDS = "theodolite.comparison.command.prompt_or_shipped"


@pytest.fixture(scope="module")
def folders(pair, tmp_path_factory):
    """Run folders by the names that a user would give, traces beside them."""
    root = tmp_path_factory.mktemp("folders")
    for how in ("", "destroyed"):
        for run, ending in zip(pair(how), ("", "-sinks", "-outputs"), strict=True):
            (root / f"{how or 'dense'}{ending}").symlink_to(run.folder)
    shutil.copytree(pair("destroyed").run.folder, root / "alone")
    return root


def test_run_folders(folders, tmp_path, monkeypatch):
    out = tmp_path / "out"
    status, stdout, stderr = call("compare", folders / "dense", folders / "destroyed", "--out", out)
    assert status == 0, stderr
    for said in (
        "Hit hardest: L0H2",
        "tags  3 of 5 tags survive",
        "◐ dense → destroyed",
        "in part",
        "Next-token loss: ",
        "destroyed, heads write nearly the same: ",
        "destroyed predicts the text as well: ",
    ):
        assert said in stdout
    page = out / "sinks-compare"
    assert stdout.rstrip().endswith(f"Report: {page}/index.html")
    told = json.loads((out / "comparison.json").read_text())
    (pair,) = told["comparisons"]
    assert (pair["reference"], pair["other"], pair["answer"]) == ("dense", "destroyed", "in part")
    assert {part["name"]: part["answer"] for part in pair["parts"]}["sinks"] == "in part"
    assert pair["loss"]["difference"] == pytest.approx(pair["loss"]["after"] - pair["loss"]["before"])
    index = (out / "index.html").read_text()
    assert "Comparison with" in index
    assert 'href="sinks-compare/index.html"' in index
    sinks = pd.read_parquet(page / "table-sinks.parquet")
    assert (sinks["status"] == "lost").sum() == 2
    assert [row["status"] for row in told["tables"]["sinks"]] == sinks["status"].tolist()


def test_without_a_trace_beside_each_tags_are_left_out_and_json_is_what_is_written(folders, tmp_path):
    command = ("compare", folders / "dense", folders / "alone", "--out", tmp_path)
    status, stdout, _ = call(*command)
    assert status == 0
    assert "tags  Not compared: not every survey has a run FOLDER-sinks" in stdout
    assert "head outputs  Not compared: not every survey has a run FOLDER-outputs" in stdout
    assert "Head outputs were not compared." in stdout
    status, stdout, _ = call(*command, "--json")
    assert status == 0
    assert json.loads(stdout) == json.loads((tmp_path / "comparison.json").read_text())


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A tiny model, and a copy whose head (1, 0) is destroyed; neither with sinks by nature."""
    root = tmp_path_factory.mktemp("two")
    first = checkpoints.write("gpt2", root / "first")
    model = open_model(first)
    with torch.no_grad():
        model.hf.transformer.h[1].attn.c_attn.weight[:, :8] = 0
        model.hf.transformer.h[1].attn.c_attn.bias[:8] = 0
    model.hf.save_pretrained(root / "second")
    model.tokenizer.save_pretrained(root / "second")
    return first, root / "second"


def test_models_are_surveyed_and_looked_at_side_by_side(two, text, tmp_path):
    out = tmp_path / "out"
    options = ("--corpus", text, "--length", 32, "--contexts", 8, "--layer", 1, "--head", 0)
    command = ("compare", *two, *options, "--prompt", "To be, or not to be", "--out", out)
    status, stdout, stderr = call(*command)
    assert status == 0, stderr
    assert "lost: L1H0" in stdout
    page = (out / "sinks-compare" / "index.html").read_text()
    assert "Attention of L1H0, model by model" in page
    assert "The prompt: “To be, or not to be”" in page
    made = {
        name: (out / name / "arrays.safetensors").stat().st_mtime_ns for name in ("first", "second-sinks")
    }
    assert call(*command)[0] == 0
    for name, before in made.items():
        assert (out / name / "arrays.safetensors").stat().st_mtime_ns == before


def test_what_cannot_be_compared_is_said_in_one_line(two, folders, text, tmp_path):
    first, second = two
    folders_of = (folders / "dense", folders / "destroyed")
    out = ("--out", tmp_path / "out", "--corpus", text, "--length", 32, "--contexts", 4)
    for arguments, words in (
        ((first,), "give two or more"),
        ((first, folders / "dense"), "give run folders or models, not both"),
        ((*folders_of, "--layer", 1), "leave out --layer"),
        ((*folders_of, "--rank", 1), "leave out --rank"),
        ((first, second, "--layer", 1, *out), "give both --layer and --head"),
        ((first, second, "--rank", 2, *out), "give both"),
        ((first, second, "--without-low-rank", 1, *out), "not pruned to sparse + low-rank: give the --rank"),
        ((folders / "dense", folders / "dense-sinks"), "this is a trace of sinks"),
        ((first, tmp_path / "nowhere", *out), "no checkpoint at"),
    ):
        status, _, stderr = call("compare", *arguments)
        assert status == 2, (arguments, stderr)
        assert words in error_of(stderr)


class Work:
    """Surveys in memory, on half of the planted text; or none, where nothing is to be read."""

    def __init__(self, reads: bool = True) -> None:
        self.reads = reads
        self.opened_sources: list[str] = []

    def opened(self, source):
        self.opened_sources.append(source)
        return open_model(source)

    def read(self, model):
        return replace(CORPUS, contexts=IDS[:8], labels=CORPUS.labels[:8])

    def measured(self, candidate, model, corpus):
        assert self.reads, "a pass was made"
        return survey(model, corpus), trace_sinks(model, corpus), read_outputs(model, corpus)


def test_what_cannot_be_done_is_said_before_any_pass(damaged, tmp_path, monkeypatch):
    monkeypatch.setattr(PROMPT_IDS, lambda model, prompt, shipped: IDS[0])
    config = transformers.GPT2Config.from_pretrained(damaged(), n_layer=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "shallow")
    first, second = str(damaged()), str(damaged("noisy"))
    for other, focus, options, words in (
        (second, Focus("x", 9, 0), {}, "layer 9 does not exist"),
        (second, Focus("x", 0, 9), {}, "head 9 does not exist"),
        (second, Focus(), {"layer": 9, "rank": 2}, "layer 9 does not exist"),
        (second, Focus(), {"layer": 0, "rank": 900}, "900"),
        (str(tmp_path / "shallow"), Focus("x"), {}, "no head in common"),
        (str(tmp_path / "none"), Focus(), {}, "no checkpoint at"),
    ):
        with pytest.raises(UsageError, match=words):
            compare_models([first, other], Work(reads=False), focus, **options)


@pytest.mark.slow
def test_without_the_leading_part_of_a_layer_its_sinks_are_gone(damaged, monkeypatch):
    """Planted: W_Q and W_K of layer 0 are the three sinks' own directions, and nothing else is in them."""
    monkeypatch.setattr(PROMPT_IDS, lambda model, prompt, shipped: IDS[0])
    work = Work()
    compared = compare_models([str(damaged()), str(damaged("noisy"))], work, Focus(), layer=0, rank=8)
    names = ["noisy", "noisy, layer 0 without rank 8", "noisy, layer 0 without a random part"]
    assert [audit.other for audit in compared.audits] == names
    assert [audit.reference for audit in compared.audits] == ["planted", "noisy", "noisy"]
    # Once for each to check, to survey, and for the prompt.
    assert work.opened_sources == [str(damaged()), str(damaged("noisy"))] * 3
    table = compared.outcome.tables["sinks_of_the_layer"]
    planted_there = [sink for sink in planted.SINKS if sink[0] == 0]
    assert (table["with_term"] == 1).sum() == len(planted_there)
    assert (table.loc[table["with_term"] == 1, "without_term"] == 0).all()
    deeper = compared.audits[1].part("sinks").table.query("layer == 1 and before == 1")
    assert len(deeper) == 2
    verdict = compared.outcome.verdicts[0]
    assert verdict.claim.startswith("The low-rank term makes the sinks of its layer")
    assert "ablating it leaves 0\u00a0% of them at their place" in verdict.evidence
    page = compared.outcome.exhibits[0]
    assert page.title.startswith("Attention of L0H")
    assert len(page.figure.data) == 4


def test_the_term_that_a_model_was_pruned_to_is_read_from_its_folder(damaged, tmp_path):
    """Oracle: the factors in the file, taken from the weights by hand; the control has their singular values."""
    folder = tmp_path / "oats"
    prune_model(open_model(damaged("random")), CORPUS, "oats", 0.5, iterations=5, out=folder)
    factors = load_file(folder / "low_rank" / "block-000.safetensors")
    (candidate,) = candidates_of([str(folder)])
    term, control = without_term(0, candidate, 0, None)
    assert (term.name, control.name) == (
        "oats, layer 0 without its low-rank term",
        "oats, layer 0 without a random part",
    )
    model = open_model(folder)
    weight = model.hf.transformer.h[0].attn.c_attn.weight.T.clone()  # (outputs of Q, K, V; inputs)
    for place, name in enumerate("qkv"):
        own = slice(64 * place, 64 * (place + 1))
        low = factors[f"0/{name}/left"] @ factors[f"0/{name}/right"]
        with term.intervention(model) as taken:
            left = model.hf.transformer.h[0].attn.c_attn.weight.T[own].clone()
        torch.testing.assert_close(left, weight[own] - low, atol=1e-9, rtol=0)
        assert taken[name] == pytest.approx(float(low.square().sum() / weight[own].square().sum()))
        with control.intervention(model):
            left = model.hf.transformer.h[0].attn.c_attn.weight.T[own].clone()
        values = torch.linalg.svdvals(weight[own] - left)
        torch.testing.assert_close(values, torch.linalg.svdvals(low), atol=1e-7, rtol=0)
        assert not torch.allclose(weight[own] - left, low, atol=1e-4)
    with pytest.raises(UsageError, match="a low-rank term of its own: leave out --rank"):
        without_term(0, candidate, 0, 3)


def test_the_head_that_is_shown_has_a_sink_and_each_model_is_seen_by_itself(damaged, monkeypatch):
    """L0H0 of the planted model averages; L0H2 has two sinks, as planted."""
    monkeypatch.setattr(PROMPT_IDS, lambda model, prompt, shipped: IDS[0])
    candidates = candidates_of([str(damaged()), str(damaged("destroyed"))])
    seen = trace_head(candidates, open_model, None, [(0, 0), (0, 2), (0, 1)])
    assert (seen.layer, seen.head) == (0, 2)
    assert seen.prompt == "".join(seen.tokens)
    even = torch.tril(torch.ones(60, 60, dtype=torch.float64))
    even /= even.sum(dim=1, keepdim=True)
    for name, expected, sinks in (
        ("planted", torch.from_numpy(planted.attention(IDS[0].numpy(), 2)), 2),
        ("destroyed", even, 0),
    ):
        torch.testing.assert_close(seen.traces[name].attention, expected, atol=1e-6, rtol=0)
        assert len(seen.traces[name].sinks) == sinks
    found = candidates_of(["a/model", "b/model", "model", "other"])  # called alike, they are numbered
    assert [candidate.name for candidate in found] == ["model", "model-2", "model-3", "other"]
    with pytest.raises(UsageError, match="give the --rank"):
        without_term(0, found[0], 1, None)
