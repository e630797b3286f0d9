"""The published averages that a run is compared with: Table 1 of Song & Zhong 2024, as `published.toml` has it."""

from __future__ import annotations

from types import SimpleNamespace

from theodolite.passes.run import Run
from theodolite.report.data import packaged, provenance

# Rows of Table 1, whose fields `published.toml` says.
TABLE_1 = tuple(SimpleNamespace(**row) for row in packaged("published.toml")["average"])
# The same on OpenWebText, the one text that all four models were measured on.
AVERAGES: dict[str, SimpleNamespace] = {row.model: row for row in TABLE_1 if row.text == "OpenWebText"}
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
