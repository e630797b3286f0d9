"""Colours. Oracles: the WCAG 2 contrast ratio; CIE 1976 distances as three kinds of colour-blind readers see them.

The matrices are those of Machado, Oliveira & Fernandes 2009 for full severity, on linear RGB.
"""

from __future__ import annotations

import re
from itertools import combinations, pairwise

import numpy as np
import pytest

from theodolite.report import style

BLINDNESS = {
    "none": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
WHITE = TO_XYZ.sum(axis=1)
APART = 20.0  # about nine times the least difference that is seen side by side
SWAPS = style.dark_swaps()


def dark(colour: str) -> str:
    return SWAPS.get(colour, colour)


def linear(colour: str) -> np.ndarray:
    rgb = np.array([int(colour[start : start + 2], 16) for start in (1, 3, 5)]) / 255
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab(colour: str, blindness: str = "none") -> np.ndarray:
    ratio = TO_XYZ @ np.clip(np.array(BLINDNESS[blindness]) @ linear(colour), 0, 1) / WHITE
    f = np.where(ratio > 216 / 24389, np.cbrt(ratio), (24389 / 27 * ratio + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(first: str, second: str) -> float:
    low, high = sorted(float(np.array([0.2126, 0.7152, 0.0722]) @ linear(one)) for one in (first, second))
    return (high + 0.05) / (low + 0.05)


def test_the_oracles_know_black_and_white() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert lab("#ffffff") == pytest.approx([100, 0, 0], abs=0.01)
    assert np.linalg.norm(lab("#ff0000", "deuteranopia") - lab("#968b00", "deuteranopia")) < 25


@pytest.mark.parametrize("blindness", BLINDNESS)
@pytest.mark.parametrize("swap", [str, dark], ids=["light", "dark"])
def test_kinds_are_told_apart_amounts_move_one_way_and_signs_part_at_zero(blindness: str, swap) -> None:
    page = style.DARK_NEUTRAL if swap is dark else style.NEUTRAL
    colours = [swap(colour) for colour in (style.INK, *style.CATEGORIES)]
    for first, second in combinations(colours, 2):
        assert np.linalg.norm(lab(first, blindness) - lab(second, blindness)) >= APART, (first, second)
    steps = np.diff([lab(swap(colour), blindness)[0] for _, colour in style.MAGNITUDE])
    assert (steps < -5).all() or (steps > 5).all()
    assert swap(style.MAGNITUDE[0][1]) == page
    signs = [swap(colour) for _, colour in style.SIGNED]
    assert signs[2] == page
    for low, high in zip(signs[:2], signs[:2:-1], strict=True):
        assert np.linalg.norm(lab(low, blindness) - lab(high, blindness)) >= APART
    places = [lab(colour, blindness) for _, colour in style.ORDER]  # which never turns back
    assert np.linalg.norm(places[-1] - places[0]) >= APART
    for first, second in pairwise(places):
        assert np.linalg.norm(second - places[-1]) < np.linalg.norm(first - places[-1]) + 3


@pytest.mark.parametrize(
    ("paper", "swap"), [(style.NEUTRAL, str), (style.DARK_NEUTRAL, dark)], ids=["light", "dark"]
)
def test_kinds_are_seen_on_the_page(paper: str, swap) -> None:
    for colour in (style.INK, *style.CATEGORIES):
        assert contrast(swap(colour), paper) >= 3
    assert contrast(str(style.template(swap is dark).layout.font.color), paper) >= 4.5


def test_a_colour_has_one_dark_counterpart_that_is_no_light_one() -> None:
    assert len(set(SWAPS.values())) == len(SWAPS)
    assert not set(SWAPS) & set(SWAPS.values())


def test_the_page_s_own_colours_are_those_of_its_figures_light_and_dark() -> None:
    """Oracle: the variables, read back as CSS, against the scale and its dark counterpart."""
    light, dark_css = (
        dict(re.findall(r"--(\w+): (.*?);", part)) for part in style.css().split("@media screen")
    )
    colours = [colour for _, colour in style.MAGNITUDE]
    assert re.findall(r"#\w{6}", light["ramp"]) == colours
    assert re.findall(r"#\w{6}", dark_css["ramp"]) == [dark(colour) for colour in colours]
    assert (light["paper"], dark_css["paper"]) == (style.NEUTRAL, style.DARK_NEUTRAL)
    assert light.keys() == dark_css.keys()
