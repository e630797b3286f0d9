"""Attention of one layer: its inputs, its output, and what it does, without a T×T matrix. No model is known here."""
