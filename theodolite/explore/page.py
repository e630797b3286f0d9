"""The gradio page: its components, and which panel follows which click. Every panel's content is made elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

import gradio as gr

from theodolite.errors import TheodoliteError, UsageError
from theodolite.explore import panel_html, panels
from theodolite.explore.panels import Shown
from theodolite.explore.subject import Subject, offered_prompts, prompt_ids
from theodolite.report.data import opening_head
from theodolite.system.wording import head_name

FIRST_MEASURE = "prompt:entropy"
OPENING = "few-shot"
CONSTITUENTS = (
    "The query-key product in parts that depend on position, context, both or neither; they sum to QK, the model's own "
    "logits. pos is the contribution of position and cvec that of token and context, in the order query-key: pos-cvec "
    "is a position that attends to a content. Each row is centred, to which the softmax is invariant. Position 0 is "
    "excluded."
)
# gradio's plots tell of no clicks. Each new figure is a new element.
_CLICKS = """
new MutationObserver(() => document.querySelectorAll(".head-map .js-plotly-plot:not([data-heard])").forEach((plot) => {
  plot.dataset.heard = "";
  plot.on("plotly_click", ({ points: [point] }) => trigger("select", { head: `L${point.y}H${point.x}` }));
})).observe(document.body, { childList: true, subtree: true });
"""
_KEEP_ADDRESS = "(query) => { if (query) history.replaceState(history.state, '', query); }"
_COPY_ADDRESS = "() => { navigator.clipboard.writeText(location.href); }"

Update = dict[Any, Any]


def build(subjects: Sequence[Subject]) -> gr.Blocks:
    """The page of one model, or of two side by side."""
    prompts = offered_prompts(subjects)
    start = head_name(*opening_head(subjects[0].run))
    with gr.Blocks(title="theodolite explore", analytics_enabled=False, fill_width=True) as page:
        gr.HTML(panel_html.title([each.name for each in subjects], [each.run for each in subjects]))
        with gr.Row():
            label = "prompt (Shift+Enter or Run reads it)"
            prompt = gr.Textbox(
                prompts[OPENING], label=label, lines=3, max_lines=8, scale=5, elem_id="prompt"
            )
            with gr.Column(scale=1, min_width=170):
                preset = gr.Dropdown(list(prompts), value=OPENING, label="or pick one", elem_id="preset")
                run_button = gr.Button("Run", variant="primary", elem_id="run")
                copy_link = gr.Button("Copy link", size="sm", elem_id="copy-link")
        message = gr.HTML(elem_id="message")
        with gr.Row():
            head = gr.Dropdown(panels.heads_of(subjects), value=start, label="head", elem_id="head")
            measures = panels.measures_of(subjects)
            measure = gr.Dropdown(measures, value=FIRST_MEASURE, label="head map of", elem_id="measure")
            log = gr.Checkbox(label="logarithmic attention", elem_id="log")
            hide = gr.Checkbox(label="hide sinks", elem_id="hide")
            window = gr.Dropdown(
                [("all", 1)], value=1, label="constituents of", elem_id="window", visible=False
            )
        with gr.Row():
            sides = [_side(subject.name if len(subjects) > 1 else "") for subject in subjects]
        clicks = gr.HTML(js_on_load=_CLICKS)
        address = gr.Textbox(visible="hidden")
        text = gr.State("")  # the prompt that is shown; another may have been typed since

        def of_sides(**values: Sequence[Any]) -> Update:
            named = [
                (name, *each)
                for name, of_models in values.items()
                for each in zip(sides, of_models, strict=True)
            ]
            return {side[name]: value for name, side, value in named}

        def shown(prompt_text: str, name: str) -> Shown:
            if not prompt_text:  # as after the server was started anew under an open page
                raise UsageError("no prompt has been run yet: run one first")
            return Shown(subjects, prompt_ids(subjects, prompt_text), *panels.parse_head(name))

        def maps(prompt_text: str, name: str, column: str, *_: Any) -> Iterator[Update]:
            yield of_sides(map=panels.head_map(shown(prompt_text, name), column))

        def attention(
            prompt_text: str, name: str, _: str, logs: bool, hides: bool, *__: Any
        ) -> Iterator[Update]:
            yield of_sides(attention=panels.attention(shown(prompt_text, name), log=logs, hide_sinks=hides))

        def constituents(prompt_text: str, name: str, *settings: Any) -> Iterator[Update]:
            drawn, reasons = panels.constituents(shown(prompt_text, name), settings[-1] or 1)
            yield of_sides(constituents=drawn, not_split=reasons)

        def show(prompt_text: str, name: str, *settings: Any) -> Iterator[Update]:
            at = shown(prompt_text, name)
            query = {"prompt": prompt_text.encode("utf-8", "replace"), "layer": at.layer, "head": at.head}
            first = of_sides(
                head=panels.head(at),
                sinks=panels.sinks(at),
                spectrum=panels.spectrum(at),
                propagation=panels.propagation(at),
            )
            for of_one in (maps, attention):
                first |= next(of_one(prompt_text, name, *settings))
            yield first | {address: f"?{urlencode(query)}", head: name}
            yield from constituents(prompt_text, name, *settings)
            yield of_sides(tags=panels.tags(at))

        def read(typed: str, name: str, *settings: Any) -> Iterator[Update]:
            windows = panels.windows(prompt_ids(subjects, typed))
            picked = next((each for each, offered in prompts.items() if offered == typed), None)
            updates = show(typed, name, *settings[:-1], 1)
            window_picker = gr.Dropdown(choices=windows, value=1, visible=len(windows) > 1)
            yield next(updates) | {text: typed, preset: picked, window: window_picker}
            yield from updates

        def load(request: gr.Request, typed: str, name: str, *settings: Any) -> Iterator[Update]:
            """Show what the page's address asks for, which anybody may have written: checked like what is typed."""
            asked, refused = dict(request.query_params), ""
            typed = asked.get("prompt") or typed
            yield {prompt: typed}
            try:
                name = _head_asked(subjects, asked) or name
            except TheodoliteError as error:
                refused = panel_html.refusal(error)
            for update in read(typed, name, *settings):
                yield update | {message: refused}

        def choose(event: gr.EventData, prompt_text: str, _: str, *settings: Any) -> Iterator[Update]:
            yield from show(prompt_text, str(event._data["head"]), *settings)

        def pick(name: str, *controls: Any) -> Iterator[Update]:
            yield {prompt: prompts[name]}
            yield from read(prompts[name], *controls)

        controls = [head, measure, log, hide, window]
        every_panel = [component for side in sides for component in side.values()]
        everything = [message, text, prompt, preset, address, *controls, *every_panel]

        def on(trigger: Callable[..., Any], work: Callable[..., Iterator[Update]], *inputs: Any) -> None:
            """Show what `work` gives, or why it was refused; the model is asked one thing at a time."""

            @functools.wraps(work)
            def answer(*values: Any) -> Iterator[Update]:
                try:
                    for update in work(*values):
                        yield {message: ""} | update
                except TheodoliteError as error:
                    yield {message: panel_html.refusal(error)}

            trigger(
                answer,
                [*inputs, *controls],
                everything,
                trigger_mode="always_last",  # of clicks that come while one is answered
                concurrency_id="model",
                concurrency_limit=1,
                api_visibility="private",
                show_progress="minimal",
                show_progress_on=[message],
            )

        on(page.load, load, prompt)
        on(run_button.click, read, prompt)
        on(prompt.submit, read, prompt)
        on(preset.input, pick, preset)
        on(head.input, show, text)
        on(clicks.select, choose, text)
        on(measure.input, maps, text)
        on(log.input, attention, text)
        on(hide.input, attention, text)
        on(window.input, constituents, text)
        address.change(None, address, None, js=_KEEP_ADDRESS)
        copy_link.click(None, None, None, js=_COPY_ADDRESS)
    return page


def _head_asked(subjects: Sequence[Subject], asked: Mapping[str, str]) -> str | None:
    """The head that an address names, as `L3H5`; None where it names none, `UsageError` where there is no such head."""
    if "layer" not in asked and "head" not in asked:
        return None
    layer, head = panels.parse_head(f"L{asked.get('layer', '')}H{asked.get('head', '')}")
    subjects[0].model.check_place(layer, head)
    return head_name(layer, head)


def _side(name: str) -> dict[str, Any]:
    """The panels of one model, under its name where there are two."""
    side: dict[str, Any] = {}

    def panel(title: str, text: str, **parts: str) -> None:
        """A panel with its heading; each part a plot, or HTML, and its class."""
        with gr.Column(min_width=400):
            gr.Markdown(f"### {title}\n{text}")
            for part, kind in parts.items():
                side[part] = (
                    gr.HTML(elem_classes=part)
                    if kind == "html"
                    else gr.Plot(show_label=False, elem_classes=kind)
                )

    with gr.Column(min_width=420):
        if name:
            gr.HTML(panel_html.heading(name))
        with gr.Row():
            click = "Rows are layers, columns heads. Click a head to show it."
            panel("Heads", click, map="head-map", head="html")
            marked = "Each row is a query token, each column a key; ▼ marks the head's sinks."
            panel("Attention", marked, attention="attention")
        with gr.Row():
            panel("Sinks", "The attention that each token receives.", sinks="html")
            panel("Tags", "What the head writes at each token.", tags="html")
        gr.Markdown(f"### Constituents of the logits\n{CONSTITUENTS}")
        side["not_split"] = gr.HTML()
        side["constituents"] = gr.Plot(show_label=False, elem_classes="constituents")
        with gr.Row():
            with_text = "Eigenvalues of the head's query-key matrix, with the text's covariance Σ̂."
            panel("Spectrum", with_text, spectrum="spectrum")
            both = "ρ predicted from the spectrum and measured on the text."
            panel("Signal propagation", both, propagation="propagation")
    return side
