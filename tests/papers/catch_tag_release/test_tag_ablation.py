"""One head ablated; oracles: transformers' own logits in numpy, weights edited by name, and a planted tag.

The planted model (`tests/planted.py`) says what must be found: its sinks are S1 and S2, head (0, 1) tags dimension
`OUTLIER` alone, and nothing behind layer 0 attends by that dimension.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from tests import planted
from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.models import open_model
from theodolite_papers.catch_tag_release.tag_ablation import (
    HEAD_SINKS,
    LATER_SINKS,
    LOSS_CAUGHT,
    LOSS_OTHERS,
    ablation_test,
)

IDS = planted.contexts(6)
TAG = planted.tag(0)


def corpus(ids: torch.Tensor) -> Corpus:
    return Corpus("ids", ids, torch.full((len(ids),), -1), [], 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return planted.write("gpt2", tmp_path_factory.mktemp("planted") / "model")


@pytest.fixture(scope="module")
def model(folder):
    return open_model(folder)


@pytest.fixture(scope="module")
def table(model):
    before = {name: tensor.clone() for name, tensor in model.hf.state_dict().items()}
    results = ablation_test(model, corpus(IDS), 0, 1, TAG)
    after = model.hf.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    return results.set_index(["ablation", "measure"])


def losses(reference: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        logits = reference(IDS).logits.double().numpy()
    shifted = logits - logits.max(axis=-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return -np.take_along_axis(log_p[:, :-1], IDS[:, 1:, None].numpy(), axis=-1)[..., 0]


def caught() -> np.ndarray:
    """By hand: what head (0, 1) pays S1, on average and for each query."""
    paid = np.stack([planted.attention(ids, 1) for ids in IDS.numpy()])
    masks = []
    for ids, weights in zip(IDS.numpy(), paid, strict=True):
        sink = int(np.flatnonzero(ids == planted.S1)[0])
        mask = weights[:, sink] > 0.3
        mask[[0, sink]] = False
        masks.append(mask)
    return np.stack(masks)


def free() -> np.ndarray:
    """Neither caught, nor the sink, nor the first token."""
    sinks = IDS.numpy() == planted.S1
    mask = ~caught() & ~sinks
    mask[:, 0] = False
    return mask


def by_contexts(values: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    return np.array([value[mask].mean() for value, mask in zip(values, chosen, strict=True)])


def test_losses_are_the_models_own(table, folder):
    reference = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    own = losses(reference)
    for measure, chosen in ((LOSS_CAUGHT, caught()[:, :-1]), (LOSS_OTHERS, free()[:, :-1])):
        row = table.loc[("tag ablated", measure)]
        assert row["untouched"] == pytest.approx(by_contexts(own, chosen).mean(), rel=1e-6)
        assert row["contexts"] == len(IDS)


def test_the_change_is_that_of_a_model_without_the_tag(table, folder):
    """The head's rows of c_proj, by name, times I − ûûᵀ."""
    reference = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    before = losses(reference)
    rows = slice(planted.HEAD_WIDTH, 2 * planted.HEAD_WIDTH)
    projection = reference.transformer.h[0].attn.c_proj
    with torch.no_grad():
        w_o = projection.weight[rows].clone().double()
        u = TAG @ torch.linalg.pinv(w_o) @ w_o
        u /= torch.linalg.vector_norm(u)
        projection.weight[rows] = (w_o - torch.outer(w_o @ u, u)).to(projection.weight.dtype)
    change = losses(reference) - before
    for measure, chosen in ((LOSS_CAUGHT, caught()[:, :-1]), (LOSS_OTHERS, free()[:, :-1])):
        differences = by_contexts(change, chosen)
        row = table.loc[("tag ablated", measure)]
        assert row["change"] == pytest.approx(differences.mean(), rel=1e-4, abs=1e-6)
        assert row["change_se"] == pytest.approx(
            differences.std(ddof=1) / np.sqrt(len(IDS)), rel=1e-3, abs=1e-6
        )


def test_a_planted_tag_is_the_clusters(table):
    """Layer 1 is told apart by the tag: without it next to nothing is left, with the control nearly all."""
    row = table.loc[("tag ablated", "η² in layer 1")]
    assert row["untouched"] > 0.4
    assert row["untouched"] + row["change"] < 0.15
    assert row["control"] > row["change"] / 2
    assert row["beyond"] == pytest.approx(row["change"] - row["control"], abs=1e-12)
    assert row["beyond"] + 2 * row["beyond_se"] < -row["untouched"] / 4


def test_hidden_sinks_are_none(table):
    row = table.loc[("sinks knocked out", HEAD_SINKS)]
    assert row["untouched"] == 1
    assert row["change"] == -1
    assert row["control"] == 0
    assert table.loc[("tag ablated", HEAD_SINKS)]["change"] == 0
    assert table.loc[("tag ablated", LATER_SINKS)]["untouched"] == 1  # S2 of head (1, 3)


def test_a_head_without_sinks_is_refused(model):
    with pytest.raises(UsageError, match="has no sink in this text"):
        ablation_test(model, corpus(IDS), 2, 0, TAG)
