"""Whole models pruned layer by layer, against an independent slow pruning, and in every family; what is refused."""

from __future__ import annotations

import copy
import math
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from tests.checkpoints import WITH_EXPERTS
from tests.prune import corpus_of
from tests.prune.test_checkpoint import assert_equal
from tests.prune.test_methods import slow_sparsegpt
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError, WorkError
from theodolite.models import open_model
from theodolite.models.stored.factored import read_matrices
from theodolite.models.weights.block_matrices import block_matrices
from theodolite.prune import Pruned, oats, prune_model
from theodolite.report.content import text_line
from theodolite.sinks import interventions

METHODS = ("magnitude", "wanda", "sparsegpt", "oats")
ITERATIONS = 6
"""Of OATS; what they converge to is tested where one matrix is."""


# The slow pruning: matrices by hand, whole forward passes of a live model, all inputs kept, numpy.

LLAMA = [
    *(("self_attn." + name, slice(None)) for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
    *(("mlp." + name, slice(None)) for name in ("gate_proj", "up_proj", "down_proj")),
]
GPT2 = [
    *(("attn.c_attn", slice(start, start + 32)) for start in (0, 32, 64)),
    *((name, slice(None)) for name in ("attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
]


def slowly_pruned(model, ids, method, sparsity):
    gpt2 = isinstance(model, transformers.GPT2LMHeadModel)
    for block in model.transformer.h if gpt2 else model.model.layers:
        inputs: dict[str, np.ndarray] = {}
        hooks = [_keeping(module, name, inputs) for name, module in block.named_modules() if name]
        with torch.no_grad():
            model(ids)
        for hook in hooks:
            hook.remove()
        for name, rows in GPT2 if gpt2 else LLAMA:
            weight = block.get_submodule(name).weight.data
            part = weight[:, rows].T if gpt2 else weight[rows]
            part.copy_(torch.from_numpy(slow_matrix(part.double().numpy(), inputs[name], method, sparsity)))


def _keeping(module, name, inputs):
    def keep(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if args:  # attention modules are called by keywords
            inputs[name] = args[0].flatten(0, -2).double().numpy()

    return module.register_forward_pre_hook(keep)


def slow_matrix(weight: np.ndarray, inputs: np.ndarray, method: str, sparsity: float) -> np.ndarray:
    """One matrix (outputs, inputs) from all vectors that entered it, written from the papers' formulas."""
    width = weight.shape[1]
    if method == "magnitude":
        order = np.argsort(np.abs(weight), axis=None)[: int(sparsity * weight.size)]
        pruned = weight.copy()
        pruned.flat[order] = 0
        return pruned
    if method == "wanda":
        score = np.abs(weight) * np.linalg.norm(inputs, axis=0)
        pruned = weight.copy()
        np.put_along_axis(pruned, np.argsort(score, axis=1)[:, : int(sparsity * width)], 0, axis=1)
        return pruned
    if method == "sparsegpt":
        return slow_sparsegpt(weight, inputs.T @ inputs, sparsity)
    second_moment = torch.from_numpy((inputs**2).mean(axis=0))
    found = oats(torch.from_numpy(weight).float(), second_moment, sparsity, iterations=ITERATIONS)
    return found.dense().double().numpy()


@pytest.mark.parametrize(
    ("family", "method"), [*(("gpt2", method) for method in METHODS), ("llama2", "sparsegpt")]
)
def test_each_block_is_calibrated_on_the_pruned_prefix(family, method, anew):
    """Oracle: `slowly_pruned`, which shares no code but, for OATS, that of one matrix."""
    model, corpus = anew(family), corpus_of()
    slow = copy.deepcopy(model.hf)
    slowly_pruned(slow, corpus.contexts, method, 0.5)
    pruned = prune_model(model, corpus, method, 0.5, batch=4, iterations=ITERATIONS)
    for (name, expected), (_, got) in zip(slow.named_parameters(), model.hf.named_parameters(), strict=True):
        if method != "oats":  # whose sum has no zeros
            assert torch.equal(got == 0, expected == 0), name
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4, msg=name)
    assert (pruned.table["tokens"] == (method != "magnitude") * corpus.contexts.numel()).all()
    assert pruned.folder is None


def test_a_wide_model_is_read_with_products_in_bfloat16_and_by_exact_in_float32(anew, monkeypatch):
    """Oracle: `slowly_pruned`, in float32 and under autocast by PyTorch's own hooks: bfloat16 has eight bits."""
    corpus, exact, rounded = corpus_of(), anew("llama3"), anew("llama3")
    slow, slow_rounded = copy.deepcopy(exact.hf), copy.deepcopy(exact.hf)
    slowly_pruned(slow, corpus.contexts, "wanda", 0.5)
    with torch.autocast("cpu", torch.bfloat16):
        slowly_pruned(slow_rounded, corpus.contexts, "wanda", 0.5)
    monkeypatch.setattr("theodolite.prune.model.WIDE", 0)
    monkeypatch.setattr("theodolite.prune.model.multiplies_bfloat16_faster", lambda: True)
    settings = [
        prune_model(model, corpus, "wanda", 0.5, exact=model is exact).provenance["pruning"]
        for model in (exact, rounded)
    ]
    assert [each.get("products") for each in settings] == [None, "bfloat16"]
    differ = 0
    for name, expected in slow.named_parameters():
        assert torch.equal(exact.hf.get_parameter(name), expected), name
        ours, theirs = (model.get_parameter(name) == 0 for model in (rounded.hf, slow_rounded))
        assert (ours != theirs).float().mean() < 0.01
        differ += int((ours != (expected == 0)).sum())
    assert differ


@pytest.mark.parametrize("method", METHODS)
def test_the_table_says_what_was_done(method, anew):
    """Oracle: inputs kept by hooks on the dense model's first block, errors and counts in numpy."""
    model, corpus = anew("llama3"), corpus_of()
    dense, inputs = copy.deepcopy(model.hf), {}
    for name, module in dense.model.layers[0].named_modules():
        _keeping(module, name, inputs)
    with torch.no_grad():
        dense(corpus.contexts)
    table = prune_model(model, corpus, method, 0.5, iterations=ITERATIONS).table
    assert list(table["layer"].unique()) == [0, 1, 2]
    for row in table[table["layer"] == 0].itertuples():
        path = {f"{name}": f"self_attn.{name}_proj" for name in "qkv"}.get(row.matrix, row.matrix)
        assert row.parameter == f"model.layers.0.{path}.weight"
        before = dense.get_parameter(row.parameter).double().numpy()
        after = model.hf.get_parameter(row.parameter).double().numpy()
        assert (row.outputs, row.inputs) == before.shape
        rms = np.sqrt((inputs[path] ** 2).mean(axis=0)) if method != "magnitude" else 1
        scaled = np.linalg.norm((before - after) * rms) / np.linalg.norm(before * rms)
        assert math.isclose(row.error_scaled, scaled, rel_tol=1e-6)
        assert row.damping >= 0.1 if method == "sparsegpt" else math.isnan(row.damping)
        kept = row.nonzeros + row.rank * (row.outputs + row.inputs)
        assert math.isclose(row.sparsity, 1 - kept / before.size, rel_tol=1e-12)
        if method != "oats":
            assert row.nonzeros == np.count_nonzero(after)
            assert row.rank == 0
        assert abs(row.sparsity - 0.5) < 0.04
        assert row.fallback == ""


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_a_pruned_checkpoint_of_every_family_opens_in_transformers(family, tmp_path, anew):
    """Oracle: the dense checkpoint, tensor by tensor, and the linear layers of its blocks by their classes."""
    dense = anew(family)
    table = prune_model(anew(family), corpus_of(), "wanda", 0.5, out=tmp_path / "out").table
    model = type(dense.hf).from_pretrained(tmp_path / "out").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("abc")["input_ids"] == dense.tokenizer("abc")["input_ids"]
    linear = {
        f"{name}.weight"
        for name, module in dense.hf.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and name.startswith(_blocks(dense))
    }
    linear |= {name for name, parameter in dense.hf.named_parameters() if parameter.ndim == 3}
    assert set(table["parameter"]) == linear
    for (name, before), after in zip(dense.hf.state_dict().items(), model.state_dict().values(), strict=True):
        if name not in linear:
            assert torch.equal(before, after), name
    opened = open_model(tmp_path / "out")
    for matrix in (matrix for block in block_matrices(opened) for matrix in block):
        assert ((matrix.read() == 0).sum(dim=1) == matrix.shape[1] // 2).all(), matrix.key
    if family != "bert":
        ids = torch.tensor([[5, 6, 7]])
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
        assert model.generate(ids, **options).shape[1] <= 7
    tied = dense.hf.config.tie_word_embeddings
    head = model.get_output_embeddings()
    assert head is None or (head.weight is model.get_input_embeddings().weight) == tied


def _blocks(model) -> tuple[str, ...]:
    """What the names of the modules inside its blocks begin with."""
    names = {module: name for name, module in model.hf.named_modules()}
    return tuple(f"{names[block]}." for block in model.structure.blocks)


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_factored_and_merged_are_the_same_model(family, tmp_path, anew):
    """Oracle: the model pruned in memory, bit by bit; the checkpoint's bytes by counting values, bits and factors."""
    model, out = anew(family), tmp_path / "out"
    pruned = prune_model(model, corpus_of(), "oats", 0.5, iterations=2, out=out, form="factored")
    factored = open_model(out).hf
    assert type(factored) is type(model.hf)
    assert_equal(factored.state_dict(), model.hf.state_dict())
    head = factored.get_output_embeddings()
    tied = factored.config.tie_word_embeddings
    assert head is None or (head.weight is factored.get_input_embeddings().weight) == tied
    again = Pruned.load(out)
    pd.testing.assert_frame_equal(again.table, pruned.table)
    assert again.provenance == pruned.provenance
    assert again.low_rank.keys() == pruned.low_rank.keys()
    for at, factors in pruned.low_rank.items():
        assert all(map(torch.equal, again.low_rank[at], factors))
    with pytest.raises(UsageError, match="W_Q, W_K and W_V of block 7 have no low-rank part"):
        again.factors(7)
    assert "oats" in repr(again)
    told, table = pruned.provenance["pruning"], pruned.table
    entries = (table["outputs"] * table["inputs"]).sum()
    kept = table["nonzeros"] + table["rank"] * (table["outputs"] + table["inputs"])
    compact = 4 * kept.sum() + entries / 8
    assert 0 <= told["bytes"] - (told["dense_bytes"] - 4 * entries + compact) <= 80_000  # of headers and rows


def test_a_factored_folder_that_is_not_whole_is_refused(tmp_path, anew):
    out = tmp_path / "out"
    prune_model(anew("gpt2"), corpus_of(), "wanda", 0.5, out=out, form="factored")
    with pytest.raises(UsageError, match="out is factored, and goes to one device: leave out --device-map"):
        open_model(out, device_map="auto")
    assert open_model(out, dtype="float64").hf.dtype == torch.float64
    with pytest.raises(OSError, match=r"model\.safetensors"):  # transformers would make up weights
        transformers.AutoModelForCausalLM.from_pretrained(out)
    dense = (out / "dense.safetensors").read_bytes()
    (out / "dense.safetensors").write_bytes(dense[:-3])
    with pytest.raises(UsageError, match=r"cannot open .*out: .*"):
        open_model(out)
    (out / "dense.safetensors").write_bytes(dense)
    block = (out / "block-001.safetensors").read_bytes()
    (out / "block-001.safetensors").write_bytes(block[:-3])
    with pytest.raises(WorkError, match=r"block-001\.safetensors is damaged"):
        open_model(out)
    (out / "block-001.safetensors").unlink()
    with pytest.raises(WorkError, match=r"lacks 4 of the model's tensors \(first: transformer\.h\.1\.attn"):
        open_model(out)


def test_rank_goes_where_it_is_asked_for(anew):
    """Oracle: r = ⌊κ(1 − ρ) · outputs · inputs / (outputs + inputs)⌋, by hand."""
    model = anew("gpt2")
    ratios = {(1, "q"): 0.5, (2, "mlp.c_fc"): 0.0}
    options = {"iterations": 3, "rank_ratio": lambda *place: ratios.get(place, 0.25)}
    table = prune_model(model, corpus_of(), "oats", [0.4, 0.5, 0.6], **options).table
    table = table.set_index(["layer", "matrix"])
    assert table["rank"][0, "q"] == int(0.25 * 0.6 * 16)
    assert table["rank"][1, "q"] == int(0.5 * 0.5 * 16) == 4
    assert table["rank"][1, "k"] == int(0.25 * 0.5 * 16) == 2
    assert table["rank"][2, "mlp.c_fc"] == 0
    assert table["asked"].groupby("layer").first().tolist() == [0.4, 0.5, 0.6]
    for (layer, _), sparsity in table["sparsity"].items():
        assert abs(sparsity - [0.4, 0.5, 0.6][layer]) < 0.05


@pytest.mark.parametrize("method", METHODS)
def test_a_pattern_holds_in_every_group(method, tmp_path, anew):
    """Oracle: counts of each four neighbouring inputs, in the sparse part."""
    model, options = anew("phi3"), {"pattern": "2:4", "iterations": 3, "form": "factored"}
    pruned = prune_model(model, corpus_of(), method, 0.5, out=tmp_path / "out", **options)
    for layer in range(3):
        for piece in read_matrices(tmp_path / "out" / f"block-{layer:03d}.safetensors")[0]:
            groups = (piece.sparse != 0).unflatten(1, (-1, 4)).sum(dim=2)
            assert (groups <= 2).all(), piece.key
    assert pruned.provenance["pruning"]["pattern"] == "2:4"


def test_an_expert_that_no_token_reaches_is_pruned_all_the_same(anew):
    """Oracle: magnitude by output, which is what Wanda does when all inputs count alike."""
    model = anew("gpt_oss")
    for block in model.structure.blocks:
        block.mlp.router.bias.data[:] = torch.tensor([100.0, -100.0])
    dense = model.hf.model.layers[0].mlp.experts.down_proj[1].clone()
    table = prune_model(model, corpus_of(), "wanda", 0.5).table.set_index(["layer", "matrix", "expert"])
    assert (table.xs(1, level="expert")["tokens"] == 0).all()
    assert table.xs(1, level="expert")["fallback"].str.startswith("no token of the text reached it").all()
    assert (table.xs(0, level="expert")["fallback"] == "").all()
    got = model.hf.model.layers[0].mlp.experts.down_proj[1]  # (inputs, outputs)
    smallest = dense.abs().argsort(dim=0)[:24]
    assert torch.equal(got == 0, torch.zeros_like(got, dtype=torch.bool).scatter(0, smallest, True))


def test_a_method_that_weighs_no_inputs_runs_no_block(tmp_path, monkeypatch, anew):
    """The text decides nothing: on another it is the same pruning."""
    monkeypatch.setattr("theodolite.prune.model.BlockByBlock", None)
    options = {"method": "magnitude", "sparsity": 0.5, "out": tmp_path / "out"}
    pruned = prune_model(anew("gpt2"), corpus_of(), **options)
    assert text_line(pruned.provenance) == "weights only, no text was read"
    assert (pruned.table["fallback"] == "").all()
    prune_model(anew("gpt2"), corpus_of(length=12), **options)


def test_a_matrix_that_nothing_enters_is_an_error_that_names_it(anew):
    """Of magnitude alone it is not, which weighs no inputs. Oracle: a layer that no forward pass calls."""
    for method in ("wanda", "magnitude"):
        model = anew("gpt2")
        model.structure.blocks[1].mlp.unused = torch.nn.Linear(8, 8)
        if method == "wanda":
            with pytest.raises(WorkError, match=r"transformer\.h\.1\.mlp\.unused\.weight got no input"):
                prune_model(model, corpus_of(), method, 0.5)
    table = prune_model(model, corpus_of(), method, 0.5).table
    assert (table[table["matrix"] == "mlp.unused"]["sparsity"] == 0.5).all()


@pytest.mark.parametrize("form", ["merged", "factored", "adapter"])
def test_what_is_skipped_stays_as_it_is(form, tmp_path, anew):
    """Oracle: the dense weights, bit by bit; a pruning that is finished is read again."""
    skip = ["mlp.c_proj", "transformer.h.1.*"]
    dense = anew("gpt2")
    options = {"iterations": 2, "skip": skip, "out": tmp_path / "out", "form": form}
    pruned = prune_model(anew("gpt2"), corpus_of(), "oats", 0.5, **options)
    assert set(zip(pruned.table["layer"], pruned.table["matrix"], strict=True)) == {
        (layer, name) for layer in (0, 2) for name in ("q", "k", "v", "attn.c_proj", "mlp.c_fc")
    }
    assert pruned.provenance["pruning"]["skip"] == sorted(skip)
    assert "transformer.h.0.mlp.c_proj.weight" in pruned.provenance["pruning"]["left_dense"]
    again = anew("gpt2")
    prune_model(again, corpus_of(), "oats", 0.5, **options)
    for model in (open_model(tmp_path / "out"), again):
        written = model.hf.state_dict()
        for name, tensor in dense.hf.state_dict().items():
            if ".h.1." in name or "mlp.c_proj" in name or name == "lm_head.weight":
                assert torch.equal(written[name], tensor), name
        name = "transformer.h.0.attn.c_attn.weight"
        assert not torch.equal(written[name], dense.hf.state_dict()[name])


@pytest.mark.parametrize(
    ("attention", "half"), [(None, "decoder"), ("cross", "decoder"), ("encoder", "encoder")]
)
def test_one_half_of_an_encoder_decoder_is_pruned_and_read_back(tmp_path, attention, half, checkpoint):
    """The same call finds it finished, and puts it into the model."""
    first, again = (open_model(checkpoint("t5"), attention=attention) for _ in range(2))
    for model in (first, again):
        pruned = prune_model(model, corpus_of(), "magnitude", 0.5, out=tmp_path / "out")
    assert all(name.startswith(f"{half}.") for name in pruned.table["parameter"])
    assert_equal(again.hf.state_dict(), first.hf.state_dict())


def test_the_model_says_that_it_was_pruned_and_how(anew):
    """What is measured of it in memory must not be taken for the dense model's, nor for another pruning's."""
    interventions = []
    for sparsity in (0.5, 0.5, 0.6):
        model = anew("gpt2")
        assert model.interventions == ()
        prune_model(model, corpus_of(), "magnitude", sparsity)
        interventions += model.interventions
    assert all(re.fullmatch(r"pruned\(magnitude, sha256:[0-9a-f]{16}\)", name) for name in interventions)
    assert interventions[0] == interventions[1] != interventions[2]
    with pytest.raises(UsageError, match=r"the opened model was modified \(pruned\(magnitude"):
        prune_model(model, corpus_of(), "magnitude", 0.5)


def test_a_pruned_model_is_refused(tmp_path, anew):
    prune_model(anew("gpt2"), corpus_of(), "oats", 0.5, iterations=2, out=tmp_path / "out")
    with pytest.raises(UsageError, match=r"out is pruned already \(pruning\.json is next to its weights\)"):
        prune_model(open_model(tmp_path / "out"), corpus_of(), "wanda", 0.5)
    model = anew("gpt2")
    with interventions.without_low_rank(model, 0, 2), pytest.raises(UsageError, match="model was modified"):
        prune_model(model, corpus_of(), "wanda", 0.5)


def test_a_folder_that_holds_no_pruning_is_refused(checkpoint):
    with pytest.raises(UsageError, match="no pruned checkpoint at"):
        Pruned.load(checkpoint("gpt2"))


BAD = {
    "sparsity is 0.0": {"sparsity": 0.0},
    "sparsity is -0.5": {"sparsity": [0.5, -0.5, 0.5]},
    "2 sparsities for 3 blocks": {"sparsity": [0.5, 0.5]},
    "unknown method lottery: use oats, sparsegpt, wanda, magnitude": {"method": "lottery"},
    "oats has no such option: leave out --damping": {"damping": 0.2},
    "rank_ratio is 1.5: give the share of the low-rank part, from 0 to 1": {"rank_ratio": 1.5},
    "rank_ratio is -1": {"rank_ratio": lambda *at: -1 if at == (2, "v") else 0.25},
    "--skip mlp.down: no matrix of": {"skip": ["mlp.c_fc", "mlp.down"]},
    "--skip *: nothing is left to prune": {"skip": ["*"]},
    "keeps transformer.h.0.attn.c_attn.weight as a whole: skip all of its 3 parts": {
        "skip": ["q"],
        "form": "factored",
    },
    "every matrix gets rank 0": {"sparsity": 0.99, "form": "adapter"},
    "rank_ratio is [0.25]": {"rank_ratio": [0.25]},
    "batch is 1.5: give a whole number": {"batch": 1.5},
    "damping is nan: give a number from 0 on": {"method": "sparsegpt", "damping": math.nan},
    "iterations is 0: give a number from 1 on": {"method": "oats", "iterations": 0},
    "skip is a list of patterns: give ['mlp.*']": {"skip": "mlp.*"},
    "damping is 'a': give a number": {"method": "sparsegpt", "damping": "a"},
    "sparsity is {'q': 0.5}": {"sparsity": {"q": 0.5}},
    "no sparsity is given": {"sparsity": None},
    "pattern 2:4 removes 0.5 of the entries, not 0.6": {"method": "wanda", "sparsity": 0.6, "pattern": "2:4"},
    "pattern 3:5 needs a multiple of 5 inputs; the matrix has 32": {"sparsity": 0.4, "pattern": "3:5"},
    "unknown format zip: use one of merged, factored, adapter": {"form": "zip"},
    "120 tokens do not calibrate": {"method": "sparsegpt", "corpus": corpus_of(5)},
    "contexts of 3 tokens are too short": {
        "corpus": replace(corpus_of(5, 4), contexts=torch.ones(5, 3).long())
    },
    "token id 999 does not fit": {"corpus": Corpus.from_ids(torch.full((4, 24), 999))},
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


def test_numbers_of_numpy_are_numbers(tmp_path, anew):
    half, quarter = np.float32(0.5), np.float32(0.25)
    asked = {"iterations": np.int64(2), "batch": np.int64(2), "out": tmp_path / "out"}
    theirs = prune_model(anew("gpt2"), corpus_of(), "oats", half, rank_ratio=quarter, **asked)
    ours = prune_model(anew("gpt2"), corpus_of(), "oats", 0.5, iterations=2, batch=2)
    assert theirs.table.equals(ours.table)
    each = prune_model(anew("gpt2"), corpus_of(), "magnitude", [half, 0.5, 0.5])
    assert each.provenance["pruning"]["sparsity"] == 0.5


@pytest.mark.parametrize(
    ("globs", "layers", "matrices"),
    [
        (["transformer.h.0"], {1, 2}, 6),
        (["transformer.h.0.*"], {1, 2}, 6),
        (["attn.c_attn", "mlp"], {0, 1, 2}, 1),  # by the names of modules in the block
    ],
)
def test_a_module_that_is_skipped_takes_its_matrices_along(globs, layers, matrices, anew):
    table = prune_model(anew("gpt2"), corpus_of(), "magnitude", 0.5, skip=globs).table
    assert set(table["layer"]) == layers
    assert len(set(table["matrix"])) == matrices
    assert "attn.c_proj" in set(table["matrix"])
