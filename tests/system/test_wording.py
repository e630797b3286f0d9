"""Oracles: the Unicode database's own categories, and numbers written by hand."""

from __future__ import annotations

import math
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from theodolite.system.wording import (
    counted,
    for_plotly,
    listed,
    number,
    percent,
    percent_with_error,
    shown_token,
    visible,
    with_error,
)


@given(st.text(alphabet=st.characters()))
def test_what_is_visible_holds_no_control_format_or_surrogate_character(text: str) -> None:
    shown = visible(text)
    assert not any(unicodedata.category(character).startswith("C") for character in shown)
    assert "\u2028" not in shown
    assert "\u2029" not in shown


@given(st.text(alphabet=st.characters(exclude_categories=["C", "Zl", "Zp"], exclude_characters="\u00a0")))
def test_ordinary_text_is_left_as_it_is(text: str) -> None:
    assert visible(text) == text


@given(st.text())
def test_nothing_that_plotly_reads_as_markup_is_left(text: str) -> None:
    shown = for_plotly(text)
    assert "<" not in shown
    assert ">" not in shown


def test_plotly_entities_are_escaped_once() -> None:
    assert for_plotly("<b>&amp;") == "&lt;b&gt;&amp;amp;"


def test_lone_surrogates_and_direction_overrides_are_named() -> None:
    assert visible("a\ud800b\u202ec") == "a⟨U+D800⟩b⟨U+202E⟩c"


@pytest.mark.parametrize(
    ("token", "shown"),
    [(" the", "␣the"), ("\n\n", "↵↵"), ("  ", "␣␣"), ("", "(empty)"), ("a b", "a b"), ("\t", "⇥")],
)
def test_a_token_on_its_own_shows_its_spaces(token: str, shown: str) -> None:
    assert shown_token(token) == shown


def test_long_tokens_are_cut() -> None:
    assert shown_token("x" * 100) == "x" * 39 + "…"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.123456, "0.123"),
        (12.3456, "12.3"),
        (1234.5, "1234"),
        (3, "3"),
        (12345, "12\u202f345"),
        (-0.5, "−0.500"),
        (1.5e-7, "1.50·10⁻⁷"),
        (math.nan, "–"),
        (math.inf, "∞"),
        (None, "–"),
        ("word", "–"),
        (0.0, "0"),
    ],
)
def test_numbers_are_short(value: object, shown: str) -> None:
    assert number(value) == shown


@pytest.mark.parametrize(
    ("share", "shown"),
    [(0.62, "62"), (0.05, "5"), (0.0512, "5.1"), (0.9961, "99.6"), (1.0, "100"), (0.0, "0"), (-0.0002, "0")],
)
def test_shares_are_percentages(share: float, shown: str) -> None:
    assert percent(share) == shown + "\u00a0%"


def test_lists_are_read_aloud() -> None:
    assert listed(["a"]) == "a"
    assert listed(["a", "b", "c"]) == "a, b and c"
    assert listed(list("abcdefg"), 5) == "a, b, c, d, e and 2 more"
    assert counted(1, "head") == "1 head"
    assert counted(2, "head") == "2 heads"


@pytest.mark.parametrize(
    ("value", "error", "shown"),
    [
        (0.45237, 0.0058, "0.452 ± 0.006"),
        (14.1261, 0.0533, "14.13 ± 0.05"),
        (0.2234, 0.0989, "0.22 ± 0.10"),
        (-0.0498, 0.0637, "−0.05 ± 0.06"),
        (4.14, 0.604, "4.1 ± 0.6"),
        (4.0, 0.5345, "4 ± 0.5"),
        (1234.5, 27.0, "1230 ± 30"),
        (0.9951, 0.00098, "0.9951 ± 0.0010"),
        (0.5, 0.0, "0.500"),
        (0.5, math.nan, "0.500"),
        (math.nan, 0.1, "–"),
        (3.2e-9, 4e-10, "3.20·10⁻⁹ ± 4·10⁻¹⁰"),
    ],
)
def test_a_value_is_rounded_to_its_error(value: float, error: float, shown: str) -> None:
    assert with_error(value, error) == shown


def test_a_share_and_its_error_have_one_per_cent_sign() -> None:
    assert percent_with_error(0.4524, 0.0058) == "45.2 ± 0.6\u00a0%"
    assert percent_with_error(0.4524) == "45\u00a0%"
