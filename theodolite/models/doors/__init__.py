"""Taps on a model's attention: one door for each way in which models attend.

A door is a file with a context manager. While it is open for a model, each of the model's attention modules calls
`answers.answered(module, inputs)` in place of computing its attention, and goes on with the output that this returns,
(batch, queries, heads, value_width). `inputs` are `AttentionInputs`: queries, keys and values after rotation, the
scaling λ, and all else that decides the logits. Afterwards the model attends as before. `taps.add_door` says which
models go through it. Taps, interventions and heads of other ranks all stand behind `answered`, and opening a model
verifies that the output, recomputed from the inputs, is the model's own. `transformers.py` is the one to read first;
tests/models/doors/test_new_door.py adds another in fifteen lines.

| file | what it holds |
| --- | --- |
| `transformers.py` | the door of `transformers`: a registered attention function |
| `pytorch.py` | the door of every other module: PyTorch's attention functions, intercepted by a mode |
| `by_hand.py` | the rules by which that mode follows attention that is written out |
| `answers.py` | who answers: the tap that is open, and interventions |
| `taps.py` | opening a tap or an intervention on a model |
"""
