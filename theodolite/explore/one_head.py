"""One head on one prompt as a Plotly figure for a notebook or a file. Neither a survey nor gradio is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Int
from torch import Tensor

from theodolite.corpus.corpus import Corpus
from theodolite.errors import UsageError, WorkError
from theodolite.explore.panels import attention_map, sink_sentence
from theodolite.explore.subject import MOST_TOKENS, ids_of_text
from theodolite.models import OpenModel
from theodolite.models.guard import measures
from theodolite.passes.corpus_pass import check_fit
from theodolite.report import style
from theodolite.report.page import write_page
from theodolite.sinks.prompt import HeadView, head_view, read_prompt
from theodolite.system.choices import wider_than
from theodolite.system.wording import head_name, visible


@dataclass(frozen=True, eq=False)
class HeadFigure:
    """One head on one prompt; a notebook shows it as it is.

    Attributes:
        model: the model's name.
        view: the numbers: tokens, attention (T, T), sinks, what each token receives.
    """

    model: str
    view: HeadView

    def __repr__(self) -> str:
        name = head_name(self.view.layer, self.view.head)
        return f"HeadFigure of {name} of {self.model} on {len(self.view.tokens)} tokens"

    @property
    def figure(self) -> go.Figure:
        """The head's attention as a Plotly figure, its sinks in the note."""
        view = self.view
        title = f"{head_name(view.layer, view.head)} of {visible(self.model, 80)}"
        sinks = "; ".join(sink_sentence(view, index) for index in range(len(view.sinks)))
        return style.alone(attention_map(view), title, f"{sinks or 'No sink'}.").update_layout(width=760)

    def _repr_mimebundle_(self, *args: Any, **more: Any) -> Any:
        return self.figure._repr_mimebundle_(*args, **more)

    def save(self, path: str | Path) -> Path:
        """Write the figure with Plotly's script as a page that opens offline, and return its path.

        Raises:
            WorkError: it cannot be written.
        """
        return write_page(Path(path), self.figure.to_html(include_plotlyjs=True))


@measures("model")
def view_head(
    model: OpenModel, text: str | Sequence[int] | Int[Tensor, " positions"], layer: int, head: int
) -> HeadFigure:
    """Draw one head's attention on a prompt, for a notebook.

    Args:
        model: from `open_model`.
        text: the prompt, from 4 to 512 tokens, read with the tokenizer's special tokens; or token ids, as they are.
        layer, head: which, both counted from 0.

    Returns:
        The figure: a notebook shows it, `.save("head.html")` writes it, and `.view` has the numbers.

    Raises:
        UsageError: no such layer or head, or a prompt that the model cannot read.
        WorkError: attention became NaN or infinite.
    """
    ids = (
        torch.tensor(ids_of_text([(model.id, model)], text))
        if isinstance(text, str)
        else torch.as_tensor(text)
    )
    check_fit(model, Corpus.from_ids(ids), least_contexts=1)
    if ids.ndim != 1 or len(ids) > MOST_TOKENS:
        raise UsageError(
            f"token ids of shape {tuple(ids.shape)}: give those of one prompt, {MOST_TOKENS} at most"
        )
    model.check_place(layer, head)
    view = head_view(read_prompt(model, ids), layer, head)
    if not np.isfinite(view.attention).any(axis=1).all():
        wider = wider_than(model.source.dtype)
        raise WorkError(f"attention holds NaN or infinite values on this prompt: {wider}")
    return HeadFigure(model.id, view)
