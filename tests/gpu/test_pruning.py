"""Every method of pruning on a GPU, against a slow pruning in numpy on the CPU (of OATS, our own CPU's result)."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.prune import corpus_of
from tests.prune.test_model import ITERATIONS, METHODS, slowly_pruned
from theodolite.models import open_model
from theodolite.prune import prune_model

pytestmark = pytest.mark.gpu

FLIPPED = 2e-3
"""Share of entries so near the threshold that rounding may decide about them."""


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama2", "gpt2"])
def test_a_model_is_pruned_as_on_the_cpu(family, method, checkpoint, device, tmp_path):
    """Oracle: the pruning of `tests/prune`, whole inputs kept, matrices in float64 numpy; and its logits."""
    corpus = corpus_of()
    oracle = copy.deepcopy(open_model(checkpoint(family), device="cpu").hf)
    slowly_pruned(oracle, corpus.contexts, method, 0.5)
    model = open_model(checkpoint(family), device=device)
    pruned = prune_model(model, corpus, method, 0.5, batch=4, iterations=ITERATIONS, out=tmp_path / "pruned")
    assert pruned.folder == tmp_path / "pruned"
    total = flipped = 0
    for (name, ours), theirs in zip(model.hf.named_parameters(), oracle.parameters(), strict=True):
        assert ours.device == device
        here = ours.detach().cpu()
        if method != "oats":  # whose sum has no zeros
            total, flipped = total + here.numel(), flipped + int(((here == 0) != (theirs == 0)).sum())
        distance = float((here - theirs).norm() / theirs.norm())
        assert distance < (0.05 if method == "sparsegpt" else 0.02), name
    assert flipped <= FLIPPED * total
    reopened = open_model(tmp_path / "pruned", device=device)
    with torch.no_grad():
        logits = reopened.hf(input_ids=corpus.contexts.to(device)).logits.cpu()
        expected = oracle(input_ids=corpus.contexts).logits
    assert float((logits - expected).norm() / expected.norm()) < 0.05
