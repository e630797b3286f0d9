"""Contexts of unlike lengths: each counts its own tokens only.

Oracle: every context read by itself through `transformers`' eager attention in float64 (`tests.dense`), and the
columns by their definitions over all tokens, in NumPy.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests import checkpoints, dense
from tests.tokenizers import framed
from theodolite import Corpus, open_model, survey, trace_sinks
from theodolite.corpus.cutting import NO_TOKEN
from theodolite.errors import UsageError
from theodolite.evaluate.perplexity import perplexity
from theodolite.models import OpenModel
from theodolite.passes.run import Run
from theodolite.sinks.outliers import find_outliers

LENGTHS = [40, 17, 40, 9, 23, 40, 31, 12, 40, 23, 5, 36, 40, 28, 19, 40, 40, 33]
LONGEST = max(LENGTHS)
FAMILIES = ["llama3", "bert"]


def framed_tokenizer() -> PreTrainedTokenizerFast:
    """A letter a token, [CLS] (1) in front and [SEP] (2) behind."""
    tokens = ["[UNK]", "[CLS]", "[SEP]", *"abcdefghijk"]
    return framed(tokens, ["[CLS]"], ["[SEP]"], split=pre_tokenizers.Split("", "isolated"))


def drawn(vocabulary: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, min(vocabulary, 30), (length,), generator=generator) for length in LENGTHS]


def padded(rows: list[torch.Tensor], left: bool, **given: Any) -> Corpus:
    """The rows with the id 0 as padding, under a mask."""
    ids, mask = torch.zeros(len(rows), LONGEST + 3, dtype=torch.int64), torch.zeros(len(rows), LONGEST + 3)
    for row, own in enumerate(rows):
        place = slice(-len(own), None) if left else slice(len(own))
        ids[row, place], mask[row, place] = own, 1
    return Corpus.from_ids(ids, attention_mask=mask, **given)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(family, opened) -> OpenModel:
    return opened(family)


@pytest.fixture(scope="module")
def rows(model) -> list[torch.Tensor]:
    return drawn(model.vocabulary)


@pytest.fixture(scope="module")
def corpus(rows) -> Corpus:
    return padded(rows, left=False, labels=[f"label {row % 3}" for row in range(len(rows))])


@pytest.fixture(scope="module")
def run(model, corpus) -> Run:
    return survey(model, corpus, batch=4)


@pytest.fixture(scope="module")
def alone(family, checkpoint, corpus) -> list[dense.Dense]:
    """Every context by itself, in the order of the corpus."""
    reference = open_model(checkpoint(family))
    structure = reference.structure
    modules = list(structure.attention), list(structure.blocks)
    return [dense.run(reference.hf, own[own != NO_TOKEN][None], *modules) for own in corpus.contexts]


def test_padding_and_packing_give_the_same_contexts(rows, corpus):
    left = padded(rows, left=True)
    packed = Corpus.from_ids(
        torch.cat(rows), position_ids=torch.cat([torch.arange(len(row)) for row in rows])
    )
    for other in (left, packed):
        assert torch.equal(other.contexts, corpus.contexts)
        assert torch.equal(other.lengths, corpus.lengths)
    own = sorted(own[own != NO_TOKEN].tolist() for own in corpus.contexts)
    assert own == sorted(row.tolist() for row in rows)


def test_columns_of_heads_are_over_all_tokens(model, run, alone, corpus):
    columns: dict[str, list[float]] = {name: [] for name in ("entropy", "previous_token")}
    errors, first, later, same = [], [], [], []
    layers, _, heads = alone[0].attention.shape[:3]
    for layer in range(layers):
        for head in range(heads):
            per_context = [own.attention[layer, 0, head] for own in alone]
            entropies = [-(p * np.log(np.where(p > 1e-15, p, 1))).sum(1) for p in per_context]
            columns["entropy"].append(np.concatenate(entropies).mean())
            errors.append(dense.jackknife([own.sum() for own in entropies], [len(own) for own in entropies]))
            columns["previous_token"].append(np.concatenate([np.diagonal(p, -1) for p in per_context]).mean())
            shares = []
            for p in per_context:
                seen = p > 0
                received = p.sum(0) / seen.sum(0)
                shares.append((received > 0.3) & (seen.sum(0) - 1 >= min(16, len(p) / 4)))
            first.append(np.mean([share[0] for share in shares]))
            later.append(np.mean([share[1:].any() for share in shares]))
            pairs = []
            for p, ids in zip(per_context, corpus.contexts.numpy(), strict=True):
                for i in range(len(p)):
                    equal = [j for j in range(i) if ids[j] == ids[i]]
                    pairs += [p[i, equal].sum()] if equal else []
            same.append(np.mean(pairs))
    for name, expected in (columns | {"entropy_se": errors, "same_token": same}).items():
        np.testing.assert_allclose(run.heads[name], expected, rtol=2e-5, atol=1e-7, err_msg=name)
    np.testing.assert_allclose(run.heads["sink_first"], first)
    np.testing.assert_allclose(run.heads["sink_later"], later)


def test_columns_of_layers_are_over_all_tokens(run, alone):
    for layer in range(len(alone[0].hidden)):
        streams = [own.hidden[layer, 0] for own in alone]
        text = [stream[1:] for stream in streams]
        tokens = np.concatenate(text)
        mean = tokens.mean(0)
        reached = [sum(len(own) > t for own in streams) for t in range(LONGEST)]
        by_position = np.array(
            [np.mean([own[t] for own in streams if len(own) > t], axis=0) for t in range(LONGEST)]
        )
        pos = by_position - mean
        ctx = np.array([(own - by_position[1 : len(own) + 1]).mean(0) for own in text])
        row = run.layers.iloc[layer]
        expected = {
            "norm": np.linalg.norm(tokens, axis=1).mean(),
            "norm_first": np.mean([np.linalg.norm(own[0]) for own in streams]),
            "rank_collapse": np.mean(
                [np.linalg.norm(own - own.mean(0)) / np.linalg.norm(own) for own in text]
            ),
            "outlier_dimensions": ((np.abs(tokens) >= 6).mean(0) >= 0.06).sum(),
        }
        if layer:
            before = np.concatenate([own.hidden[layer - 1, 0, 1:] for own in alone])
            cosine = (
                (before * tokens).sum(1) / np.linalg.norm(before, axis=1) / np.linalg.norm(tokens, axis=1)
            )
            expected["cosine_previous"] = cosine.mean()
        # As many contexts reach the last position as the positional basis asks for, so that it has all.
        assert min(reached) >= 0.1 * len(streams)
        group = np.arange(len(text)) * 8 // len(text)
        longest = min(max(len(own) for own in np.array(text, object)[group == g]) for g in set(group))
        of_groups = [
            [
                np.mean([own[t] for own in np.array(text, object)[group == g] if len(own) > t], axis=0)
                for t in range(longest)
            ]
            for g in sorted(set(group))
        ]
        p = np.array(of_groups) - np.mean(of_groups, axis=1, keepdims=True)
        products = np.einsum("atd,btd->abt", p, p)
        crossed = (products.sum((0, 1)) - np.einsum("aat->t", products)) / (len(p) * (len(p) - 1))
        energy = crossed @ np.array(reached[1 : longest + 1])
        expected["position_energy"] = energy / ((tokens - mean) ** 2).sum()
        for name, value in expected.items():
            np.testing.assert_allclose(row[name], value, rtol=2e-5, err_msg=f"{name} of layer {layer}")
        np.testing.assert_allclose(run.arrays["positional_basis"][layer], pos, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(run.arrays["context_basis"][layer], ctx, rtol=1e-4, atol=1e-5)


def test_sinks_are_traced_context_by_context(model, corpus):
    traced = trace_sinks(model, corpus)
    by_one = [trace_sinks(model, own[own != NO_TOKEN]) for own in corpus.contexts]
    names = ["layer", "head", "kind", "token_id"]
    alone = {}
    for run in by_one:
        for row in run.traces.itertuples():
            key = tuple(getattr(row, name) for name in names)
            alone[key] = alone.get(key, 0) + row.contexts
    found = {tuple(row[name] for name in names): row["contexts"] for _, row in traced.traces.iterrows()}
    assert found == alone


def test_outliers_are_shares_of_all_tokens(model, alone, corpus):
    found = find_outliers(model, corpus)
    for layer in range(len(alone[0].hidden)):
        tokens = np.concatenate([own.hidden[layer, 0, 1:] for own in alone])
        own = found.dimensions[found.dimensions["layer"] == layer].sort_values("dimension")
        np.testing.assert_allclose(own["rms"], np.sqrt((tokens**2).mean(0)), rtol=1e-4)


def test_loss_is_a_mean_over_tokens(opened):
    model = opened("gpt2")
    corpus = padded(drawn(model.vocabulary), left=False)
    losses = []
    for own in corpus.contexts:
        ids = own[own != NO_TOKEN]
        with torch.no_grad():
            logits = model.hf(input_ids=ids[None]).logits[0].double()
        losses.append(torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none").numpy())
    found = perplexity(model, corpus)
    everything = np.concatenate(losses)
    assert found.loss == pytest.approx(everything.mean(), rel=1e-6)
    residuals = np.array([(own - everything.mean()).sum() for own in losses])
    count = len(residuals)
    expected = math.sqrt((residuals**2).sum() * count / (count - 1)) / len(everything)
    assert found.loss_se == pytest.approx(expected, rel=1e-6)


def test_special_tokens_at_the_end_are_apart_however_long_the_text(tmp_path):
    """Oracle: hidden states of each context alone, without [CLS] and [SEP]."""
    bert = checkpoints.build("bert")
    bert.save_pretrained(tmp_path)
    framed_tokenizer().save_pretrained(tmp_path)
    model = open_model(tmp_path)
    generator = np.random.default_rng(5)
    texts = ["".join(generator.choice(list("abcdefghijk"), size)) for size in (30, 12, 22, 30, 9, 30)]
    own = [torch.tensor(ids) for ids in model.required_tokenizer()(texts)["input_ids"]]
    ids = torch.nn.utils.rnn.pad_sequence(own, batch_first=True, padding_value=NO_TOKEN)
    corpus = Corpus.from_ids(ids, attention_mask=ids != NO_TOKEN)
    run = survey(model, corpus, batch=3)
    with torch.no_grad():
        states = [
            model.hf(input_ids=own[own != NO_TOKEN][None], output_hidden_states=True).hidden_states
            for own in corpus.contexts
        ]
    for layer in range(model.layers + 1):
        alone = [of[layer][0].double().numpy() for of in states]
        tokens = np.concatenate([own[1:-1] for own in alone])
        row = run.layers.iloc[layer]
        np.testing.assert_allclose(row["norm"], np.linalg.norm(tokens, axis=1).mean(), rtol=1e-5)
        last = np.mean([np.linalg.norm(own[-1]) for own in alone])
        np.testing.assert_allclose(row["norm_last"], last, rtol=1e-5)
        basis = run.arrays["positional_basis"][layer].numpy()
        for t in (0, 1, 8, 12, 24, 30):
            reached = [own[t] for own in alone if len(own) - 1 > t]
            np.testing.assert_allclose(basis[t], np.mean(reached, 0) - tokens.mean(0), atol=2e-5)
        np.testing.assert_allclose(
            run.arrays["positional_basis_last"][layer, 0],
            np.mean([own[-1] for own in alone], 0) - tokens.mean(0),
            atol=2e-5,
        )


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"attention_mask": torch.ones(2, 7)}, "attention_mask has shape"),
        ({"position_ids": torch.zeros(8)}, "position_ids has shape"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1, 0, 1, 1, 1]] * 2)}, "row 0 has a hole"),
        ({"position_ids": torch.tensor([[2, 3, 4, 5, 6, 7, 8, 9]] * 2)}, "do not count 0, 1, 2"),
        ({"position_ids": torch.tensor([[0, 1, 2, 3, 5, 6, 7, 8]] * 2)}, "do not count 0, 1, 2"),
        ({"attention_mask": torch.zeros(2, 8)}, "no context has 4 tokens or more"),
    ],
)
def test_masks_and_positions_that_say_something_else_are_refused(given, why):
    with pytest.raises(UsageError, match=why):
        Corpus.from_ids(torch.arange(16).reshape(2, 8), **given)


def test_ids_are_copied_and_may_be_a_list_or_an_array():
    ids = torch.arange(16).reshape(2, 8)
    corpus = Corpus.from_ids(ids, labels=np.array([3, 4]))
    ids[:] = 0
    assert corpus.contexts.tolist() == np.arange(16).reshape(2, 8).tolist()
    assert corpus.label_names == ["3", "4"]
    for given in (np.arange(16).reshape(2, 8), np.arange(16).reshape(2, 8).tolist()):
        assert Corpus.from_ids(given).sha256 == Corpus.from_ids(torch.arange(16).reshape(2, 8)).sha256


def test_a_position_that_few_contexts_reach_is_no_part_of_the_basis(opened):
    """Of 22 contexts two are of 20 tokens and the others of 8: the basis has 8 positions, other columns all tokens."""
    ids = torch.arange(22 * 20).reshape(22, 20) % 90
    mask = torch.arange(20) < torch.tensor([20, 20] + [8] * 20)[:, None]
    run = survey(opened("gpt2"), Corpus.from_ids(ids, attention_mask=mask))
    assert run.arrays["positional_basis"].shape[1] == 8
    assert run.arrays["entropy_by_position"].shape[-1] == 20
    assert run.provenance["counts"]["tokens"] == 2 * 20 + 20 * 8
    assert "22 × 8 to 20 tokens" in repr(run)
    assert run.layers["rank_se"].notna().all()
