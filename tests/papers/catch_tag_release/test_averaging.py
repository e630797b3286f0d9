"""The construction of Theorem 4.1 against its equations written out in numpy, its rate, and what is printed wrongly."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.report.drawn import drawn, finite
from theodolite.system.wording import for_plotly
from theodolite_papers.catalogue import reproduce
from theodolite_papers.catch_tag_release import averaging
from theodolite_papers.catch_tag_release.averaging import (
    ABSENT,
    averaging_error,
    averaging_model,
    mean_after,
)

LENGTH = 20


def by_hand(numbers, t, s_tag, b, d):
    """f(x), A¹ and H of one sequence, token by token; t from 1 as in the paper, 0 for no [SEP]."""
    tokens = [(0.0, -s_tag) if i == t else (x, -1.0) for i, x in enumerate(numbers, 1)]
    length = len(tokens)
    attention, hidden = np.zeros((length, length)), np.zeros((length, 2))
    for i, query in enumerate(tokens):
        logits = [query[0] * key[0] + query[1] * key[1] for key in tokens[: i + 1]]
        weights = [math.exp(logit - max(logits)) for logit in logits]
        attention[i, : i + 1] = np.array(weights) / sum(weights)
        tag = sum(a * -key[1] for a, key in zip(attention[i], tokens, strict=True))  # W_V¹ = diag(0, −1)
        hidden[i] = query[0], query[1] + tag
    number, tag = hidden[-1]
    logits = [(b * number + d * tag) * key[1] for key in hidden]
    weights = [math.exp(logit - max(logits)) for logit in logits]
    return float(np.dot(weights, hidden[:, 0]) / sum(weights)), attention, hidden


def sequences(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(count, LENGTH, generator=generator, dtype=torch.float64)
    return numbers, torch.randint(0, LENGTH - 1, (count,), generator=generator)


@pytest.mark.parametrize(("s_tag", "b", "d"), [(2.0, 0.0, 1.0), (8.0, 2.0, 0.3), (15.0, -3.0, 2.0)])
def test_it_is_the_printed_model(s_tag: float, b: float, d: float) -> None:
    numbers, places = sequences(7)
    places[0], places[1], places[2] = ABSENT, 0, LENGTH - 1
    found = averaging_model(numbers, places, s_tag, b, d)
    for row, place in enumerate(places.tolist()):
        output, attention, hidden = by_hand(numbers[row].tolist(), place + 1, s_tag, b, d)
        assert found.output[row].item() == pytest.approx(output, rel=1e-9, abs=1e-12)
        np.testing.assert_allclose(found.attention[row], attention, atol=1e-14)
        np.testing.assert_allclose(found.hidden[row], hidden, atol=1e-12)


@pytest.mark.parametrize(("b", "d"), [(3.0, 1.0), (0.0, 0.1), (-2.0, 4.0)])
def test_the_rate(b: float, d: float) -> None:
    """Oracle: the model itself at numbers up to 1, where the leading term is all but e^{−s} of the error."""
    generator = torch.Generator().manual_seed(1)
    numbers = torch.rand(50, LENGTH, generator=generator, dtype=torch.float64) * 2 - 1
    places = torch.randint(0, LENGTH - 2, (50,), generator=generator)
    for s_tag, tolerance in ((16.0, 2e-2), (22.0, 2e-4)):
        error = averaging_model(numbers, places, s_tag, b, d).output - mean_after(numbers, places)
        derived = averaging_error(numbers, places, s_tag, b, d)
        clear = derived.abs() > 0.1 * derived.abs().median()
        torch.testing.assert_close(
            error[clear] / derived[clear],
            torch.ones(int(clear.sum()), dtype=torch.float64),
            rtol=tolerance,
            atol=0,
        )


def test_theorem_4_1_and_figure_6() -> None:
    """What the paper says of the construction, of sequences drawn as in its figure."""
    numbers, places = sequences(400)
    at_10, at_30 = (averaging_model(numbers, places, s_tag) for s_tag in (10.0, 30.0))
    place = torch.arange(LENGTH)
    before, after = place < places[:, None], place > places[:, None]
    error = (at_30.output - mean_after(numbers, places)).abs()
    assert error.median() < 1e-6  # f(x) tends to the mean of the numbers after [SEP]
    others = place != places[:, None, None]
    assert (at_10.attention - at_30.attention)[before].abs().max() < 1e-12  # tokens before the sink: unmoved
    to_separator = torch.where(others, 0.0, at_10.attention).sum(-1)
    assert to_separator[after].mean() > 0.3  # [SEP] is an attention sink
    sizes = at_10.hidden[after].square().mean(0).sqrt()
    assert sizes[1] > 6 * sizes[0]  # the second coordinate is an outlier dimension


def test_without_anything_after_the_separator() -> None:
    """[SEP] last: the sum over T, as in the limit nothing is tagged. No [SEP]: the mean of all."""
    numbers, _ = sequences(30)
    last = averaging_model(numbers, LENGTH - 1, 12.0).output
    torch.testing.assert_close(last, numbers[:, :-1].sum(-1) / LENGTH)
    torch.testing.assert_close(averaging_model(numbers, ABSENT, 3.0).output, numbers.mean(-1))
    assert mean_after(numbers, LENGTH - 1).isnan().all()


def test_errata() -> None:
    """The numbers of docs/errata.md: printed limits and denominators beside the model by hand."""
    numbers, t, s = [1.0, 0.0, 0.0], 2, 20.0
    output, *_ = by_hand(numbers, t, s, 0.0, 1.0)
    assert output == pytest.approx(0.0, abs=1e-6)  # section 4.3 prints the sum from i = 1: 1
    _, attention, _ = by_hand([1.0, 0.0, 1.0, 1.0], t, s, 0.0, 1.0)
    assert (attention[2, 1] - attention[3, 3]) * s == pytest.approx(20.0, abs=1e-5)  # printed limit: 0
    assert abs(attention[2, 1] - attention[3, 1]) * s < 1e-6
    x, i, j, separator = [1.0, 0.0, 2.0, 1.0], 3, 2, 1  # places from 0
    _, attention, _ = by_hand(x, t, 2.0, 0.0, 1.0)
    right, printed = (
        math.exp(1 + x[i] * x[j])
        / (math.exp(2.0) + sum(math.exp(1 + x[i] * x[k]) for k in range(4) if k != left_out))
        for left_out in (separator, j)
    )
    assert attention[i, j] == pytest.approx(right)
    assert (round(right, 3), round(printed, 3)) == (0.475, 0.807)


def test_figure_6(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the derived rates, and the tables for what is drawn."""
    monkeypatch.setattr(averaging, "SEQUENCES", 100)
    outcome = reproduce("sinks/figure6")
    assert not outcome.verdicts  # it says nothing of any model
    errors = outcome.tables["errors"].query("s_tag == 30")
    np.testing.assert_allclose(errors["median"], errors["derived_median"], rtol=1e-2)
    rest = outcome.tables["attention"].set_index("s_tag")["rest"]
    assert np.log(rest[20.0] / rest[30.0]) == pytest.approx(10, rel=1e-3)  # 𝒪(e^{−s_tag}), eq. 4
    figures = {exhibit.key: exhibit.figure for exhibit in outcome.exhibits}
    for picture in figures["attention"].data:
        np.testing.assert_allclose(np.nansum(picture.z, axis=1), 1, rtol=1e-5)
    last = np.asarray(figures["attention"].data[-1].z)
    assert (last[averaging.LENGTH // 2 :, averaging.LENGTH // 2] > 0.9).all()
    variants = outcome.tables["errors"].query(f"median > {averaging.BELOW}")
    for name, rows in variants.groupby("b_d"):
        shown = drawn(figures["convergence"], name=for_plotly(name))
        np.testing.assert_allclose(shown, finite(rows["median"]), rtol=1e-5)
    shown = drawn(figures["rest"], name="tokens after [SEP]")
    np.testing.assert_allclose(shown, finite(rest[rest > 0]), rtol=1e-5)
