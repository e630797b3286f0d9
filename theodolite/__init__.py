"""theodolite surveys the geometry of attention in any Hugging Face transformer.

No module may bear the name of a public function: importing it would hide the function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from theodolite.system.lazy_names import lazy_names

__version__ = "0.1.0"

if TYPE_CHECKING:
    from theodolite.comparison import compare as compare
    from theodolite.corpus.corpus import Corpus as Corpus
    from theodolite.errors import TheodoliteError as TheodoliteError
    from theodolite.explore.panels import view_head as view_head
    from theodolite.logits.constituents import constituents as constituents
    from theodolite.models import OpenModel as OpenModel
    from theodolite.models import open_model as open_model
    from theodolite.models import open_module as open_module
    from theodolite.passes.run import Run as Run
    from theodolite.passes.survey import merge as merge
    from theodolite.passes.survey import spectra as spectra
    from theodolite.passes.survey import survey as survey
    from theodolite.report.page import write_report as write_report
    from theodolite.sinks.exclusions import Exclusions as Exclusions
    from theodolite.sinks.outliers import find_outliers as find_outliers
    from theodolite.sinks.trace import trace_sinks as trace_sinks
    from theodolite.theory.decomposition import decompose as decompose

_MODULES = {
    "interventions": "theodolite.sinks.interventions",
    "prune": "theodolite.prune",
    "theory": "theodolite.theory",
    "train": "theodolite.train",
}

_names, __getattr__, __dir__ = lazy_names(__name__, _MODULES)
__all__ = ["__version__", *_names]


def run_as_html(run: Any) -> str:
    """Draw a run for a notebook. It is here because what measures imports nothing that draws."""
    from theodolite.report.page import as_html

    return as_html(run)
