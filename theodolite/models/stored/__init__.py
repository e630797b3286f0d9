"""Weights on disk: loaded whole, a layer at a time or a block at a time, whatever their format."""
