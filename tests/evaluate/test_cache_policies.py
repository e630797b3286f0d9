"""Oracle: the model without a cache, under masks written out for each policy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError
from theodolite.evaluate.cache_policies import cache_policies
from theodolite.sinks.exclusions import Exclusions, Rule

SINK = 7
RULES = Exclusions((Rule("sink", 1, head=0, first=False, token_id=SINK),))


def corpus_with_sinks(length=24, contexts=5):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, 300, (contexts, length), generator=generator)
    ids[:, ::5] = SINK
    return Corpus.from_ids(ids)


def seen(policy, size, ids):
    """Which tokens the token at each position sees, by the definition of each policy."""
    for token in range(len(ids)):
        old = {
            "full": range(token),
            "window": [],
            "window + first token": [0],
            "window + first four": range(4),
            "window + traced sinks": [other for other in range(1, token + 1) if ids[other] == SINK],
        }[policy]
        places = max(size // 8, 1) if policy == "window + traced sinks" else 4
        old = [other for other in old if other <= token][-places:] if policy != "full" else list(old)
        if policy == "full":
            yield [*old, token]
            continue
        recent = [other for other in range(token, -1, -1) if other not in old][: size - len(old)]
        yield sorted({*old, *recent})


def test_each_row_is_the_dense_model_under_its_mask(opened):
    model, corpus = opened("llama3"), corpus_with_sinks()
    table = cache_policies(model, corpus, RULES, sizes=(6, 17), batch=2)
    assert table["policy"].tolist() == [
        "full",
        *2 * ["window", "window + first token", "window + first four", "window + traced sinks"],
    ]
    assert table["size"].tolist() == [24, 6, 6, 6, 6, 17, 17, 17, 17]
    losses, hits = {}, {}
    for row in table.itertuples():
        mask = torch.zeros(5, 1, 24, 24, dtype=torch.bool)
        for context, ids in enumerate(corpus.contexts.tolist()):
            for token, others in enumerate(seen(row.policy, row.size, ids)):
                mask[context, 0, token, others] = True
        with torch.no_grad():
            logits = model.hf(input_ids=corpus.contexts, attention_mask=mask, use_cache=False).logits.double()
        right = logits[:, :-1].log_softmax(dim=-1).gather(2, corpus.contexts[:, 1:, None]).squeeze(2)
        losses[row.policy, row.size] = own = -right.mean(dim=1).numpy()
        hits[row.policy, row.size] = hit = (
            (logits[:, :-1].argmax(-1) == corpus.contexts[:, 1:]).double().mean(1).numpy()
        )
        assert row.loss == pytest.approx(own.mean(), rel=1e-5)
        assert row.loss_se == pytest.approx(own.std(ddof=1) / math.sqrt(5), rel=1e-4)
        assert row.perplexity == pytest.approx(math.exp(own.mean()), rel=1e-5)
        assert row.accuracy == pytest.approx(hit.mean(), abs=1e-9)
        if row.policy == "window + traced sinks":
            paired = own - losses["window + first token", row.size]
            assert row.beyond_first == pytest.approx(paired.mean(), abs=1e-5)
            assert row.beyond_first_se == pytest.approx(paired.std(ddof=1) / math.sqrt(5), abs=1e-5)
        else:
            assert np.isnan(row.beyond_first)
    for row in table.itertuples():
        if row.policy in ("full", "window + first four"):
            assert np.isnan(row.difference)
            continue
        for of, name in ((losses, "difference"), (hits, "accuracy_difference")):
            paired = of[row.policy, row.size] - of["window + first four", row.size]
            assert getattr(row, name) == pytest.approx(paired.mean(), abs=1e-5)
            assert getattr(row, f"{name}_se") == pytest.approx(paired.std(ddof=1) / math.sqrt(5), abs=1e-5)


def test_with_room_for_all_there_is_no_difference(opened):
    table = cache_policies(opened("gpt2"), corpus_with_sinks(), RULES, sizes=(24,))
    assert table["loss"].max() - table["loss"].min() < 1e-6


def test_wrong_sizes_and_models_are_one_line(opened):
    with pytest.raises(UsageError, match="5 or more"):
        cache_policies(opened("gpt2"), corpus_with_sinks(), RULES, sizes=(4, 8))
    with pytest.raises(UsageError, match="5 or more"):
        cache_policies(opened("gpt2"), corpus_with_sinks(), RULES, sizes=())
    with pytest.raises(UsageError, match="bias by distance"):
        cache_policies(opened("bloom"), corpus_with_sinks(), RULES)
