"""A context shared by several users, in whatever order they come and leave."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager


class Shared:
    """A context manager that many threads share: the first user opens what `make` gives, the last one closes it."""

    def __init__(self, make: Callable[[], AbstractContextManager[object]]) -> None:
        self._make = make
        self._lock = threading.RLock()
        self._users = 0
        self._undo = ExitStack()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Use the context: it is open until the last user has left."""
        with self._lock:
            if not self._users:
                self._undo.enter_context(self._make())
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._undo.close()
