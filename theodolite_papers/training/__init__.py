"""Trainers of the papers: what they share, and the trainer of the embedded model."""
