"""The published averages that a run is compared with: Table 1 of Song & Zhong 2024, as `published.toml` has it."""

from __future__ import annotations

from dataclasses import dataclass

from theodolite.passes.run import Run
from theodolite.report.data import packaged, provenance


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


TABLE_1 = tuple(Average(**row) for row in packaged("published.toml")["average"])
# The same on OpenWebText, the one text that all four models were measured on.
AVERAGES: dict[str, Average] = {row.model: row for row in TABLE_1 if row.text == "OpenWebText"}
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
