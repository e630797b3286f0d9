"""Checks that gradio is installed and switches its telemetry off, before it is imported.

Its run history is switched off too: prompts are private. Nothing heavy is imported.
"""

from __future__ import annotations

import importlib.util
import os

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
