"""What is not pruned, and what a pruned model says of itself."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.prune.families import opened_anew
from tests.prune.test_model import corpus_of
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.models import open_model
from theodolite.prune import Pruned, load_factored, prune_model
from theodolite.sinks import interventions


def test_the_model_says_that_it_was_pruned_and_how(tmp_path):
    """What is measured of it in memory must not be taken for the dense model's, nor for another pruning's."""
    edits = []
    for sparsity in (0.5, 0.5, 0.6):
        model = opened_anew("gpt2", tmp_path)
        assert model.interventions == ()
        prune_model(model, corpus_of(), "magnitude", sparsity)
        edits += model.interventions
    assert all(re.fullmatch(r"pruned\(magnitude, sha256:[0-9a-f]{16}\)", edit) for edit in edits)
    assert edits[0] == edits[1] != edits[2]
    with pytest.raises(UsageError, match=r"the opened model was modified \(pruned\(magnitude"):
        prune_model(model, corpus_of(), "magnitude", 0.5)


def test_a_pruned_model_is_refused(tmp_path):
    prune_model(opened_anew("gpt2", tmp_path), corpus_of(), "oats", 0.5, iterations=2, out=tmp_path / "out")
    with pytest.raises(UsageError, match=r"out is pruned already \(pruning\.json is next to its weights\)"):
        prune_model(open_model(tmp_path / "out"), corpus_of(), "wanda", 0.5)
    sparse = opened_anew("gpt2", tmp_path)
    for block in sparse.structure.blocks:
        block.mlp.c_fc.weight.data[:, ::2] = block.mlp.c_proj.weight.data[::2] = 0
    with pytest.raises(UsageError, match=r"33% of the weights .* are 0, as if it had been pruned"):
        prune_model(sparse, corpus_of(), "wanda", 0.5)
    model = opened_anew("gpt2", tmp_path)
    with (
        interventions.without_low_rank(model, 0, 2),
        pytest.raises(UsageError, match="the opened model was modified"),
    ):
        prune_model(model, corpus_of(), "wanda", 0.5)


def test_only_factored_folders_are_opened_as_such(checkpoint):
    with pytest.raises(UsageError, match="gpt2 is not a factored checkpoint"):
        load_factored(checkpoint("gpt2"))
    with pytest.raises(UsageError, match="no pruned checkpoint at"):
        Pruned.load(checkpoint("gpt2"))


BAD = {
    "sparsity is 0.0": {"sparsity": 0.0},
    "sparsity is -0.5": {"sparsity": [0.5, -0.5, 0.5]},
    "sparsity is nan": {"sparsity": math.nan},
    "2 sparsities for 3 blocks": {"sparsity": [0.5, 0.5]},
    "unknown method lottery: use oats, sparsegpt, wanda, magnitude": {"method": "lottery"},
    "rank ratio 1.5 of q in block 0 is not between 0 and 1": {"rank_ratio": 1.5},
    "rank ratio -1 of v in block 2": {
        "rank_ratio": lambda layer, name: -1 if (layer, name) == (2, "v") else 0.25
    },
    "--skip mlp.down: no matrix of": {"skip": ["mlp.c_fc", "mlp.down"]},
    "--skip *: nothing is left to prune": {"skip": ["*"]},
    "q of block 0 is a part of transformer.h.0.attn.c_attn.weight": {"skip": ["q"], "form": "factored"},
    "which leaves no low-rank part": {"rank_ratio": 0, "form": "adapter"},
    "every matrix gets rank 0": {"sparsity": 0.99, "form": "adapter"},
    "--skip transformer.h.0.ln_1: no matrix of": {"skip": ["transformer.h.0.ln_1"]},
    "skip is None: give a list of names": {"skip": None},
    "skip is [3]: give a list of names": {"skip": [3]},
    "skip is 'qk': give a list of names": {"skip": "qk"},
    "give no text": {"sparsity": "0.5"},
    "rank_ratio is [0.25]: give a number": {"rank_ratio": [0.25]},
    "batch is 1.5: give a whole number": {"batch": 1.5},
    "damping is 'a': give a number": {"method": "sparsegpt", "damping": "a"},
    "sparsity is {'q': 0.5}": {"sparsity": {"q": 0.5}},
    "iterations is 2.5: give a whole number": {"iterations": 2.5},
    "no sparsity is given": {"sparsity": None},
    "a sparsity of 0.001 removes no entry": {"method": "wanda", "sparsity": 0.001},
    "pattern 2:4 removes 0.5 of the entries, not 0.6": {"method": "wanda", "sparsity": 0.6, "pattern": "2:4"},
    "pattern 3:5 needs a multiple of 5 inputs; the matrix has 32": {"sparsity": 0.4, "pattern": "3:5"},
    "unknown format zip: use one of merged, factored, adapter": {"form": "zip"},
    "120 tokens do not calibrate": {"method": "sparsegpt", "corpus": corpus_of(5)},
    "contexts of 3 tokens are too short": {
        "corpus": replace(corpus_of(5, 4), contexts=corpus_of(5, 4).contexts[:, :3])
    },
    "token id 999 does not fit": {
        "corpus": Corpus("ids", torch.full((4, 24), 999), torch.full((4,), -1), [], 0)
    },
}


@pytest.mark.parametrize("words", BAD)
def test_what_cannot_be_done_is_refused_before_anything_is(words, opened, tmp_path):
    arguments = {"corpus": corpus_of(), "method": "oats", "sparsity": 0.5, **BAD[words]}
    model = opened("gpt2")
    before = model.hf.transformer.h[0].mlp.c_fc.weight.clone()
    with pytest.raises(UsageError) as error:
        prune_model(model, out=tmp_path / "out", **arguments)
    assert words in str(error.value)
    assert model.interventions == ()
    assert torch.equal(model.hf.transformer.h[0].mlp.c_fc.weight, before)
    assert not list(tmp_path.iterdir())


def test_numbers_of_numpy_are_numbers(tmp_path):
    half, quarter = np.float32(0.5), np.float32(0.25)
    asked = {"iterations": np.int64(2), "batch": np.int64(2), "out": tmp_path / "out"}
    theirs = prune_model(
        opened_anew("gpt2", tmp_path), corpus_of(), "oats", half, rank_ratio=quarter, **asked
    )
    ours = prune_model(opened_anew("gpt2", tmp_path), corpus_of(), "oats", 0.5, iterations=2, batch=2)
    assert theirs.table.equals(ours.table)
    each = prune_model(opened_anew("gpt2", tmp_path), corpus_of(), "magnitude", [half, 0.5, 0.5])
    assert each.provenance["pruning"]["sparsity"] == 0.5


@pytest.mark.parametrize(
    ("globs", "layers", "matrices"),
    [
        (["transformer.h.0"], {1, 2}, 6),
        (["0"], {1, 2}, 6),
        (["transformer.h.0.*"], {1, 2}, 6),
        (["attn.c_attn", "mlp"], {0, 1, 2}, 1),  # by the names of modules in the block
    ],
)
def test_a_module_that_is_skipped_takes_its_matrices_along(globs, layers, matrices, tmp_path):
    table = prune_model(opened_anew("gpt2", tmp_path), corpus_of(), "magnitude", 0.5, skip=globs).table
    assert set(table["layer"]) == layers
    assert len(set(table["matrix"])) == matrices
    assert "attn.c_proj" in set(table["matrix"])
