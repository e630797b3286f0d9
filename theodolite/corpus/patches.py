"""The tokens of an image: a grid of patches, row after row, and what a model puts before them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PatchGrid:
    """Rows and columns of patches, and the names of the tokens before them ([CLS], registers; none in SigLIP)."""

    rows: int
    columns: int
    before: tuple[str, ...] = ()

    @property
    def leading(self) -> int:
        """The number of tokens before the patches."""
        return len(self.before)

    @property
    def length(self) -> int:
        """All tokens T of an image."""
        return self.leading + self.rows * self.columns

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.rows, self.columns

    def token_text(self, position: int) -> str:
        """Name the token at a position: as the tokens before the patches are called, or `patch ROW,COLUMN` from 0."""
        if position < self.leading:
            return self.before[position]
        row, column = divmod(position - self.leading, self.columns)
        return f"patch {row},{column}"

    def described(self) -> dict[str, Any]:
        """Describe it for the provenance."""
        return {"rows": self.rows, "columns": self.columns, "before": list(self.before)}


def grid_described(corpus: dict[str, Any]) -> PatchGrid | None:
    """Read the grid of a corpus from its provenance; None where it is text."""
    grid = corpus.get("grid")
    return None if grid is None else PatchGrid(grid["rows"], grid["columns"], tuple(grid["before"]))
