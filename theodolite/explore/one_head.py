"""One head on one prompt as a figure for a notebook: tokens that light what they attend to, sinks, the whole matrix.

HTML and CSS alone, without a script and with nothing fetched, so that it works wherever an output is shown. Hovering
a token, or choosing it with the arrow keys, shows its row. Neither gradio nor Plotly is needed.
"""

from __future__ import annotations

import base64
import html
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from theodolite.accumulate.catches import attend_and_catch
from theodolite.attention.inputs import AttentionInputs
from theodolite.corpus.corpus import Corpus
from theodolite.corpus.special_tokens import trailing_special_tokens
from theodolite.errors import UsageError, WorkError
from theodolite.explore import panel_html
from theodolite.explore.subject import MOST_TOKENS, ids_of_text
from theodolite.explore.view import HeadView, LayerCatch, head_view
from theodolite.models import OpenModel
from theodolite.models.guard import measures
from theodolite.models.hooks import Hooks, hooked
from theodolite.models.token_texts import token_texts
from theodolite.passes.corpus_pass import check_fit
from theodolite.report.data import Floats
from theodolite.system.choices import wider_than
from theodolite.system.files import disk_errors, write_text
from theodolite.system.png import PALETTE, chunk, png
from theodolite.system.wording import head_name, shown_token, visible

FAINTEST = 0.005
"""A smaller weight lights no token: it could not be seen, and the figure would grow with the square of the prompt."""

NAMED = 5  # keys that are written out for a token, those with the most attention
PLUM = (164, 90, 147)  # of the matrix; seen on light and on dark paper alike


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

    def _repr_html_(self) -> str:
        """The figure as a piece of HTML; each has a name of its own, so that two on a page do not mix."""
        view = self.view
        received = [float(value) for value in view.received]
        return panel_html.render(
            "one_head.html.j2",
            uid=f"theodolite-{uuid.uuid4().hex[:8]}",
            name=head_name(view.layer, view.head),
            model=visible(self.model, 80),
            tokens=[panel_html.token(view, position, "") for position in range(len(view.tokens))],
            received=np.nan_to_num(view.received / panel_html.most_received([view])).round(3).tolist(),
            lit=[_lit(row) for row in view.attention],
            told=[_row_sentence(view, query) for query in range(len(view.tokens))],
            most_received=f"{max((value for value in received if value > 0), default=0.0):.2f}",
            most=f"{float(np.nanmax(view.attention)):.2f}",
            matrix=base64.b64encode(_png(view.attention)).decode(),
            sinks=[panel_html.sink_sentence(view, index) for index in range(len(view.sinks))],
            threshold=panel_html.SINK_THRESHOLD,
        )

    def save(self, path: str | Path) -> Path:
        """Write the figure as a page of its own, and return its path.

        Raises:
            WorkError: it cannot be written.
        """
        path = Path(path)
        title = html.escape(f"{head_name(self.view.layer, self.view.head)} of {visible(self.model, 80)}")
        page = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>{self._repr_html_()}</html>'
        with disk_errors(path):
            write_text(path, page)
        return path


class _HeadTap(Hooks):
    """Keeps one layer's attention inputs and what its sinks catch."""

    def __init__(self, layer: int, trailing: int) -> None:
        self.layer = layer
        self.trailing = trailing

    def attention(self, layer: int, inputs: AttentionInputs) -> Tensor:
        if layer != self.layer:
            return super().attention(layer, inputs)
        output, catches = attend_and_catch(inputs, stretches=True, trailing=self.trailing)
        self.inputs, self.caught = inputs, LayerCatch(catches.to(torch.device("cpu")), output[0])
        return output


@measures
def view_head(
    model: OpenModel, text: str | Sequence[int] | Int[Tensor, " positions"], layer: int, head: int
) -> HeadFigure:
    """One head's attention on a prompt, as a figure for a notebook.

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
    ids = torch.tensor(ids_of_text([model], text)) if isinstance(text, str) else torch.as_tensor(text)
    check_fit(model, Corpus.from_ids(ids), least_contexts=1)
    if ids.ndim != 1 or len(ids) > MOST_TOKENS:
        raise UsageError(
            f"token ids of shape {tuple(ids.shape)}: give those of one prompt, {MOST_TOKENS} at most"
        )
    model.check_place(layer, head)
    trailing = trailing_special_tokens(model.tokenizer, ids[None])
    tap = _HeadTap(layer, trailing)
    with torch.inference_mode(), hooked(model, tap):
        model.forward(ids[None])
    view = head_view(tuple(token_texts(model, ids)), tap.inputs, tap.caught, layer, head, trailing)
    if not np.isfinite(view.attention).any(axis=1).all():
        wider = wider_than(model.source.dtype)
        raise WorkError(f"attention holds NaN or infinite values on this prompt: {wider}")
    return HeadFigure(model.id, view)


def _lit(row: Floats) -> list[tuple[int, str]]:
    """The keys that a query lights, with the weight as CSS has it."""
    return [(int(key), f"{row[key]:.3f}".lstrip("0")) for key in np.flatnonzero(row >= FAINTEST)]


def _row_sentence(view: HeadView, query: int) -> str:
    """What a token attends to most, in words."""
    weights = np.nan_to_num(view.attention[query])
    order = [int(key) for key in np.argsort(-weights, kind="stable")[:NAMED] if weights[key] >= FAINTEST]
    keys = [f"{_named(view, key)} {weights[key]:.2f}" for key in order]
    if view.learned[query] >= FAINTEST:
        keys.append(f"the learned sink column {view.learned[query]:.2f}")
    return f"{_named(view, query)} attends to {', '.join(keys) or 'nothing'}"


def _named(view: HeadView, position: int) -> str:
    return f"{position} “{shown_token(view.tokens[position])}”"


def _png(weights: Floats) -> bytes:
    """The matrix as a picture, one pixel a weight: one colour, as opaque as the weight is large."""
    most = float(np.nanmax(weights)) or 1.0
    cells = np.rint(255 * np.nan_to_num(weights) / most).astype(np.uint8)
    return png(cells, PALETTE, chunk(b"PLTE", bytes(PLUM) * 256), chunk(b"tRNS", bytes(range(256))))
