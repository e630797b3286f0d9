"""Passes of a model over a text, the survey that they make, and the run folder that it ends in."""
