"""theodolite surveys the geometry of attention in any Hugging Face transformer."""

__version__ = "0.1.0"
