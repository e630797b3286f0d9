"""The gradio page: its components, and which panel follows which click. Every panel's content is made elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlencode

import gradio as gr

from theodolite.errors import TheodoliteError, UsageError
from theodolite.explore import panel_html, panels
from theodolite.explore.panels import Selection, Switches
from theodolite.explore.subject import Subject, offered_prompts, prompt_ids
from theodolite.report.data import opening_head
from theodolite.system.wording import head_name

FIRST_MEASURE = "prompt:entropy"
OPENING = "few-shot"
_CONSTITUENTS = (
    "The query-key product in parts that depend on position, context, both or neither; they sum to QK, the model's own "
    "logits. pos is the contribution of position and cvec that of token and context, in the order query-key: pos-cvec "
    "is a position that attends to a content. Each row is centred, to which the softmax is invariant. Position 0 is "
    "excluded."
)
_START = """
const start = () => window.theodolite
  ? window.theodolite.{what}(element, props, watch, trigger) : setTimeout(start, 40);
start();
"""


@dataclass(frozen=True)
class _ModelPanels:
    """The panels of one model."""

    map: gr.HTML
    head: gr.HTML
    attention: gr.HTML
    sinks: gr.HTML
    spectrum: gr.HTML
    propagation: gr.HTML
    constituents: gr.HTML
    not_split: gr.HTML
    tags: gr.HTML

    @property
    def quick(self) -> list[gr.HTML]:
        return [self.map, self.head, self.attention, self.sinks, self.spectrum, self.propagation]

    @property
    def slow(self) -> list[gr.HTML]:
        return [self.constituents, self.not_split, self.tags]


@dataclass(frozen=True)
class _Controls:
    """What the reader sets; the values of an event's function come in this order."""

    ids: gr.State
    head: gr.Dropdown
    measure: gr.Dropdown
    log: gr.Checkbox
    hide: gr.Checkbox
    window: gr.Dropdown

    def all(self) -> list[Any]:
        return [getattr(self, each.name) for each in fields(self)]


@dataclass(frozen=True)
class _Settings:
    """The values of `_Controls`."""

    ids: tuple[int, ...]
    selection: Selection
    switches: Switches
    first: int

    @classmethod
    def of(cls, ids: Sequence[int], head: str, measure: str, log: bool, hide: bool, window: int) -> _Settings:
        """From the controls.

        Raises:
            UsageError: no prompt was read yet, as after the server was started anew under an open page.
        """
        if not ids:
            raise UsageError("no prompt has been run yet: run one first")
        where, _, column = measure.partition(":")
        selection = Selection(*panels.parse_head(head), (where, column))
        return cls(tuple(ids), selection, Switches(log, hide), int(window or 1))


def build(subjects: Sequence[Subject]) -> gr.Blocks:
    """The page of one model, or of two side by side."""
    with gr.Blocks(title="theodolite explore", analytics_enabled=False, fill_width=True) as page:
        _html(panel_html.title([s.name for s in subjects], [s.run for s in subjects]))
        prompts = offered_prompts(subjects)
        prompt, preset, run_button = _prompt_row(prompts)
        message = _html(elem_id="message")
        link = _link()
        controls = _control_row(subjects)
        with gr.Row(elem_classes="sides"):
            sides = [_side(subject, alone=len(subjects) == 1) for subject in subjects]
        _wire(page, subjects, prompts, (prompt, preset, run_button, message, link), controls, sides)
    return page


def _prompt_row(prompts: dict[str, str]) -> tuple[gr.Textbox, gr.Dropdown, gr.Button]:
    with gr.Row(elem_classes="prompt-row"):
        prompt = gr.Textbox(
            prompts[OPENING],
            label="prompt",
            lines=3,
            max_lines=8,
            scale=5,
            elem_id="prompt",
            info="Enter starts a new line; Shift+Enter or Run runs the model.",
        )
        with gr.Column(scale=1, min_width=170):
            preset = gr.Dropdown(list(prompts), value=OPENING, label="or pick one", elem_id="preset")
            run_button = gr.Button("Run", variant="primary", elem_id="run")
    return prompt, preset, run_button


def _control_row(subjects: Sequence[Subject]) -> _Controls:
    heads = panels.heads_of(subjects)
    start = head_name(*opening_head(subjects[0].run))
    with gr.Row(elem_classes="controls"):
        return _Controls(
            ids=gr.State(()),
            head=gr.Dropdown(heads, value=start, label="head", elem_id="head", min_width=120),
            measure=gr.Dropdown(
                panels.measures_of(subjects),
                value=FIRST_MEASURE,
                label="head map of",
                elem_id="measure",
                min_width=200,
            ),
            log=gr.Checkbox(False, label="logarithmic attention", elem_id="log", min_width=150),
            hide=gr.Checkbox(False, label="hide sinks", elem_id="hide", min_width=120),
            window=gr.Dropdown(
                [("all positions", 1)],
                value=1,
                label="constituents of",
                elem_id="window",
                visible=False,
                min_width=150,
            ),
        )


def _side(subject: Subject, *, alone: bool) -> _ModelPanels:
    panels_by_name: dict[str, gr.HTML] = {}
    with gr.Column(elem_classes="side"):
        hidden = " only-heard" if alone else ""  # one model's name is the page's own heading
        _html(f'<h2 class="side-name{hidden}">{panel_html.escaped(subject.name)}</h2>')
        with gr.Row(elem_classes="pair"):
            with _panel("Heads", "Rows are layers, columns heads. Click a head to show it."):
                panels_by_name["map"] = _figure("layer × head map", picks=True)
                panels_by_name["head"] = _html(elem_classes="head-panel")
            with _panel(
                "Attention", "Each row is a query token, each column a key; ▼ marks the head's sinks."
            ):
                panels_by_name["attention"] = _figure("attention map of the head", kind="square")
        with gr.Row(elem_classes="pair"):
            panels_by_name["sinks"] = _html(elem_classes="sinks-panel")
            panels_by_name["tags"] = _html(elem_classes="tags-panel")
        with _panel("Constituents of the logits", _CONSTITUENTS):
            panels_by_name["not_split"] = _html()
            panels_by_name["constituents"] = _figure(
                "constituents of the head's logits", kind="tiled", elem_classes="wide-figure"
            )
        with gr.Row(elem_classes="pair"):
            with _panel(
                "Spectrum", "Eigenvalues of the head's query-key matrix, with the text's covariance Σ̂."
            ):
                panels_by_name["spectrum"] = _figure("eigenvalues of the head")
            with _panel("Signal propagation", "ρ predicted from the spectrum and measured on the text."):
                panels_by_name["propagation"] = _figure("predicted and measured signal propagation")
    return _ModelPanels(**panels_by_name)


def _wire(
    page: gr.Blocks,
    subjects: Sequence[Subject],
    prompts: dict[str, str],
    prompt_row: tuple[gr.Textbox, gr.Dropdown, gr.Button, gr.HTML, gr.HTML],
    controls: _Controls,
    sides: list[_ModelPanels],
) -> None:
    prompt, preset, run_button, message, link = prompt_row
    quick_panels = [panel for side in sides for panel in side.quick]
    slow_panels = [panel for side in sides for panel in side.slow]
    inputs = controls.all()
    on = functools.partial(_event, message)

    def read(text: str, *values: Any) -> Iterator[Any]:
        ids = prompt_ids(subjects, text)
        choices = panels.windows(ids)
        window = gr.Dropdown(choices=choices, value=1, visible=len(choices) > 1)
        name = next((name for name, prompt_text in prompts.items() if prompt_text == text), None)
        settings = _Settings.of(*[ids, *values[1:5], 1])
        yield from (ids, window, name, _query(settings, text), *_quick(subjects, settings))

    def show(*values: Any) -> Iterator[Any]:
        settings = _Settings.of(*values)
        yield from (_query(settings), *_quick(subjects, settings))

    def parts(*values: Any) -> Iterator[Any]:
        if not values[0]:  # whatever came before has said why there is no prompt
            yield from (gr.skip() for _ in slow_panels)
            return
        yield from _slow(subjects, _Settings.of(*values))

    def maps(*values: Any) -> Iterator[Any]:
        settings = _Settings.of(*values)
        yield from panels.head_map(subjects, settings.ids, settings.selection)

    def attention(*values: Any) -> Iterator[Any]:
        settings = _Settings.of(*values)
        yield from panels.attention(subjects, settings.ids, settings.selection, settings.switches)

    def choose(evt: gr.EventData, *values: Any) -> Iterator[Any]:
        head = str(evt._data["head"])
        yield from (head, *show(values[0], head, *values[2:]))

    def from_link(request: gr.Request) -> list[Any]:
        """What the page's address asks for, which anybody may have written: checked like what is typed."""
        asked = dict(request.query_params)
        try:
            head = _head_asked(subjects, asked)
        except TheodoliteError as error:
            return [panel_html.message(str(error)), gr.skip(), asked.get("prompt") or gr.skip()]
        return ["", head or gr.skip(), asked.get("prompt") or gr.skip()]

    reads = [controls.ids, controls.window, preset, link, *quick_panels]
    for trigger in (run_button.click, prompt.submit):
        on(trigger, read, [prompt, *inputs], reads).then(**_then(message, parts, inputs, slow_panels))
    page.load(
        from_link, None, [message, controls.head, prompt], show_progress="hidden", api_visibility="private"
    ).then(**_then(message, read, [prompt, *inputs], reads)).then(
        **_then(message, parts, inputs, slow_panels)
    )
    preset.input(prompts.__getitem__, preset, prompt, show_progress="hidden", api_visibility="private").then(
        **_then(message, read, [prompt, *inputs], reads, first=True)
    ).then(**_then(message, parts, inputs, slow_panels))
    on(controls.head.input, show, inputs, [link, *quick_panels]).then(
        **_then(message, parts, inputs, slow_panels)
    )
    for side in sides:
        on(side.map.select, choose, inputs, [controls.head, link, *quick_panels]).then(
            **_then(message, parts, inputs, slow_panels)
        )
    on(controls.measure.input, maps, inputs, [side.map for side in sides])
    for switch in (controls.log, controls.hide):
        on(switch.input, attention, inputs, [side.attention for side in sides])
    on(controls.window.input, parts, inputs, slow_panels)


def _query(settings: _Settings, text: str | None = None) -> str:
    """What is shown, as the page's address keeps it; without a text the prompt in it stays."""
    place = {"layer": settings.selection.layer, "head": settings.selection.head}
    return urlencode(place if text is None else {"prompt": text.encode("utf-8", "replace"), **place})


def _head_asked(subjects: Sequence[Subject], asked: Mapping[str, str]) -> str | None:
    """The head that an address names, as `L3H5`; None where it names none.

    Raises:
        UsageError: it is no head of the models.
    """
    if "layer" not in asked and "head" not in asked:
        return None
    layer, head = panels.parse_head(f"L{asked.get('layer', '')}H{asked.get('head', '')}")
    subjects[0].model.check_place(layer, head)
    return head_name(layer, head)


def _quick(subjects: Sequence[Subject], settings: _Settings) -> Iterator[str]:
    shown = (subjects, settings.ids, settings.selection)
    quick = [
        panels.head_map(*shown),
        panels.head(*shown),
        panels.attention(*shown, settings.switches),
        panels.sinks(*shown),
        panels.spectrum(subjects, settings.selection),
        panels.propagation(subjects, settings.selection),
    ]
    for side in zip(*quick, strict=True):
        yield from side


def _slow(subjects: Sequence[Subject], settings: _Settings) -> Iterator[str]:
    shown = (subjects, settings.ids, settings.selection)
    for parts, tags in zip(panels.constituents(*shown, settings.first), panels.tags(*shown), strict=True):
        yield from (*parts, tags)


def _event(
    message: gr.HTML, trigger: Any, work: Callable[..., Any], inputs: list[Any], outputs: list[Any]
) -> Any:
    # Of clicks that come while one is answered, the last one counts.
    return trigger(**_then(message, work, inputs, outputs, first=True), trigger_mode="always_last")


def _then(
    message: gr.HTML, work: Callable[..., Any], inputs: list[Any], outputs: list[Any], *, first: bool = False
) -> dict[str, Any]:
    """An event whose function gives all outputs, or is refused in a line; the model is asked one thing at a time.

    `first`: nothing comes before it that could have been refused, so that an older line is taken away.
    """

    @functools.wraps(work)
    def answer(*values: Any) -> list[Any]:
        try:
            return ["" if first else gr.skip(), *work(*values)]
        except TheodoliteError as error:
            return [panel_html.message(str(error)), *(gr.skip() for _ in outputs)]

    return {
        "fn": answer,
        "inputs": inputs,
        "outputs": [message, *outputs],
        "show_progress": "minimal",
        "show_progress_on": [message],
        "concurrency_id": "model",
        "concurrency_limit": 1,
        "api_visibility": "private",
    }


def _html(value: str = "", **more: Any) -> gr.HTML:
    return gr.HTML(
        value,
        # Not the default, which would read what stands in the value as a template.
        html_template='<div class="words"></div>',
        js_on_load=_START.replace("{what}", "words"),
        apply_default_css=False,
        **more,
    )


def _link() -> gr.HTML:
    """Keeps prompt and head in the page's address, and copies it."""
    return gr.HTML(
        "",
        html_template='<button type="button" class="copy-link">Copy link to this prompt and head</button>'
        '<span class="copied" role="status"></span>',
        js_on_load=_START.replace("{what}", "link"),
        apply_default_css=False,
        elem_id="link",
    )


def _panel(title: str, lead: str) -> gr.Column:
    panel = gr.Column(elem_classes="panel")
    with panel:
        _html(f'<h3>{title}</h3><p class="lead">{lead}</p>')
    return panel


def _figure(label: str, *, kind: str = "", picks: bool = False, **more: Any) -> gr.HTML:
    picking = " data-picks" if picks else ""
    return gr.HTML(
        "",
        html_template=f'<div class="plot {kind}" role="figure" aria-label="{label}"{picking}></div>'
        '<details class="numbers"><summary>Data table</summary></details>',
        js_on_load=_START.replace("{what}", "figure"),
        apply_default_css=False,
        **more,
    )
