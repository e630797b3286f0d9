"""Interventions in one layer's attention and taps of the model together; keys that are masked."""

from __future__ import annotations

import pytest
import torch

from tests import checkpoints
from tests.attention.kinds import dense
from theodolite.attention.inputs import AttentionInputs, attend, mask_keys
from theodolite.models.calls import capture_calls
from theodolite.models.doors.answers import without_interventions
from theodolite.models.doors.taps import intervened, tapped
from theodolite.models.source import Source
from theodolite.models.structure_search import find_structure
from theodolite.models.weights.head_weights import read_head_weights, read_output_weights

LAYER = 1


def _ids() -> torch.Tensor:
    return torch.randint(checkpoints.VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1))


def _attention(model: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        return find_structure(Source.of_transformers(model)).attention[LAYER]


def _times(factor: float):
    return lambda inputs, answer: factor * answer(inputs)


@torch.no_grad()
def test_the_intervention_opened_first_is_nearest_to_the_attention():
    """Oracle: 3 (o + 1) and 3 o + 1 differ."""
    model = checkpoints.build("gpt2")
    attention, answers = _attention(model), []

    def final(inputs, answer):
        answers.append((attend(inputs), answer(inputs)))
        return answers[-1][1]

    plus_one = lambda inputs, answer: answer(inputs) + 1.0  # noqa: E731
    with (
        intervened(model, attention, plus_one),
        intervened(model, attention, _times(3.0)),
        intervened(model, attention, final),
    ):
        model(_ids())
    ((own, got),) = answers
    torch.testing.assert_close(got, 3 * (own + 1))


@torch.no_grad()
def test_another_model_inside_is_neither_changed_nor_tapped_by_mistake():
    """Each model's calls go to its own tap, whatever was opened last."""
    one, two = checkpoints.build("gpt2"), checkpoints.build("llama2")
    own, seen = two(_ids()).logits, []

    def tap(module, inputs):
        seen.append(type(module).__name__)
        return attend(inputs)

    attention = _attention(two)
    with tapped(one, tap), intervened(two, attention, _times(1.0)):
        got = two(_ids()).logits
        one(_ids())
    torch.testing.assert_close(got, own, rtol=1e-5, atol=1e-4)
    assert seen == ["GPT2Attention"] * 3


@torch.no_grad()
def test_looks_at_the_weights_inside_are_those_of_the_model_itself():
    """Oracle: the same look outside."""
    for family in ("gpt2", "bert", "bloom"):
        model = checkpoints.build(family)
        run = Source.of_transformers(model).small_pass(1)
        structure = find_structure(Source.of_transformers(model))

        def look(model=model, structure=structure, run=run):
            call = capture_calls(model, structure, run)[LAYER]
            read = read_output_weights(model, structure, LAYER, call, run)
            return read, read_head_weights(model, structure, LAYER, call).w_v

        def never(inputs, answer):
            raise AssertionError

        expected = look()
        with intervened(model, structure.attention[LAYER], never):
            inside = look()
            with without_interventions():
                model(_ids())
        assert all(torch.equal(got, own) for got, own in zip(inside, expected, strict=True))


def _inputs(**options) -> AttentionInputs:
    """Logits of up to a few hundred, so that what hides a key must be low."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (4 * torch.randn(2, heads, 20, 8, generator=generator) for heads in (4, 2, 2))
    defaults = {"scaling": 8**-0.5, "causal": True}
    return AttentionInputs(query=query, key=key, value=value, **(defaults | options))


WINDOW = torch.ones(20, 20, dtype=torch.bool).tril().triu(-3)[None, None]
CASES = {
    "causal": {},
    "window": {"causal": False, "mask": WINDOW},
    "padding": {"causal": False, "mask": WINDOW & torch.ones(2, 1, 20, 20, dtype=torch.bool)},
    "window a head": {"causal": False, "mask": WINDOW.repeat(1, 4, 1, 1)},
    "both ways": {"causal": False},
    "soft-capped": {"softcap": 5.0},
    "ALiBi": {"bias": torch.arange(20.0) * torch.tensor([0.5, 0.25, 2.0, 1.0])[None, :, None, None]},
    "relative": {"bias": torch.randn(1, 4, 20, 20, generator=torch.Generator().manual_seed(3))},
    "sink column": {"sink": torch.tensor([1.0, 80.0, -3.0, 0.0])},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("heads", [[2], [0, 1, 2, 3]])
def test_hidden_keys_get_no_weight_and_queries_without_a_key_keep_what_they_had(case, heads):
    """Oracle: dense attention in float64 with −∞ for hidden keys, and without for queries that would see none.

    With a learned sink column these pay it all.
    """
    inputs = _inputs(**CASES[case])
    hidden = torch.zeros(2, 20, dtype=torch.bool)
    hidden[0, [0, 1, 2, 3, 4, 9]] = True
    hidden[1, [0, 7]] = True
    got = attend(mask_keys(inputs, hidden, heads, False))
    extra = torch.zeros(2, 4, 20, 20, dtype=torch.float64)
    extra[:, heads] = extra[:, heads].masked_fill(hidden[:, None, None], -torch.inf)
    visible = torch.ones(20, 20, dtype=torch.bool)
    if inputs.mask is not None:
        visible = inputs.mask[0, 0]
    elif inputs.causal:
        visible = visible.tril()
    blind = ~(visible & ~hidden[:, None]).any(-1)
    expected = dense(inputs, extra)[1]
    if inputs.sink is None:
        expected = torch.where(blind[:, :, None, None], dense(inputs)[1], expected)
    assert bool(blind.any()) == (case != "both ways")
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=2e-4)


def test_a_tap_sees_weights_of_exactly_zero():
    inputs = _inputs()
    hidden = torch.zeros(1, 20, dtype=torch.bool)
    hidden[0, 5] = True
    for block in mask_keys(inputs, hidden, [1], False).blocks():
        weights = block.logits.softmax(-1)
        assert not weights[:, 1, 6 - block.start :, 5].any()
        assert weights[:, 0, 6 - block.start :, 5].any()
