"""Taps on a model's attention: one door for each way in which models attend.

A door is a context manager. While it is open for a model, each of the model's attention modules calls `answered(module,
inputs)` in place of computing its attention, and goes on with the output that this returns. `transformers.py` is the
door to read first; `taps.add_door` adds another, which tests/models/doors/test_new_door.py does in fifteen lines.
"""
