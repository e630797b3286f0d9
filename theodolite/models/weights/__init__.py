"""The weights of a model, head by head: read as views, written, replaced, and split by norm."""
