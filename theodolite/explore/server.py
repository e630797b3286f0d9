"""Serve the page to this machine only, with nothing fetched from another: the browser is told to refuse it.

Only the page itself is answered: nothing from another origin, and of what gradio offers besides only what it needs.
gradio's own `launch` has no such limits, and binds its port after the models were read.
"""

from __future__ import annotations

import contextlib
import os
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
        origin, path = request.headers.get("origin"), request.url.path.rstrip("/")
        reads = request.method in ("GET", "HEAD")
        if origin not in (None, f"http://{request.headers.get('host')}"):
            response = fastapi.Response("only the page itself may ask", 403)
        elif path in NOT_SERVED or not (reads or path in POSTED):
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
        theme=gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"]),  # none is fetched
        root_path="",
    )


def listen(port: int | None) -> socket.socket:
    """Open a socket on this machine: at `port`, or the first free one from `FIRST_PORT` on; or raise `UsageError`."""
    if port is not None and not 0 <= port <= 65535:
        raise UsageError(f"{port} is not a port: use one from 1024 to 65535")
    reason = ""
    for number in range(FIRST_PORT, FIRST_PORT + PORTS) if port is None else [port]:
        try:
            return socket.create_server((HOST, number))
        except OSError as error:
            reason = os.strerror(error.errno or 0)
    if port is None:
        raise UsageError(
            f"no port from {FIRST_PORT} to {FIRST_PORT + PORTS - 1} is free: name one with --port"
        )
    raise UsageError(f"port {port} cannot be used ({reason}): leave out --port, or name another")


def serve(app: fastapi.FastAPI, listening: socket.socket, started: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C; `started` gets its address first, where requests already wait to be answered."""
    started(f"http://{HOST}:{listening.getsockname()[1]}")
    # Open event streams would hold the end up.
    config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1, lifespan="on")
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listening])
