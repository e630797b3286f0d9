"""Whole models quantised: against a slow pass of their blocks, and as users of the command meet it."""

from __future__ import annotations

import copy
import json
import math

import numpy as np
import pandas as pd
import pytest
import torch

from tests.cli.test_cli import call
from tests.prune import test_model
from tests.prune.families import opened_anew, write
from tests.prune.test_checkpoint import contents, stop_after
from tests.prune.test_command import RESULT, _arguments, text  # noqa: F401
from tests.prune.test_model import corpus_of, slowly_pruned
from tests.prune.test_quantised import on_grid, slow_gptq, slow_scale
from theodolite import open_model
from theodolite.errors import UsageError
from theodolite.prune import prune_model
from theodolite.prune.methods import factor_hessian
from theodolite.prune.quantised import quantised_oats


def slow_matrix(weight: np.ndarray, inputs: np.ndarray, method: str, _: float) -> np.ndarray:
    hessian = inputs.T @ inputs / len(inputs)
    if method == "gptq":
        return slow_gptq(weight, hessian, 8, 16, 0.1)
    if method == "round":
        groups = weight.reshape(-1, 16)
        rounded = [on_grid(row, slow_scale(row, np.ones(16), 8), 8) for row in groups]
        return np.stack(rounded).reshape(weight.shape)
    found = quantised_oats(
        torch.from_numpy(weight).float(),
        torch.from_numpy(np.diag(hessian).copy()),
        8,
        16,
        0.5,
        4,
        factor=factor_hessian(torch.from_numpy(hessian)),
    )
    assert found.left is not None
    return found.dense().double().numpy()


@pytest.mark.parametrize("method", ["round", "gptq", "oats"])
@pytest.mark.parametrize("family", ["llama2", "gpt2"])
def test_each_block_is_calibrated_on_the_quantised_prefix(family, method, tmp_path, monkeypatch):
    """Oracle: blocks run live, all inputs kept; matrices by loops, but for OATS, that of one matrix.

    Sums in another order move a weight to the next point of the grid now and then: a step is 1/127 of the largest.
    """
    monkeypatch.setattr(test_model, "slow_matrix", slow_matrix)
    model, corpus = opened_anew(family, tmp_path), corpus_of()
    slow = copy.deepcopy(model.hf)
    slowly_pruned(slow, corpus.contexts, method, 0)
    quantised = prune_model(
        model, corpus, method, bits=8, group=16, batch=4, iterations=4, rank_ratio=0.5, damping=0.1
    )
    for (name, expected), (_, got) in zip(slow.named_parameters(), model.hf.named_parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0.02 * float(expected.abs().max()), msg=name)
        if method != "oats":  # where one such move turns the low-rank part a little, and many weights with it
            assert float(((got - expected).abs() > 1e-4).float().mean()) < 0.01, name
    assert (quantised.table["error_scaled"] < 0.02).all()


def test_the_table_counts_bits_by_hand(tmp_path):
    model = opened_anew("llama2", tmp_path, dtype=torch.bfloat16)
    table = prune_model(model, corpus_of(), "oats", bits=4, group=16, iterations=2, rank_ratio=0.4).table
    assert (table["bits"] == 4).all()
    assert table["sparsity"].isna().all()
    assert table["asked"].isna().all()
    outputs, inputs, rank = table["outputs"], table["inputs"], table["rank"]
    assert (rank > 0).all()
    quantised = outputs * inputs * 4 // 8 + outputs * (inputs // 16) * 2
    low_rank = rank * (outputs + inputs) * 2
    assert (table["compact_bytes"] == quantised + low_rank).all()
    assert (low_rank <= 0.4 * table["compact_bytes"]).all()
    assert (low_rank + 2 * (outputs + inputs) > 0.4 * (table["compact_bytes"] + 2 * (outputs + inputs))).all()
    assert (table["error"] > 0).all()


@pytest.mark.parametrize(("family", "method"), [("gpt2", "gptq"), ("gpt2", "oats"), ("gpt_oss", "oats")])
def test_stopped_it_goes_on_to_the_same_bytes(family, method, tmp_path):
    """Oracle: the files of one that was not stopped. Matrices that are transposed, or of experts, too."""

    def quantised(name: str, **options: object) -> None:
        model = opened_anew(family, tmp_path)
        options |= {"bits": 4, "group": 0, "iterations": 2, "rank_ratio": 0.5, "batch": 4}
        prune_model(model, corpus_of(), method, out=tmp_path / name, **options)

    quantised("whole")
    with pytest.raises(KeyboardInterrupt):
        quantised("parts", show_progress=stop_after(13))
    assert (tmp_path / "parts.partial" / "block-000.safetensors").is_file()
    quantised("parts")
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    model = opened_anew(family, tmp_path)
    with pytest.raises(UsageError, match=r"--bits 4 there, 8 now"):
        prune_model(
            model,
            corpus_of(),
            method,
            bits=8,
            group=0,
            rank_ratio=0.5,
            iterations=2,
            batch=4,
            out=tmp_path / "whole",
        )


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks it
@pytest.mark.parametrize("family", ["gpt2", "llama3"])
def test_the_low_rank_part_can_be_an_adapter(family, tmp_path):
    """Oracle: the merged checkpoint, bit by bit."""
    for form in ("merged", "adapter"):
        model = opened_anew(family, tmp_path, dtype=torch.bfloat16)
        options = {"bits": 4, "group": 16, "iterations": 2, "rank_ratio": 0.5, "form": form}
        prune_model(model, corpus_of(), "oats", out=tmp_path / form, **options)
    theirs = open_model(tmp_path / "merged").hf.state_dict()
    for name, tensor in open_model(tmp_path / "adapter").hf.state_dict().items():
        assert torch.equal(tensor, theirs[name]), name


BAD = {
    "bits is 5: use one of 3, 4, 8": {"bits": 5},
    "wanda does not quantise: leave out --bits, or use oats, gptq, round": {"method": "wanda"},
    "gptq quantises: give --bits, or use oats, sparsegpt, wanda, magnitude": {"bits": None, "sparsity": 0.5},
    "unknown method lottery: use oats, gptq, round": {"method": "lottery"},
    "bits say how weights are stored, not which: leave out --sparsity": {"sparsity": 0.5},
    "bits say how weights are stored, not which: leave out --pattern": {"pattern": "2:4"},
    "groups of 24 need a multiple of 24 inputs; a matrix has 32": {"group": 24},
    "group is -1": {"group": -1},
    "rank_ratio is 1.0": {"method": "oats", "rank_ratio": 1.0},
    "iterations is 0": {"method": "oats", "iterations": 0},
    "120 tokens do not calibrate GPTQ": {"corpus": corpus_of(5)},
    "quantised weights have no zeros to leave out: use --format merged": {"form": "factored"},
    "gptq has no low-rank part that an adapter could hold": {"form": "adapter"},
}


@pytest.mark.parametrize("words", BAD)
def test_what_cannot_be_done_is_refused_before_anything_is(words, opened, tmp_path):
    arguments = {"corpus": corpus_of(), "method": "gptq", "bits": 4, "group": 16, **BAD[words]}
    model = opened("gpt2")
    with pytest.raises(UsageError) as error:
        prune_model(model, out=tmp_path / "out", **arguments)
    assert words in str(error.value)
    assert model.interventions == ()
    assert not list(tmp_path.iterdir())


def test_rounding_needs_few_tokens(tmp_path):
    table = prune_model(
        opened_anew("gpt2", tmp_path), corpus_of(1), "round", bits=4, group=16, errors=True
    ).table
    assert table["error"].isna().all()
    assert (table["error_scaled"] > 0).all()


def test_the_command_quantises_and_says_how_many_bits(tmp_path, text):  # noqa: F811
    model, out = write("llama3", tmp_path / "model"), tmp_path / "out"
    more = ("--method", "gptq", "--bits", "4", "--group", "16", "--damping", "0.01")
    status, stdout, stderr = call(*_arguments(model, text, out, *more))
    assert status == 0, stderr
    said = " ".join(stdout.split())
    assert "bits of a weight" in said
    assert "removed" not in said
    told = json.loads((out / "pruning.json").read_text())["pruning"]
    assert (told["bits"], told["group"], told["damping"], told["sparsity"]) == (4, 16, 0.01, None)
    table = pd.read_parquet(out / "pruning.parquet")
    result = json.loads((out / RESULT).read_text())
    page = (out / RESULT).with_name("index.html").read_text()
    assert "share of entries removed" not in page
    all_bits = 8 * table["compact_bytes"].sum() / (table["outputs"] * table["inputs"]).sum()
    assert math.isclose(all_bits, 6)  # one scale of 32 bits, as the weights have, for 16 inputs
    assert "4, and 6 with scales, one for 16 inputs" in json.dumps(result)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--group", "64"), "nothing is quantised without --bits: leave out --group"),
        (
            ("--bits", "4", "--method", "round", "--damping", "0.1"),
            "round has no such option: leave out --damping",
        ),
        (("--bits", "4", "--sparsity", "0.5"), "leave out --sparsity"),
        (("--method", "gptq"), "gptq quantises: give --bits"),
        (("--bits", "4", "--method", "gptq"), "groups of 128 need a multiple of 128 inputs"),
    ],
)
def test_bad_calls_get_one_line(more, words, tmp_path, text):  # noqa: F811
    status, stdout, stderr = call(
        *_arguments(write("gpt2", tmp_path / "model"), text, tmp_path / "out", *more)
    )
    (line,) = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert status in (1, 2)
    assert words in line
    assert not stdout
    assert not (tmp_path / "out").exists()
