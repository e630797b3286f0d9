"""Measured ratios, printed in one run each; no test depends on them."""
