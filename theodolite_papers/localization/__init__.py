"""Bao et al. 2024, Self-attention networks localize when QK-eigenspectrum concentrates."""
