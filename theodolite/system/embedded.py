"""The name and the folder of the model inside the package. Nothing here opens it."""

from pathlib import Path

NAME = "embedded"  # on the command line, in provenance and in messages, in the place of a path or hub name
FOLDER = Path(__file__).parent.parent / "assets" / NAME
