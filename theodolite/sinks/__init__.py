"""Attention sinks and outliers: traced, on one prompt, written down as exclusions, and ablated."""
