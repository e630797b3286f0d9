"""The gradio page: its components, which panels follow which click, and how it is served, to this machine only."""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from types import FrameType
from typing import Any
from urllib.parse import urlencode

import fastapi
import gradio as gr
import uvicorn
from starlette.middleware.trustedhost import TrustedHostMiddleware

from theodolite.errors import TheodoliteError, UsageError
from theodolite.explore import panels
from theodolite.explore.panels import MEASURE, Selection, html
from theodolite.explore.subject import Subject, offered_prompts, prompt_ids
from theodolite.report.content import subtitle, text_line
from theodolite.report.data import opening_head
from theodolite.report.outcome import CAPTIONS
from theodolite.system.wording import head_name, visible

OPENING, LABEL = "few-shot", "prompt (Shift+Enter or Run reads it)"
Draw = Callable[[Selection], list[Any]]
ON_PROMPT: tuple[tuple[Draw, ...], ...] = (
    (panels.head_map, panels.attention),
    (panels.next_tokens, panels.block_heads, panels.sinks, panels.tags),
)
WITH_TEXT: tuple[tuple[Draw, ...], ...] = ((panels.head,), (panels.constituents, panels.not_split))
"""Panels in the order in which they are shown: those that need no survey are there before it is made."""

PLOTS = ("head_map", "attention", "block_heads", "constituents")
PANELS: tuple[dict[str, tuple[str, ...]], ...] = (
    {"heads": ("head_map", "head"), "attention": ("attention",)},
    {"next": ("next_tokens",), "block": ("block_heads",)},
    {"sinks": ("sinks",), "tags": ("tags",)},
    {"constituents": ("not_split", "constituents")},
)
"""Rows of panels of one model: their captions in `figures.toml`, and their parts."""

# gradio's plots tell of no clicks. Each new figure is a new element.
_CLICKS = """
const maps = ":is(.head-map, .block-heads) .js-plotly-plot:not([data-heard])";
new MutationObserver(() => document.querySelectorAll(maps).forEach((plot) => {
  plot.dataset.heard = "";
  plot.on("plotly_click", ({ points: [{ data, x, y }] }) => trigger("select", { head: data.name || `L${y}H${x}` }));
})).observe(document.body, { childList: true, subtree: true });
"""

# Figures are drawn on light paper; a dark page turns them over. A narrow one scrolls what would be too small to read.
_STYLE = """
.dark .js-plotly-plot { filter: invert(1) hue-rotate(180deg); }
[role="group"] :is(b, sub) { color: inherit; }
@media (max-width: 48rem) {
  :is(th, td) { padding: .3rem .4rem !important; font-size: .85rem; }
  :is(.attention, .block-heads, .constituents) { overflow-x: auto !important; }
  :is(.attention, .block-heads) .js-plotly-plot { width: 34rem; }
  .constituents .js-plotly-plot { width: 70rem; }
}
"""

HOST = "127.0.0.1"
FIRST_PORT, PORTS = 7860, 100  # where a free port is looked for when none is named

POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; frame-ancestors 'none'; form-action 'self'"
)
"""gradio and Plotly make scripts and styles of their own on the page; nothing may come from another host."""

POSTED = ("/gradio_api/queue/join", "/gradio_api/cancel", "/gradio_api/reset")
"""Where the page posts to. What else gradio takes in (uploads of files, calls by name) has no use here."""

Update = dict[Any, Any]


def build(subjects: Sequence[Subject]) -> gr.Blocks:
    """Build the page of one model, or of two side by side."""
    prompts = offered_prompts(subjects)
    with gr.Blocks(title="theodolite explore", analytics_enabled=False, fill_width=True) as page:
        gr.HTML(_title(subjects))
        with gr.Row():
            prompt = gr.Textbox(
                prompts[OPENING], label=LABEL, lines=3, max_lines=8, scale=5, elem_id="prompt"
            )
            with gr.Column(scale=1, min_width=170):
                preset = gr.Dropdown(list(prompts), value=OPENING, label="or pick one", elem_id="preset")
                run_button = gr.Button("Run", variant="primary", elem_id="run")
        message, progress = gr.HTML(elem_id="message"), gr.HTML(elem_id="progress")
        with gr.Row():
            ids = prompt_ids(subjects, prompts[OPENING])
            start = head_name(*opening_head(subjects[0].measured(ids)))
            names = [head_name(*place) for place in subjects[0].model.places]
            head = gr.Dropdown(names, value=start, label="head", elem_id="head")
            measures = panels.measures_of(subjects)
            measure = gr.Dropdown(
                measures, value=MEASURE, label="head map of", elem_id="measure", min_width=240
            )
            log = gr.Checkbox(label="logarithmic attention", elem_id="log")
        with gr.Row():
            sides = [_side(subject.name if len(subjects) > 1 else "") for subject in subjects]
        clicks = gr.HTML(js_on_load=_CLICKS)
        address = gr.Textbox(visible="hidden")
        again = gr.Timer(1.0, active=False)  # asks how far the survey is
        text = gr.State()  # the prompt that is shown; another may have been typed since

        def selected(prompt_text: str | None, name: str, *settings: Any) -> Selection:
            if prompt_text is None:  # as after the server was started anew under an open page
                raise UsageError("no prompt has been run yet: run one first")
            return Selection(subjects, prompt_ids(subjects, prompt_text), *panels.parse_head(name), *settings)

        def drawn(at: Selection, *draws: Draw) -> Update:
            """Draw new content of these panels, of every model."""
            parts = [(draw.__name__, zip(sides, draw(at), strict=True)) for draw in draws]
            return {side[name]: value for name, values in parts for side, value in values}

        def only(draw: Draw, prompt_text: str, *values: Any) -> Iterator[Update]:
            """Draw this panel anew, as when a setting that it follows has changed."""
            at = selected(prompt_text, *values)
            yield drawn(at, draw) | {address: _address(prompt_text, at)}

        def show(prompt_text: str, name: str, *settings: Any) -> Iterator[Update]:
            at = selected(prompt_text, name, *settings)
            first, then = ON_PROMPT
            yield drawn(at, *first) | {address: _address(prompt_text, at), head: name}
            yield drawn(at, *then)
            if any(subject.is_pending for subject in subjects):
                for subject in subjects:
                    subject.begin()
                yield {again: gr.Timer(active=True)}
            else:
                yield from with_text(at)

        def with_text(at: Selection) -> Iterator[Update]:
            for draws in WITH_TEXT:
                yield drawn(at, *draws)

        def ask(prompt_text: str, name: str, *settings: Any) -> Iterator[Update]:
            """Say how far the survey is; when it is made, show what needs it."""
            if any(subject.is_pending for subject in subjects):
                progressed = "; ".join(subject.progress for subject in subjects if subject.progress)
                yield {progress: html("line", f"Reading a text, for the panels that need one. {progressed}")}
                return
            measures = gr.Dropdown(choices=panels.measures_of(subjects))
            yield {again: gr.Timer(active=False), progress: "", measure: measures}
            yield from with_text(selected(prompt_text, name, *settings))

        def read(typed: str, name: str, *settings: Any) -> Iterator[Update]:
            picked = next((each for each, offered in prompts.items() if offered == typed), None)
            updates = show(typed, name, *settings)
            yield next(updates) | {text: typed, preset: picked}
            yield from updates

        def load(request: gr.Request, typed: str, name: str, *settings: Any) -> Iterator[Update]:
            """Show what the page's address asks for, which anybody may have written: checked like what is typed."""
            asked, refused = dict(request.query_params), ""
            typed = asked.get("prompt") or typed
            yield {prompt: typed}
            try:
                if {"layer", "head"} & set(asked):
                    place = panels.parse_head(f"L{asked.get('layer', '')}H{asked.get('head', '')}")
                    subjects[0].model.check_place(*place)
                    name = head_name(*place)
            except TheodoliteError as error:
                refused = html("refusal", visible(error))
            offered = panels.measures_of(subjects)
            chosen = asked["map"] if asked.get("map") in {value for _, value in offered} else settings[0]
            yield {head: name, measure: gr.Dropdown(choices=offered, value=chosen), log: "log" in asked}
            for update in read(typed, name, chosen, "log" in asked):
                yield update | ({message: refused} if refused else {})

        def choose(event: gr.EventData, prompt_text: str, _: str, *settings: Any) -> Iterator[Update]:
            yield from show(prompt_text, str(event._data["head"]), *settings)

        def pick(name: str, *settings: Any) -> Iterator[Update]:
            yield {prompt: prompts[name]}
            yield from read(prompts[name], *settings)

        settings = [head, measure, log]
        components = [component for side in sides for component in side.values()]
        everything = [message, progress, text, prompt, preset, address, again, *settings, *components]

        def on(trigger: Callable[..., Any], work: Callable[..., Iterator[Update]], *inputs: Any) -> None:
            """Show what `work` gives, or why it was refused; the model is asked one thing at a time."""

            @functools.wraps(work)
            def answer(*values: Any) -> Iterator[Update]:
                try:
                    for update in work(*values):
                        yield {message: ""} | update
                except TheodoliteError as error:
                    yield {message: html("refusal", visible(error))}

            trigger(
                answer,
                [*inputs, *settings],
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
        on(measure.input, functools.partial(only, panels.head_map), text)
        on(log.input, functools.partial(only, panels.attention), text)
        on(again.tick, ask, text)
        keep = "(query) => { if (query) history.replaceState(history.state, '', query); }"
        address.change(None, address, None, js=keep)
    return page


def _address(prompt_text: str, at: Selection) -> str:
    query = {"prompt": prompt_text.encode("utf-8", "replace"), "layer": at.layer, "head": at.head}
    query |= {"map": at.measure} if at.measure != MEASURE else {}
    query |= {"log": 1} if at.log else {}
    return f"?{urlencode(query)}"


def _title(subjects: Sequence[Subject]) -> str:
    names = [visible(subject.name, 80) for subject in subjects]
    read = [
        f"{subtitle(each.provenance)}; panels of a text are measured {text_line(each.provenance)}"
        for each in subjects
    ]
    lines = [f"{name}: {what}" for name, what in zip(names, read, strict=True)]
    shared = "Both models share all scales: a colour or shade means the same on either side."
    return html("title", names, [*lines, shared] if len(lines) > 1 else lines)


def _side(name: str) -> dict[str, Any]:
    """Build the panels of one model, under its name where there are two."""
    side: dict[str, Any] = {}
    with gr.Column(min_width=420):
        if name:
            gr.HTML(html("heading", visible(name, 80)))
        for row in PANELS:
            with gr.Row():
                for key, parts in row.items():
                    with gr.Column(min_width=400):
                        gr.Markdown("### {title}\n{shows}".format(**CAPTIONS["explore"][key]))
                        for part in parts:
                            shown: Any = gr.Plot if part in PLOTS else gr.HTML
                            side[part] = shown(show_label=False, elem_classes=part.replace("_", "-"))
    return side


def application(subjects: Sequence[Subject]) -> fastapi.FastAPI:
    """Make the page as a web application."""
    app = fastapi.FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    # A page elsewhere must not reach this one under a name of its own.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])

    @app.middleware("http")
    async def only_the_page(
        request: fastapi.Request, call_next: Callable[[fastapi.Request], Awaitable[fastapi.Response]]
    ) -> fastapi.Response:
        origin, path = request.headers.get("origin"), request.url.path.rstrip("/")
        reads = request.method in ("GET", "HEAD")
        if origin not in (None, f"http://{request.headers.get('host')}"):
            response = fastapi.Response("only the page itself may ask", 403)
        elif not (reads or path in POSTED):
            response = fastapi.Response("this is not served", 404)
        else:
            response = await call_next(request)
        response.headers["Content-Security-Policy"] = POLICY
        response.headers["Referrer-Policy"] = "no-referrer"
        return response

    return gr.mount_gradio_app(
        app,
        build(subjects),
        path="/",
        server_name=HOST,
        show_error=False,
        enable_monitoring=False,
        footer_links=[],
        run_history=False,  # prompts are private
        css=_STYLE,
        theme=gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"]),  # none is fetched
        root_path="",
    )


def listen(port: int | None) -> socket.socket:
    """Open a socket on this machine: at `port`, or the first free one from `FIRST_PORT` on; or raise `UsageError`."""
    for number in range(FIRST_PORT, FIRST_PORT + PORTS) if port is None else [port]:
        with contextlib.suppress(OSError, OverflowError):  # taken, kept for others, or no port
            return socket.create_server((HOST, number))
    raise UsageError(f"port {FIRST_PORT if port is None else port} cannot be used: name another with --port")


class _Server(uvicorn.Server):
    """A server that first tells those who work for it that it ends: it waits for them."""

    ended: threading.Event

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.ended.set()
        super().handle_exit(sig, frame)


def serve(
    app: fastapi.FastAPI, listening: socket.socket, started: Callable[[str], None], ended: threading.Event
) -> None:
    """Serve the page until Ctrl-C, which sets `ended`; `started` gets its address, where requests already wait."""
    started(f"http://{HOST}:{listening.getsockname()[1]}")
    # Open event streams would hold the end up.
    config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1, lifespan="on")
    server = _Server(config)
    server.ended = ended
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listening])
