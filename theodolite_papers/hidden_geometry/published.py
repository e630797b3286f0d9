"""The published numbers that a run is held against, each with the table that it was read from.

All are from Song & Zhong 2024, "Uncovering hidden geometry in Transformers via disentangling position and
context": `published.toml` has its tables as printed, Table 1 that of the instrument.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any

from theodolite.report.data import AVERAGES as AVERAGES
from theodolite.report.data import TABLE_1 as TABLE_1
from theodolite.report.data import closest as closest

MODELS = ("GPT-2", "BERT", "BLOOM", "Llama 2")
TEXTS = ("GitHub", "OpenWebText", "WikiText")  # of the three rows that Tables 4 to 6 give each model
Rows = dict[str, list[list[float]]]


@dataclass(frozen=True)
class OtherText:
    """A row of Table 2: texts unlike the training text, and the rank that Table 1 has for the training text."""

    model: str
    text: str
    rank: list[float]
    low_frequency: float
    trained_rank: float


_PRINTED: dict[str, Any] = tomllib.loads(
    (resources.files("theodolite_papers.hidden_geometry") / "published.toml").read_text(encoding="utf-8")
)
RANK: Rows = _PRINTED["rank"]
STABLE_RANK: Rows = _PRINTED["stable_rank"]
RELATIVE_NORM: Rows = _PRINTED["relative_norm"]
# Section 5: "random baseline is about 0.1" (of the maximum).
TABLE_2 = tuple(OtherText(**row) for row in _PRINTED["other_text"])
# Table 3: K → share of energy, of the Gram matrix, of PWPᵀ and of the QK matrix.
LOW_FREQUENCY, LOW_FREQUENCY_PWP, LOW_FREQUENCY_QK = (
    {int(cutoff): share for cutoff, share in _PRINTED["low_frequency"][of].items()}
    for of in ("PP", "PWP", "QK")
)
# Appendix B.2, on a random sequence: norm of layer 1 and of the last layer over that of layer 0, GPT-2.
NORM_RATIO_FIRST, NORM_RATIO_LAST = 10.92, 109.8
# Section 4.3 and D.3: a model trained on addition, whose positional basis is not smooth.
LOW_FREQUENCY_ADDITION = 0.5
