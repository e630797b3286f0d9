"""Models with and without an escape: one architecture, and the logit that is trained or is not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, GptOssForCausalLM

from tests.papers.training.test_embedded_training import SMALL as ONE_LAYER
from tests.papers.training.test_embedded_training import quiet, sources
from theodolite.errors import UsageError
from theodolite.papers.catch_tag_release.no_op_training import held_out_of, place_of, train_no_op_models
from theodolite.papers.training.models import NO_OPS, embedded_model

SMALL = replace(ONE_LAYER, layers=2, steps=8, checkpoint_every=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    out = tmp_path_factory.mktemp("trained") / "escape"
    train_no_op_models(out, seeds=1, sources=sources(), config=SMALL, threads=1, console=quiet())
    return out


def _logits(model: GptOssForCausalLM) -> list[float]:
    return torch.cat([layer.self_attn.sinks for layer in model.model.layers]).tolist()


def test_only_the_learned_logit_is_trained(folder):
    models = {e: GptOssForCausalLM.from_pretrained(place_of(folder, e, 0)) for e in NO_OPS}
    assert set(_logits(models["none"])) == {-1e4}
    assert set(_logits(models["off-by-one"])) == {0.0}
    assert len(set(_logits(models["learned"]))) == 4
    counts = {model.num_parameters() for model in models.values()}
    assert len(counts) == 1


def test_the_softmax_is_what_the_name_says():
    """Oracle: exp x / (1 + Σ exp x) by hand, and a plain softmax."""
    from theodolite.attention.inputs import attend
    from theodolite.models.taps import tapped

    for no_op, null_term in (("none", 0.0), ("off-by-one", 1.0)):
        model = embedded_model(replace(SMALL, no_op=no_op)).eval()
        calls = []

        def note(module, inputs, calls=calls):
            calls.append((inputs, attend(inputs)))
            return calls[-1][1]

        with tapped(model, note), torch.no_grad():
            model(input_ids=torch.arange(7)[None], use_cache=False)
        for inputs, output in calls:
            logits = (inputs.query @ inputs.key.mT * inputs.scaling)[0].double().numpy()
            weights = np.exp(logits) * np.tri(7)
            weights /= null_term + weights.sum(-1, keepdims=True)
            expected = weights @ inputs.value[0].double().numpy()
            np.testing.assert_allclose(output[0].transpose(0, 1).numpy(), expected, atol=1e-6)


def test_contexts_begin_with_the_end_of_text_token(folder):
    tokenizer = AutoTokenizer.from_pretrained(place_of(folder, "none", 0))
    assert tokenizer("a")["input_ids"][0] == tokenizer.eos_token_id == 0


def test_models_that_are_there_are_left_and_others_added(folder):
    before = place_of(folder, "learned", 0).stat().st_mtime_ns
    (folder / "learned-0.lock").touch()  # as a kill leaves it
    lines = train_no_op_models(folder, seeds=2, sources=sources(), config=SMALL, threads=1, console=quiet())
    assert [line.split(":")[0] for line in lines] == [f"{no_op}-1" for no_op in NO_OPS]
    assert place_of(folder, "learned", 0).stat().st_mtime_ns == before
    assert not list(folder.glob("*.lock"))
    assert held_out_of(folder, 1).exists()


def test_another_text_or_an_unknown_no_op_is_refused(folder):
    with pytest.raises(UsageError, match="trained on another text"):
        train_no_op_models(folder, seeds=1, sources=sources()[:1], config=SMALL, threads=1, console=quiet())
    with pytest.raises(UsageError, match="holds models with steps = 8, not 9; choose another folder"):
        train_no_op_models(
            folder, seeds=1, sources=sources(), config=replace(SMALL, steps=9), console=quiet()
        )
    with pytest.raises(UsageError, match="holds something else"):
        train_no_op_models(folder.parent, seeds=1, sources=sources(), config=SMALL, console=quiet())
    with pytest.raises(UsageError, match="no_op is 'door'; choose none, off-by-one, learned"):
        embedded_model(replace(SMALL, no_op="door"))
    with pytest.raises(UsageError, match="is no name of its own"):
        train_no_op_models("", seeds=1, sources=sources(), config=SMALL, console=quiet())
    with pytest.raises(UsageError, match="seeds is 0"):
        train_no_op_models(folder, seeds=0, sources=sources(), config=SMALL, console=quiet())
