"""From statistics and weights to columns and arrays; `column.py` says how one is declared, and how it is found.

No model and no corpus is known here.
"""
