"""What a committed result says of itself."""

from __future__ import annotations

import datetime
from typing import Any

from theodolite.passes.provenance import versions


def made_by(command: str) -> dict[str, Any]:
    """The command, the day and the versions."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"command": command, "date": today, "versions": versions()}
