"""The published numbers that a run is compared with, each with the table that it was read from.

All are from Song & Zhong 2024, "Uncovering hidden geometry in Transformers via disentangling position and
context". Values are as printed; ranges and means that are computed from them say so. Of a run only
its model's family and positions are read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from theodolite.passes.run import Run
from theodolite.report.data import provenance

MODELS = ("GPT-2", "BERT", "BLOOM", "Llama 2")

Rows = dict[str, tuple[tuple[float, ...], ...]]

# Table 4: ScreeNOT rank at layers 0…12; rows GitHub, OpenWebText, WikiText.
RANK: Rows = {
    "BERT": (
        (15, 16, 16, 16, 14, 11, 11, 9, 10, 10, 11, 11, 12),
        (15, 16, 18, 16, 11, 11, 9, 9, 11, 11, 11, 11, 13),
        (15, 16, 18, 16, 12, 11, 9, 9, 11, 11, 11, 12, 12),
    ),
    "BLOOM": (
        (8, 9, 9, 8, 9, 10, 10, 11, 10, 10, 10, 10, 10),
        (6, 10, 10, 11, 11, 10, 11, 11, 11, 11, 10, 10, 11),
        (6, 8, 9, 10, 10, 11, 11, 11, 11, 11, 11, 10, 11),
    ),
    "GPT-2": (
        (15, 14, 13, 12, 12, 11, 11, 10, 10, 10, 11, 11, 10),
        (15, 13, 14, 12, 13, 11, 10, 10, 10, 10, 9, 9, 12),
        (15, 14, 14, 12, 11, 11, 11, 11, 11, 11, 9, 10, 12),
    ),
    "Llama 2": (
        (6, 10, 9, 8, 10, 8, 8, 9, 9, 9, 9, 8, 10),
        (7, 10, 10, 11, 11, 10, 9, 10, 9, 8, 9, 8, 10),
        (8, 10, 10, 10, 9, 8, 8, 8, 8, 8, 8, 8, 10),
    ),
}

# Table 5: stable rank at layers 0…12; rows GitHub, OpenWebText, WikiText.
STABLE_RANK: Rows = {
    "BERT": (
        (9.19, 7.79, 5.26, 4.73, 4.34, 3.84, 3.48, 3.20, 2.70, 2.45, 2.04, 1.84, 1.91),
        (9.19, 7.63, 5.25, 4.73, 4.10, 3.53, 3.16, 2.84, 2.46, 2.30, 2.18, 2.22, 2.15),
        (9.19, 7.78, 5.03, 4.58, 3.99, 3.48, 3.14, 2.82, 2.42, 2.27, 2.13, 2.16, 2.12),
    ),
    "BLOOM": (
        (8.39, 1.25, 1.20, 1.21, 1.21, 1.23, 1.29, 1.29, 1.28, 1.25, 1.21, 1.02, 1.00),
        (8.33, 1.27, 1.30, 1.24, 1.24, 1.27, 1.32, 1.34, 1.33, 1.26, 1.16, 1.01, 1.00),
        (8.42, 1.27, 1.28, 1.30, 1.31, 1.34, 1.41, 1.43, 1.41, 1.32, 1.22, 1.01, 1.00),
    ),
    "GPT-2": (
        (2.05, 1.92, 1.91, 1.89, 1.90, 1.90, 1.92, 1.94, 1.98, 2.03, 2.05, 1.70, 1.11),
        (2.05, 1.92, 1.91, 1.89, 1.88, 1.88, 1.88, 1.90, 1.91, 1.96, 2.02, 2.24, 1.49),
        (2.05, 1.92, 1.91, 1.89, 1.88, 1.88, 1.88, 1.90, 1.91, 1.97, 2.03, 2.19, 1.56),
    ),
    "Llama 2": (
        (24.87, 1.00, 1.00, 1.00, 1.00, 1.00, 1.01, 1.01, 1.01, 1.01, 1.02, 1.03, 1.17),
        (52.23, 1.00, 1.00, 1.00, 1.00, 1.00, 1.01, 1.01, 1.02, 1.02, 1.03, 1.05, 1.44),
        (24.70, 1.00, 1.00, 1.01, 1.01, 1.02, 1.03, 1.05, 1.09, 1.16, 1.20, 1.26, 1.30),
    ),
}

# Table 6: relative norm at layers 0…12; rows GitHub, OpenWebText, WikiText.
RELATIVE_NORM: Rows = {
    "BERT": (
        (0.445, 0.483, 0.569, 0.616, 0.648, 0.707, 0.764, 0.786, 0.768, 0.686, 0.631, 0.562, 0.473),
        (0.465, 0.546, 0.660, 0.759, 0.877, 0.977, 0.973, 0.967, 0.953, 0.901, 0.777, 0.658, 0.596),
        (0.454, 0.502, 0.626, 0.695, 0.798, 0.916, 0.968, 0.965, 0.949, 0.887, 0.756, 0.682, 0.627),
    ),
    "BLOOM": (
        (0.013, 0.123, 0.232, 0.279, 0.343, 0.385, 0.343, 0.306, 0.301, 0.306, 0.325, 0.219, 0.181),
        (0.012, 0.138, 0.194, 0.264, 0.315, 0.342, 0.297, 0.267, 0.264, 0.300, 0.392, 0.575, 0.589),
        (0.013, 0.149, 0.222, 0.287, 0.328, 0.352, 0.336, 0.301, 0.295, 0.325, 0.407, 0.494, 0.491),
    ),
    "GPT-2": (
        (0.999, 0.994, 0.996, 0.972, 0.812, 0.762, 0.672, 0.600, 0.489, 0.442, 0.386, 0.303, 0.123),
        (1.000, 0.996, 0.990, 0.989, 0.986, 0.983, 0.981, 0.979, 0.974, 0.841, 0.631, 0.480, 0.075),
        (1.000, 0.995, 0.991, 0.989, 0.987, 0.986, 0.984, 0.981, 0.981, 0.933, 0.680, 0.555, 0.110),
    ),
    "Llama 2": (
        (0.029, 0.221, 0.221, 0.222, 0.222, 0.222, 0.223, 0.223, 0.224, 0.225, 0.226, 0.227, 0.183),
        (0.038, 0.146, 0.146, 0.146, 0.147, 0.147, 0.148, 0.148, 0.150, 0.152, 0.154, 0.154, 0.148),
        (0.034, 0.060, 0.060, 0.060, 0.060, 0.061, 0.062, 0.063, 0.065, 0.068, 0.072, 0.076, 0.191),
    ),
}


@dataclass(frozen=True)
class Average:
    """A row of Table 1: mean over layers and, in brackets there, standard deviation; NaN where it prints a dash."""

    model: str
    text: str
    rank: tuple[float, float]
    relative_norm: tuple[float, float]
    between: tuple[float, float]
    within: tuple[float, float]
    incoherence: tuple[float, float]


TEXTS = ("GitHub", "OpenWebText", "WikiText")
"""The texts of the three rows that Tables 4 to 6 give each model."""

_NONE = (math.nan, math.nan)

# Table 1.
TABLE_1 = (
    Average("NanoGPT", "Shakespeare", (7.86, 1.96), (0.66, 0.28), _NONE, _NONE, _NONE),
    Average("GPT-2", "OpenWebText", (11.38, 1.86), (0.84, 0.18), (0.10, 0.01), (0.44, 0.04), (0.051, 0.05)),
    Average("GPT-2", "WikiText", (11.69, 1.64), (0.76, 0.18), (0.11, 0.01), (0.41, 0.03), (0.039, 0.04)),
    Average("BERT", "OpenWebText", (12.54, 2.73), (0.78, 0.18), (0.13, 0.04), (0.26, 0.04), (0.046, 0.05)),
    Average("BERT", "WikiText", (12.62, 2.70), (0.76, 0.18), (0.17, 0.03), (0.31, 0.04), (0.043, 0.04)),
    Average("BLOOM", "OpenWebText", (10.23, 1.31), (0.30, 0.16), (0.15, 0.14), (0.32, 0.09), (0.158, 0.23)),
    Average("BLOOM", "WikiText", (10.00, 1.47), (0.31, 0.13), (0.14, 0.13), (0.31, 0.09), (0.148, 0.23)),
    Average("Llama 2", "OpenWebText", (9.38, 1.15), (0.14, 0.03), (0.17, 0.19), (0.43, 0.12), (0.190, 0.24)),
    Average("Llama 2", "WikiText", (8.69, 0.91), (0.07, 0.04), (0.47, 0.35), (0.60, 0.25), (0.316, 0.27)),
    Average("Llama 2", "GitHub", (8.69, 1.67), (0.21, 0.05), (0.17, 0.10), (0.40, 0.07), (0.189, 0.20)),
)
# The same on OpenWebText, the one text that all four models were measured on.
AVERAGES: dict[str, Average] = {row.model: row for row in TABLE_1 if row.text == "OpenWebText"}
# Section 5: "random baseline is about 0.1" (of the maximum).

# Table 3: share of energy in the K × K lowest frequencies, GPT-2, of the Gram matrix, of PWPᵀ and of the QK matrix.
LOW_FREQUENCY: dict[int, float] = {1: 0.394, 3: 0.954, 5: 0.982, 10: 0.997}
LOW_FREQUENCY_PWP: dict[int, float] = {1: 0.459, 3: 0.965, 5: 0.988, 10: 0.999}
LOW_FREQUENCY_QK: dict[int, float] = {1: 0.840, 3: 0.900, 5: 0.904, 10: 0.912}


@dataclass(frozen=True)
class OtherText:
    """A row of Table 2: texts unlike the training text, and the rank that Table 1 has for the training text."""

    model: str
    text: str
    rank: tuple[float, float]
    low_frequency: float
    trained_rank: float


TABLE_2 = (
    OtherText("NanoGPT", "WikiText", (5.43, 1.84), 0.840, 7.86),
    OtherText("GPT-2", "GitHub", (11.54, 1.55), 0.995, 11.38),
    OtherText("BERT", "GitHub", (12.46, 2.47), 0.702, 12.54),
    OtherText("BLOOM", "random tokens", (10.44, 2.25), 0.956, 10.23),
)
# Table 2 again: K = 10, on texts unlike the training text.
LOW_FREQUENCY_OTHER_TEXT: dict[str, float] = {
    row.model: row.low_frequency for row in TABLE_2 if row.model in ("BERT", "BLOOM")
}
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
    """The published model to show first: the same family, else the same kind of position, else GPT-2."""
    family, positions = ((provenance(run, "model", of) or "").lower() for of in ("family", "positions"))
    for model, parts in _FAMILIES.items():
        if any(part in family for part in parts):
            return model
    return {"rotary": "Llama 2", "alibi": "BLOOM"}.get(positions, "GPT-2")


def layer_range(rows: tuple[tuple[float, ...], ...]) -> tuple[list[float], list[float]]:
    """Lowest and highest of the texts at each of the 13 layers."""
    return [min(values) for values in zip(*rows, strict=True)], [
        max(values) for values in zip(*rows, strict=True)
    ]
