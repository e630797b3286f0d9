"""theodolite surveys the geometry of attention in any Hugging Face transformer.

The public names are imported when they are first used, so that `import theodolite` costs nothing. No module may
bear the name of a public function: importing it would hide the function.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from theodolite.comparison import compare as compare
    from theodolite.corpus import Corpus as Corpus
    from theodolite.errors import TheodoliteError as TheodoliteError
    from theodolite.mask import Mask as Mask
    from theodolite.models import OpenModel as OpenModel
    from theodolite.models import open_model as open_model
    from theodolite.outliers import find_outliers as find_outliers
    from theodolite.report.page import write_report as write_report
    from theodolite.run import Run as Run
    from theodolite.splitting import constituents as constituents
    from theodolite.surveyor import spectra as spectra
    from theodolite.surveyor import survey as survey
    from theodolite.theory.decomposition import decompose as decompose
    from theodolite.tracer import trace_sinks as trace_sinks

_HOMES = {
    "Corpus": "theodolite.corpus",
    "Mask": "theodolite.mask",
    "OpenModel": "theodolite.models",
    "Run": "theodolite.run",
    "TheodoliteError": "theodolite.errors",
    "compare": "theodolite.comparison",
    "constituents": "theodolite.splitting",
    "decompose": "theodolite.theory.decomposition",
    "find_outliers": "theodolite.outliers",
    "open_model": "theodolite.models",
    "spectra": "theodolite.surveyor",
    "survey": "theodolite.surveyor",
    "trace_sinks": "theodolite.tracer",
    "write_report": "theodolite.report.page",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in ("interventions", "prune", "theory", "train"):
        return importlib.import_module(f"theodolite.{name}")
    raise AttributeError(f"module 'theodolite' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
