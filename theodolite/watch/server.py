"""Serves the page of a training run on this machine only: the page, and Plotly's script. It asks for nothing else."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from plotly.offline import get_plotlyjs

from theodolite.report.page import PLOTLY
from theodolite.system.listening import HOST
from theodolite.watch.page import render
from theodolite.watch.record import TrainingRecord

HEADERS = {
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
SILENT, PATIENCE = "Theodolite-Silent", "Theodolite-Patience"
"""Headers of seconds: since the record was last written, and after which the run seems to have stopped."""


class WatchedRun:
    """A training run's page, rendered anew only when its record has changed.

    Args:
        record: of the run.
        every: seconds after which the page asks again.
    """

    def __init__(self, record: TrainingRecord, every: float) -> None:
        self.record = record
        self._every = every
        self._lock = threading.Lock()
        self._page: bytes = b""
        self._version = 0
        self._started = time.time_ns()

    def page(self) -> tuple[bytes, str]:
        """The page as it is now, and a tag that changes with it."""
        with self._lock:
            if self.record.refresh() or not self._page:
                self._page = render(self.record, self._every).encode("utf-8", "replace")
                self._version += 1
            return self._page, f'"{self._started}-{self._version}"'

    def pace(self) -> dict[str, str]:
        """The headers of how long the run has been silent; none before its first word."""
        if not self.record.heard:
            return {}
        silent = max(0.0, time.time() - self.record.heard)
        return {SILENT: f"{silent:.1f}", PATIENCE: f"{self.record.patience:.1f}"}


def serve(run: WatchedRun, listening: socket.socket, started: Callable[[str], None]) -> None:
    """Answer until Ctrl-C; `started` is told the address."""
    port = listening.getsockname()[1]
    script = get_plotlyjs().encode()
    # A page elsewhere must not reach this one under a name of its own.
    names = [f"{host}:{port}" for host in (HOST, "localhost")]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with suppress(ConnectionError):  # the reader has gone
                if self.headers.get("Host") not in names:
                    self._answer(403, b"only this machine may ask", "text/plain")
                elif self.path == f"/{PLOTLY}":
                    self._answer(200, script, "text/javascript")
                elif self.path == "/":
                    page, tag = run.page()
                    same = self.headers.get("If-None-Match") == tag
                    self._answer(304 if same else 200, page, "text/html", {"ETag": tag} | run.pace())
                else:
                    self._answer(404, b"this is not served", "text/plain")

        do_HEAD = do_GET

        def _answer(self, status: int, body: bytes, kind: str, more: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in itertools.chain(HEADERS.items(), (more or {}).items()):
                self.send_header(name, value)
            if status != 304:
                self.send_header("Content-Type", f"{kind}; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if status != 304 and self.command == "GET":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing of each request."""

    server = ThreadingHTTPServer((HOST, port), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listening
    with suppress(KeyboardInterrupt):
        started(f"http://{HOST}:{port}")
        server.serve_forever()
    server.server_close()
