"""Models whose layers are not alike: blocks without attention, heads of other numbers and widths, shared blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests import checkpoints
from theodolite import compare
from theodolite.comparison import read_outputs
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.models import open_model, open_streamed
from theodolite.passes.survey import spectra, survey
from theodolite.prune import prune_model
from theodolite.report.page import write_report
from theodolite.sinks.interventions import attention_knockout, without_low_rank
from theodolite.sinks.outliers import find_outliers
from theodolite.sinks.prompt import read_prompt
from theodolite.sinks.trace import trace_sinks
from theodolite.train.locater import Locater
from theodolite.train.monitor import GeometryMonitor
from tools import measured_families, small_models

HYBRID, WIDTHS, SHARED = "lfm2", "gemma4_text", "albert"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("unlike")

    def write(name: str):
        if not (root / name).exists():
            case = next(case for case in small_models.cases() if case.name == name)
            small_models.build(case).save_pretrained(root / name)
            checkpoints.byte_tokenizer().save_pretrained(root / name)
        return root / name

    return write


@pytest.fixture(scope="module")
def model(folder):
    return lambda name: open_model(folder(name))


CORPUS = Corpus.random_tokens(250, 24, 8)


@pytest.mark.parametrize("name", [HYBRID, WIDTHS, SHARED])
def test_columns_are_those_of_eager_attention(name, folder):
    """Oracle: the family's own model with `output_attentions` and `output_hidden_states`, columns by definition."""
    ids = measured_families.random_ids(folder(name))
    streams, attention = measured_families.eager(folder(name), ids)
    measured = measured_families.surveyed(folder(name), ids, streams, attention)
    assert (measured["outcome"], measured["why"]) == ("surveyed", "")
    assert measured["compared"] == "layers and heads"


def test_a_hybrid_through_everything(folder, model, tmp_path):
    """Oracles: the config's own kinds of layers; W_q, W_k by name; the survey's numbers, read in other ways."""
    hybrid = model(HYBRID)
    layers = [n for n, kind in enumerate(hybrid.hf.config.layer_types) if kind == "full_attention"]
    assert list(hybrid.attending) == layers == [1, 3]
    run = survey(hybrid, CORPUS, tmp_path / "run")
    heads = run.heads.set_index(["layer", "head"])
    assert list(heads.index) == [(layer, head) for layer in layers for head in range(4)] == hybrid.places
    assert list(run.layers["layer"]) == [0, 1, 2, 3, 4]
    assert len(run.arrays["entropy_by_position"]) == 4
    assert run.arrays["entropy_by_position"][[0, 2]].isnan().all()
    assert set(run.constituents["layer"]) == set(run.sinks["layer"]) | set(layers) == set(layers)
    np.testing.assert_allclose(
        heads["entropy"],
        [run.arrays["entropy_by_position"][layer, head].mean() for layer, head in heads.index],
        rtol=1e-12,
    )
    weights = spectra(open_streamed(folder(HYBRID)))
    assert list(zip(weights.heads["layer"], weights.heads["head"], strict=True)) == hybrid.places
    np.testing.assert_allclose(weights.heads["trace_of_square"], run.heads["trace_of_square"], rtol=1e-9)
    assert "L3H" in write_report(run, tmp_path / "report").read_text()

    traced, outputs = trace_sinks(hybrid, CORPUS), read_outputs(hybrid, CORPUS)
    assert set(traced.traces["layer"]) <= set(layers)
    assert not outputs.arrays["written"][[0, 2]].any()
    assert outputs.arrays["written"][layers].any()
    audit = compare(run, run, traced, traced, outputs_of=(outputs, outputs))
    assert not any(part.count(status) for part in audit.parts for status in ("lost", "new"))
    assert set(find_outliers(hybrid, CORPUS).head_dimensions["layer"]) == set(layers)
    prompt = read_prompt(hybrid, CORPUS.contexts[0])
    assert list(prompt.layers) == layers


def test_a_hybrid_in_training(model, tmp_path):
    """Oracle: the survey of the same contexts."""
    hybrid = model(HYBRID)
    monitor = GeometryMonitor(hybrid.hf, CORPUS.contexts, folder=tmp_path)
    monitor(0)
    expected = survey(hybrid, CORPUS).heads
    got = monitor.last.heads
    assert list(zip(got["layer"], got["head"], strict=True)) == hybrid.places
    np.testing.assert_allclose(got["entropy"], expected["entropy"], rtol=1e-6)
    np.testing.assert_allclose(got["trace_of_square"], expected["trace_of_square"], rtol=1e-9)


def test_locater_is_of_the_layers_that_attend(model):
    jamba = model("jamba").hf.requires_grad_(True)
    attending = [layer for layer, block in enumerate(jamba.model.layers) if hasattr(block, "self_attn")]
    assert Locater(jamba, 0.1, 0.0).layers == attending == [1, 3]
    with pytest.raises(UsageError, match="layer 2 does not exist or does not attend"):
        Locater(jamba, 0.1, 0.0, layers=[2])


def test_heads_of_two_widths_are_traced(model, tmp_path):
    """Gemma 4: whole layers have wider heads. Oracle: W_q by its name; the rest holds what it is given."""
    gemma = model(WIDTHS)
    assert gemma.structure.value_widths == (8, 8, 8, 16)
    attention = gemma.hf.model.layers[3].self_attn
    expected = attention.q_proj.weight.detach().double().unflatten(0, (4, 16)).mT
    torch.testing.assert_close(gemma.head_weights(3).w_q, expected, rtol=1e-6, atol=1e-8)
    run = survey(gemma, CORPUS)
    assert run.arrays["spectrum"].shape == (4, 4, 16, 2)
    assert run.arrays["spectrum"][0, :, 8:].isnan().all()
    assert not run.arrays["spectrum"][3].isnan().any()
    write_report(run, tmp_path)
    assert len(trace_sinks(gemma, CORPUS, local_sinks=True).traces)
    with pytest.raises(UsageError, match="layers differ in number or width of heads"):
        find_outliers(gemma, CORPUS)


def test_a_shared_block_is_a_layer_each_time_and_is_not_changed_alone(model):
    albert = model(SHARED)
    assert (albert.layers, len(set(albert.structure.blocks))) == (4, 1)
    assert albert.hf.config.num_hidden_layers == 4
    for change in (attention_knockout(albert, 1, 0, [0]), without_low_rank(albert, 1, 1)):
        with pytest.raises(UsageError, match="several layers share one attention module"), change:
            pass
    with pytest.raises(UsageError, match="several layers share one block"):
        prune_model(albert, CORPUS, "magnitude", 0.5)
    albert.hf.requires_grad_(True)
    assert Locater(albert.hf, 0.1, 0.0).layers == [0]
