"""How the model inside the package is called. Nothing here opens it."""

from pathlib import Path

FOLDER = Path(__file__).parent.parent / "assets" / "topics"

ID = "theodolite/topics"
"""In provenance and messages, in the place of a path or hub name."""

ARGUMENT = "embedded"
"""On the command line, where several models are named."""
