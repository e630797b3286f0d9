"""The published numbers that a run is compared with, each with the table that it was read from.

All are from Song & Zhong 2024, "Uncovering hidden geometry in Transformers via disentangling position and
context": `published.toml` has its tables as printed. Of a run only its model's family and positions are read.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any

from theodolite.passes.run import Run
from theodolite.report.data import provenance

MODELS = ("GPT-2", "BERT", "BLOOM", "Llama 2")
TEXTS = ("GitHub", "OpenWebText", "WikiText")
"""The texts of the three rows that Tables 4 to 6 give each model."""

Rows = dict[str, list[list[float]]]


@dataclass(frozen=True)
class Average:
    """A row of Table 1: mean over layers and, in brackets there, standard deviation; NaN where it prints a dash."""

    model: str
    text: str
    rank: list[float]
    relative_norm: list[float]
    between: list[float]
    within: list[float]
    incoherence: list[float]


@dataclass(frozen=True)
class OtherText:
    """A row of Table 2: texts unlike the training text, and the rank that Table 1 has for the training text."""

    model: str
    text: str
    rank: list[float]
    low_frequency: float
    trained_rank: float


_PRINTED: dict[str, Any] = tomllib.loads(
    (resources.files("theodolite.report") / "published.toml").read_text(encoding="utf-8")
)
RANK: Rows = _PRINTED["rank"]
STABLE_RANK: Rows = _PRINTED["stable_rank"]
RELATIVE_NORM: Rows = _PRINTED["relative_norm"]
TABLE_1 = tuple(Average(**row) for row in _PRINTED["average"])
# The same on OpenWebText, the one text that all four models were measured on.
AVERAGES: dict[str, Average] = {row.model: row for row in TABLE_1 if row.text == "OpenWebText"}
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

_FAMILIES = {
    "BERT": ("bert", "electra"),
    "BLOOM": ("bloom", "falcon", "mpt"),
    "Llama 2": ("llama", "mistral", "mixtral", "phi", "qwen", "gemma", "neox", "gpt_oss", "olmo", "cohere"),
}


def closest(run: Run) -> str:
    """Find the published model to show first: the same family, else the same kind of position, else GPT-2."""
    family, positions = ((provenance(run, "model", of) or "").lower() for of in ("family", "positions"))
    for model, parts in _FAMILIES.items():
        if any(part in family for part in parts):
            return model
    return {"rotary": "Llama 2", "alibi": "BLOOM"}.get(positions, "GPT-2")
