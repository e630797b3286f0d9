"""Surveys of models that are read from their files block by block: the tables of the model in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from tests import checkpoints
from tests.calls import call, same_bytes
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError, WorkError
from theodolite.models import OpenModel, open_model, open_streamed
from theodolite.models.sweep import Sweep
from theodolite.passes.run import TABLES, Run
from theodolite.passes.survey import survey
from tools import small_models

FAMILIES = ("gpt2", "bert", "bloom", "qwen3", "gemma2")
"""Learned and ALiBi positions, no causal mask; blocks that return a tensor or a tuple; windows; norms of queries."""

BATCH = 5


def same_tables(one: Run, other: Run, tolerance: float = 1e-6) -> None:
    """Two runs have the same rows, and numbers to a tolerance of a column's largest: that of models in float64."""
    for name in TABLES:
        ours, theirs = getattr(one, name), getattr(other, name)
        numbers = ours.select_dtypes("float").columns
        pd.testing.assert_frame_equal(ours.drop(columns=numbers), theirs.drop(columns=numbers))
        for column in numbers:
            scale = np.nan_to_num(np.abs(ours[column])).max(
                initial=1e-9
            )  # shares that are 0 but for rounding
            np.testing.assert_allclose(
                theirs[column] / scale, ours[column] / scale, rtol=0, atol=tolerance, err_msg=column
            )


def surveyed_both_ways(folder: Path, corpus: Corpus, out: Path | None = None) -> tuple[Run, OpenModel]:
    """Survey a model whole and block by block, in float64, in batches; give the tables, which are the same."""
    whole, streamed = (opened(folder, dtype="float64") for opened in (open_model, open_streamed))
    run = survey(whole, corpus, batch=BATCH)
    same_tables(run, survey(streamed, corpus, out, batch=BATCH))
    return run, streamed


@pytest.mark.parametrize("family", FAMILIES)
def test_tables_are_those_of_the_model_in_memory_and_blocks_are_read_once(family, checkpoint, corpus):
    """Three batches. Oracle: the survey of the whole model, batch after batch."""
    _, streamed = surveyed_both_ways(checkpoint(family), corpus)
    assert streamed.streamed is not None
    assert streamed.streamed.readings == [1, 1, 1]


def test_experts(checkpoint, corpus):
    """In float32, in which split contexts differ by rounding that are run, and made of kept streams."""
    one, other = (survey(opened(checkpoint("mixtral")), corpus) for opened in (open_model, open_streamed))
    same_tables(one, other, 1e-4)


@pytest.mark.parametrize("packed", [True, False])
def test_contexts_of_unlike_lengths(packed, checkpoint):
    """A batch is as many passes as there are lengths in a row. Oracle: the survey of the whole model."""
    ids = torch.randint(checkpoints.VOCABULARY, (12, 30), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    if not packed:
        mask[3:7, 20:] = mask[9, 12:] = 0
    corpus = Corpus.from_ids(ids, attention_mask=mask)
    surveyed_both_ways(checkpoint("llama3"), corpus)


def test_tokens_that_are_left_out(tmp_path):
    """Oracle: the survey of the whole model. What a token was marked for at one layer holds at the next."""
    model = checkpoints.build("llama3")
    with torch.no_grad():
        model.model.embed_tokens.weight[[5, 9]] *= 0.1
        model.model.embed_tokens.weight[9, 3] = 3e4
    model.save_pretrained(tmp_path)
    ids = torch.randint(10, checkpoints.VOCABULARY, (16, 24), generator=torch.Generator().manual_seed(0))
    ids[[2, 7, 7], [4, 3, 9]] = 9
    corpus = Corpus.from_ids(ids)
    assert len(surveyed_both_ways(tmp_path, corpus)[0].massive) > 1


def test_large_sums_in_files(tmp_path, checkpoint, corpus, monkeypatch):
    """Oracle: the survey of the whole model. A full disk is an error in a line, and nothing is left in the folder."""
    folder = checkpoint("gpt2")
    monkeypatch.setattr("theodolite.accumulate.sums.LARGE", 1000)
    surveyed_both_ways(folder, corpus, tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(WorkError, match=r"cannot write .*: No space left on device"):
        survey(open_streamed(folder), corpus, tmp_path / "other", batch=BATCH)


@pytest.mark.parametrize("family", ["gpt2", "bloom"])
def test_stopped_it_goes_on_to_the_same_bytes(family, tmp_path, checkpoint, corpus):
    """Oracle: a survey that was not stopped."""
    folder = checkpoint(family)
    survey(open_streamed(folder), corpus, tmp_path / "whole", batch=BATCH)
    for block in (1, 2):

        def stop(what: str, done: int, total: int, block: int = block) -> None:
            if done == block:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            survey(open_streamed(folder), corpus, tmp_path / "parts", batch=BATCH, show_progress=stop)
    model = open_streamed(folder)
    survey(model, corpus, tmp_path / "parts", batch=BATCH)
    assert model.streamed is not None
    assert model.streamed.readings == [0, 0, 1]
    same_bytes(tmp_path / "whole", tmp_path / "parts")
    with pytest.raises(UsageError, match="holds a run of another model, corpus or options"):
        survey(open_model(folder), corpus, tmp_path / "parts", batch=BATCH)


@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("in_files", [False, True])
def test_passes_leave_what_the_whole_model_does(batches, in_files, tmp_path, checkpoint, corpus):
    """Oracle: the model's own pass over each batch, bit by bit."""
    whole, streamed = open_model(checkpoint("llama3")), open_streamed(checkpoint("llama3"))
    sweep = Sweep(streamed.structure.blocks, tmp_path if in_files else None)
    parts = corpus.contexts.chunk(batches)
    for layer in range(streamed.layers):
        with streamed.block_present(layer), sweep.block(layer):
            left = [streamed.forward(ids) for ids in parts]
    assert all(torch.equal(one, whole.forward(ids)) for one, ids in zip(left, parts, strict=True))
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_cannot_be_swept_is_refused_in_a_line(tmp_path, checkpoint, corpus, monkeypatch):
    case = next(case for case in small_models.cases() if case.name == "hy_v4")
    small_models.build(case).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"cannot be surveyed block by block \(its blocks pass on more"):
        survey(open_streamed(tmp_path), corpus)
    model = open_streamed(checkpoint("gpt2"))
    own = model.structure.blocks[1]
    sweep = Sweep(model.structure.blocks)
    with sweep.block(0):
        model.forward(corpus.contexts)
    drop = model.hf.transformer.drop
    monkeypatch.setattr(
        model.hf.transformer, "h", torch.nn.ModuleList([*model.hf.transformer.h[:1], drop, own])
    )
    monkeypatch.setattr(drop, "forward", lambda hidden, *args, **kwargs: 2 * hidden)
    with pytest.raises(WorkError, match="computes something between its blocks"), sweep.block(1):
        model.forward(corpus.contexts)


def test_the_command(tmp_path, checkpoint):
    text = tmp_path / "text.txt"
    text.write_text("alpha beta gamma delta of the to and " * 200)
    how = ["--corpus", text, "--length", "24", "--contexts", "12", "--dtype", "float64", "--json"]
    assert call("survey", checkpoint("llama3"), *how, "--out", tmp_path / "whole")[0] == 0
    assert call("survey", checkpoint("llama3"), *how, "--stream", "--out", tmp_path / "streamed")[0] == 0
    same_tables(Run.load(tmp_path / "whole"), Run.load(tmp_path / "streamed"))
    status, _, stderr = call("survey", checkpoint("llama3"), *how, "--stream", "--shard", "1/2")
    assert (status, "leave out --shard" in stderr) == (2, True)
