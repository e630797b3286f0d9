"""Models larger than a device: offloaded and in half precision, their tables are those of the model in one place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from tests import checkpoints, dense
from theodolite.corpus.corpus import Corpus
from theodolite.models import OpenModel, open_model
from theodolite.passes.run import Run
from theodolite.passes.survey import survey
from theodolite.passes.survey_pass import SurveyPass
from theodolite.sinks.trace import trace_sinks

TABLES = ("layers", "heads", "sinks", "outliers", "examples", "constituents", "attribution", "traces")


def split_map(folder: Path, first: int | str, rest: int | str) -> dict[str, int | str]:
    """Embeddings and the first block in one place, other blocks in another."""
    model = open_model(folder, device="cpu").hf
    blocks = next(name for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList))
    split: dict[str, int | str] = {
        name: first
        for name, module in model.named_modules()
        if not any(module.children()) and not name.startswith(blocks + ".")
    }
    return split | {f"{blocks}.{n}": rest if n else first for n in range(len(model.get_submodule(blocks)))}


def assert_same(got: Run, expected: Run) -> None:
    for table in TABLES:
        pd.testing.assert_frame_equal(
            getattr(got, table), getattr(expected, table), rtol=1e-12, atol=1e-15, obj=table
        )
    for name, tensor in expected.arrays.items():
        torch.testing.assert_close(got.arrays[name], tensor, rtol=1e-12, atol=1e-15, equal_nan=True, msg=name)


@pytest.mark.parametrize("family", ["gpt2", "gpt_oss", "phi3"])
def test_offloaded_models_give_the_same_tables(family, checkpoint):
    """Oracle: the same checkpoint opened in memory; survey (with constituents and attribution) and trace."""
    folder = checkpoint(family)
    model, whole = open_model(folder, device_map=split_map(folder, "cpu", "disk")), open_model(folder)
    parameters = list(model.hf.parameters())
    assert sum(p.is_meta for p in parameters) > len(parameters) / 2
    corpus = Corpus.random_tokens(checkpoints.VOCABULARY, 12, 10)
    for work in (survey, trace_sinks):
        got, expected = work(model, corpus, batch=4), work(whole, corpus, batch=4)
        assert got.provenance["device"] == "cpu"
        assert_same(got, expected)
    for layer in range(model.layers):
        assert torch.equal(model.head_weights(layer).w_q, whole.head_weights(layer).w_q)
        torch.testing.assert_close(
            model.output_weights(layer), whole.output_weights(layer), rtol=0, atol=1e-14
        )
    assert [p.is_meta for p in model.hf.parameters()] == [p.is_meta for p in parameters]


def test_experts_are_offloaded_in_the_form_that_the_model_needs(tmp_path):
    """Mixtral's checkpoints hold each expert by itself, the model all in one: what is put together waits on disk."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=checkpoints.VOCABULARY,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    MixtralForCausalLM(config).save_pretrained(tmp_path)
    corpus = Corpus.random_tokens(checkpoints.VOCABULARY, 12, 10)
    model = open_model(tmp_path, device_map={"": "disk"})
    assert all(p.is_meta for p in model.hf.parameters())
    assert_same(survey(model, corpus), survey(open_model(tmp_path), corpus))


def _kept(model: OpenModel, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> tuple[Run, dense.Dense]:
    """A survey, and what the model itself computed on the way: hidden states, and attention from its queries and keys.

    The softmax is taken in float64 numpy from the queries and keys that the half-precision model handed over.
    """
    hidden: list[list[np.ndarray]] = [[] for _ in range(model.layers + 1)]
    inputs: list[list[np.ndarray]] = [[] for _ in range(model.layers)]
    attention: list[list[np.ndarray]] = [[] for _ in range(model.layers)]
    true = {name: getattr(SurveyPass, name) for name in ("stream", "attention_input", "attention")}

    def stream(self: SurveyPass, layer: int, states: Tensor) -> None:
        hidden[layer].append(states.double().numpy())
        true["stream"](self, layer, states)

    def attention_input(self: SurveyPass, layer: int, states: Tensor) -> None:
        inputs[layer].append(states.double().numpy())
        true["attention_input"](self, layer, states)

    def attend(self: SurveyPass, layer: int, given) -> Tensor:
        query, key = given.query.double().numpy(), given.key.double().numpy()
        key = np.repeat(key, query.shape[1] // key.shape[1], axis=1)
        logits = query @ key.swapaxes(-1, -2) * given.scaling
        length = logits.shape[-1]
        seen = np.tri(length, dtype=bool) if given.mask is None else given.mask.numpy()
        logits = np.where(seen, logits, -np.inf)
        if given.sink is not None:
            extra = given.sink.double().numpy()[None, :, None, None]
            logits = np.concatenate([logits, np.broadcast_to(extra, (*logits.shape[:3], 1))], -1)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        attention[layer].append((weights / weights.sum(-1, keepdims=True))[..., :length])
        return true["attention"](self, layer, given)

    for name, own in (("stream", stream), ("attention_input", attention_input), ("attention", attend)):
        monkeypatch.setattr(SurveyPass, name, own)
    run = survey(model, corpus, batch=4)
    states = (np.stack([np.concatenate(layer) for layer in kept]) for kept in (hidden, attention, inputs))
    return run, dense.Dense(*states)


@pytest.mark.parametrize(
    ("family", "dtype"), [("gpt2", "bfloat16"), ("gpt_oss", "bfloat16"), ("llama3", "float16")]
)
def test_half_precision_surveys_are_exact(family, dtype, checkpoint, monkeypatch):
    """Oracle: dense float64 numpy of every measured column, from the hidden states that the model itself computed."""
    generator = np.random.default_rng(0)
    words = ["alpha", "beta", "gamma", "delta", "of", "the", "to", "and"]
    texts = [" ".join(generator.choice(words[i % 3 :], 40)) for i in range(12)]
    corpus = Corpus.from_texts(
        texts, checkpoints.byte_tokenizer(), 40, labels=["a", "b", "c"] * 4, contexts=12
    )
    model = open_model(checkpoint(family), dtype=dtype)
    assert model.hf.dtype == getattr(torch, dtype)
    run, kept = _kept(model, corpus, monkeypatch)
    for name, expected in dense.layer_columns(kept, corpus.labels.numpy()).items():
        np.testing.assert_allclose(run.layers[name], expected, rtol=1e-6, atol=1e-12, err_msg=name)
    for layer, states in enumerate(kept.hidden):
        x = states[:, 1:]
        mean = x.mean((0, 1))
        np.testing.assert_allclose(run.arrays["mean"][layer], mean, rtol=1e-6, atol=1e-12)
        scale = np.abs(x.mean(0) - mean).max()
        got = run.arrays["positional_basis"][layer][1:]
        np.testing.assert_allclose(got, x.mean(0) - mean, rtol=1e-6, atol=1e-6 * scale)
    for name, expected in dense.head_columns(kept, corpus.contexts.numpy(), model.causal).items():
        # Weights are float32, which shows in standard errors of entropies that hardly differ.
        np.testing.assert_allclose(run.heads[name], expected, rtol=1e-6, atol=1e-8, err_msg=name)
    for name, expected in dense.head_arrays(kept).items():
        np.testing.assert_allclose(run.arrays[name], expected, rtol=1e-6, atol=1e-7, err_msg=name)
