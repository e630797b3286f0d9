"""How a model is tapped: one door for each way in which models attend.

A door is a file with a context manager. While it is open for a model, each of the model's attention modules calls
`answers.answered(module, inputs)` in place of computing its attention, and goes on with the output that this returns,
(batch, queries, heads, value_width). `inputs` are `AttentionInputs`: queries, keys and values after rotation, the
scaling λ, and all else that decides the logits. Afterwards the model attends as before. `taps._through_its_door` says
which door a model takes; whatever taps, intervenes or gathers heads of other ranks stands behind `answered`, and
opening verifies that the recomputed output is the model's. `transformers.py` is the shorter one to begin with.

| file | what it holds |
| --- | --- |
| `transformers.py` | the door of `transformers`: a registered attention function |
| `pytorch.py` | the door of every other module: PyTorch's attention functions, heard by a mode |
| `by_hand.py` | the rules by which that mode follows attention that is written out |
| `answers.py` | who answers: the tap that is open, and interventions |
| `taps.py` | opening a tap or an intervention on a model |
"""
