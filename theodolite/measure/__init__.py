"""Compute columns and arrays from statistics and weights; `column.py` says how one is declared, and found.

No model and no corpus is known here.
"""
