"""A socket on this machine's own address, for the pages that a command serves. What is served is not known here."""

from __future__ import annotations

import socket

from theodolite.errors import UsageError

HOST = "127.0.0.1"
FIRST_PORT, PORTS = 7860, 100
"""Where a free port is looked for when none is named."""


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
