"""Checks that gradio is installed and switches its telemetry off, before it is imported.

Its run history is switched off too: prompts are private. What it writes goes to a folder that is removed. Nothing heavy
is imported.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

from theodolite.errors import UsageError

OFF = ("GRADIO_ANALYTICS_ENABLED", "GRADIO_RUN_HISTORY", "GRADIO_MCP_SERVER", "GRADIO_SSR_MODE")

NEVER = str(10**9)
"""Events after which gradio would sum up, for itself, how often each function was called."""


def disable_telemetry() -> None:
    """Switch off what gradio and the hub's library would send or keep.

    Raises:
        UsageError: gradio is not installed.
    """
    if importlib.util.find_spec("gradio") is None:
        raise UsageError("the page needs gradio: pip install 'theodolite[explore]'")
    os.environ |= dict.fromkeys(OFF, "False") | {"HF_HUB_DISABLE_TELEMETRY": "1"}
    os.environ["GRADIO_ANALYTICS_CACHE_FREQUENCY"] = NEVER


@contextmanager
def temporary_folder() -> Iterator[None]:
    """While open, gradio's temporary files go to a folder of this process, which is removed; it is not imported yet."""
    with TemporaryDirectory(prefix="theodolite-explore-") as folder:
        os.environ["GRADIO_TEMP_DIR"] = folder
        yield
