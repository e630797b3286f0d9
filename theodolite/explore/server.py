"""Serves the page on this machine only, with nothing fetched from anywhere else: the browser is told to refuse it.

Only the page itself is answered: nothing from another origin, and of what gradio offers besides only what it needs.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Awaitable, Callable, Sequence

import fastapi
import gradio as gr
import uvicorn
from starlette.middleware.trustedhost import TrustedHostMiddleware

from theodolite.errors import UsageError
from theodolite.explore.page import build
from theodolite.explore.subject import Subject

HOST = "127.0.0.1"
FIRST_PORT, PORTS = 7860, 100
"""Where a free port is looked for when none is named."""

POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; frame-ancestors 'none'; form-action 'self'"
)
"""gradio and Plotly make scripts and styles of their own on the page; nothing may come from another host."""

POSTED = ("/gradio_api/queue/join", "/gradio_api/cancel", "/gradio_api/reset")
"""Where the page posts to. What else gradio takes in (uploads of files, calls by name) has no use here."""

NOT_SERVED = frozenset(
    ["/docs", "/redoc", "/openapi.json", "/gradio_api/openapi.json", "/gradio_api/deep_link"]
)
"""Descriptions for programs, and copies of a session that gradio would keep on disk."""


def application(subjects: Sequence[Subject]) -> fastapi.FastAPI:
    """The page as a web application."""
    app = fastapi.FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    # A page elsewhere must not reach this one under a name of its own.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])

    @app.middleware("http")
    async def only_the_page(
        request: fastapi.Request, call_next: Callable[[fastapi.Request], Awaitable[fastapi.Response]]
    ) -> fastapi.Response:
        refusal = _refusal(request)
        response = refusal or await call_next(request)
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
        theme=gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"]),  # none is fetched
        root_path="",
    )


def listen(port: int | None) -> socket.socket:
    """A socket on this machine's own address, at `port` or the first free one from `FIRST_PORT` on; or `UsageError`."""
    if port is not None and not 0 <= port <= 65535:
        raise UsageError(f"{port} is not a port: use one from 1024 to 65535")
    ports = range(FIRST_PORT, FIRST_PORT + PORTS) if port is None else [port]
    for number in ports:
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((HOST, number))
            listening.listen()
            return listening
        except OSError as error:
            listening.close()
            reason = error.strerror
    if port is None:
        raise UsageError(
            f"no port from {FIRST_PORT} to {FIRST_PORT + PORTS - 1} is free: name one with --port"
        )
    raise UsageError(f"port {port} cannot be used ({reason}): leave out --port, or name another")


def serve(app: fastapi.FastAPI, listening: socket.socket, started: Callable[[str], None]) -> None:
    """Answer until Ctrl-C; `started` is told the address once the page can be opened."""
    address = f"http://{HOST}:{listening.getsockname()[1]}"

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            started(address)

    # Open event streams would hold the end up.
    config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1, lifespan="on")
    with contextlib.suppress(KeyboardInterrupt):
        Server(config).run(sockets=[listening])


def _refusal(request: fastapi.Request) -> fastapi.Response | None:
    """The answer to what the page does not ask for; None where the request is its own, or a program's like it."""
    origin, path = request.headers.get("origin"), request.url.path.rstrip("/")
    if origin not in (None, f"http://{request.headers.get('host')}"):
        return fastapi.Response("only the page itself may ask", 403)
    reads = request.method in ("GET", "HEAD")
    if path in NOT_SERVED or not (reads or path in POSTED):
        return fastapi.Response("this is not served", 404)
    return None
