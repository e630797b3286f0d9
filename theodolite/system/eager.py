"""Nothing runs compiled while it is measured: what PyTorch compiles runs as it is written meanwhile."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

COMPILERS = {"torch._dynamo", "torch.nn.attention.flex_attention"}
"""Where neither is imported nothing is compiled, and the import takes seconds; flex_attention compiles itself."""

_lock = threading.Lock()
_undo = ExitStack()
_users = 0


@contextmanager
def eagerly() -> Iterator[None]:
    """While open, nothing runs compiled, in any thread; the last one left puts back what was, whatever their order."""
    global _users
    if not COMPILERS & sys.modules.keys():
        yield
        return
    with _lock:
        _users += 1
        if _users == 1:
            _undo.enter_context(torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _undo.close()
