"""QK-Clip (Kimi Team 2025, "Kimi K2", section 2.1): after an optimizer step, scale down heads with too large logits."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import TrainerState

from theodolite.errors import UsageError
from theodolite.models.calls import capture_calls
from theodolite.models.open import evaluation_mode, on_a_few_tokens, training_source
from theodolite.models.opened import OpenModel
from theodolite.models.structure_search import find_structure
from theodolite.models.training.shards import is_of_deepspeed, parallel_group
from theodolite.models.weights.weight_map import POSITIONS, find_logit_rows
from theodolite.train.callbacks import FOLDER, GeometryCallback
from theodolite.train.geometry import Geometry
from theodolite.train.locater import check_held, named

_CLIPPED = "QK-Clip scales weights that are whole, or spread by FSDP2 or tensor parallelism"


class QKClip:
    """Bounds the logits of every head by scaling its query and key weights: `clip(largest)` after `optimizer.step()`.

    A head whose largest logit S exceeds the threshold τ has γ = τ/S. Where its keys are its own, its rows of W_q and
    W_k are scaled by √γ each, and its biases with them; where a key is shared (grouped keys, the rotary key of
    multi-head latent attention), the query that meets it is scaled by γ, and the key is left as it is. So each of the
    head's logits becomes γ times as large, and no other head changes by a bit.

    Args:
        model: a `transformers` model of any family that a survey reads, as it is or inside DDP, DataParallel or
            `torch.compile`; any other module as `open_module` gives it. Sharded weights (FSDP2's `fully_shard`, tensor
            parallel) are scaled where they are; make the QKClip before a model is tensor parallel.
        threshold: τ, above 0; 100 in the paper.

    Raises:
        UsageError: no model of `transformers`; tensor parallel, quantised, or with adapters; a layer whose queries are
            normalised after their projection, whose logits are capped or have a bias; τ is not a positive number.
    """

    def __init__(self, model: nn.Module | OpenModel, threshold: float = 100.0) -> None:
        if not isinstance(threshold, int | float) or not 0 < threshold < math.inf:
            raise UsageError(f"threshold is {threshold!r}: give a number above 0")
        self.threshold = float(threshold)
        source = training_source(model)
        self._model = source.root
        if parallel_group(self._model) is not None:
            raise UsageError("each rank has some heads: make the QKClip before the model is tensor parallel")
        if any(map(is_of_deepspeed, self._model.parameters())):
            raise UsageError(f"DeepSpeed holds weights of {source.name} in tensors of its own: {_CLIPPED}")
        with evaluation_mode(self._model), on_a_few_tokens(source):
            structure = find_structure(source)
            calls = capture_calls(self._model, structure, source.small_pass(POSITIONS))
            # Layers that share their weights (ALBERT) are clipped together.
            self._layers_of: dict[int, list[int]] = {}
            first = {structure.attention_at(layer): layer for layer in reversed(structure.attending)}
            for layer in structure.attending:
                self._layers_of.setdefault(first[structure.attention_at(layer)], []).append(layer)
            self._rows = find_logit_rows(self._model, structure, calls, list(self._layers_of))
        self._heads_of = structure.heads_of
        self._held = named(self._model, [row for rows in self._rows.values() for row in rows])
        self._seen: Geometry | None = None

    def __call__(self, largest: Geometry | Float[Tensor, "layers heads"] | None) -> pd.DataFrame:
        """Clip the heads whose largest logit exceeds the threshold; returns layer, head, largest_logit, gamma of each.

        Args:
            largest: each head's largest logit (scaled, of the keys that its queries see), the same on all processes, or
                `monitor.last`, a look that tells it: it clips once, one from a record of before not at all.

        Raises:
            UsageError: another shape, a logit that is NaN or infinite, or a module that holds the weights was replaced.
        """
        clipped: list[tuple[int, int, float, float]] = []
        look = largest if isinstance(largest, Geometry) else None
        # A look that took no time is from a record, and clipped before that.
        if largest is not None and not (look and (look is self._seen or look.seconds == 0)):
            logits = self._checked(largest)
            check_held(self._model, self._held, "parameter", "QKClip")
            for name, rows in self._held.items():
                if is_of_deepspeed(getattr(rows.module, rows.name)):
                    raise UsageError(f"{name}'s copy in DeepSpeed's optimizer would undo it: {_CLIPPED}")
            for layer, rows in self._rows.items():
                layers, heads = self._layers_of[layer], self._heads_of[layer]
                most = logits[layers, :heads].amax(dim=0)
                gamma = (self.threshold / most).where(most > self.threshold, 1.0)
                over = (gamma < 1).nonzero().flatten().tolist()
                for row in rows if over else ():
                    row.scale(gamma)
                clipped += [(at, h, float(logits[at, h]), float(gamma[h])) for at in layers for h in over]
            self._seen = look or self._seen
        return pd.DataFrame(clipped, columns=["layer", "head", "largest_logit", "gamma"])

    def _checked(self, largest: Geometry | Tensor) -> Tensor:
        """Return largest logits as (layers, heads) in float64 on the CPU."""
        shape = (len(self._heads_of), max(self._heads_of))
        if isinstance(largest, Geometry):
            by_layer = largest.heads.pivot(index="layer", columns="head", values="largest_logit")
            logits = torch.tensor(by_layer.reindex(range(shape[0])).to_numpy(), dtype=torch.float64)
        else:
            logits = torch.as_tensor(largest).detach().double().cpu()
        if logits.shape != shape:
            raise UsageError(f"largest logits of shape {tuple(logits.shape)}: give {shape}, (layers, heads)")
        for layer, heads in enumerate(self._heads_of):
            if not logits[layer, :heads].isfinite().all():
                raise UsageError(
                    f"largest logits of block {layer} are NaN or infinite: go back to a checkpoint"
                )
        return logits


class QKClipCallback(GeometryCallback):
    """The monitor in the Trainer, which clips by each of its looks: `QKClipCallback(100.0, every=10).attach(trainer)`.

    The number of clipped heads is logged as `geometry/clipped`. Options are those of `GeometryCallback`; errors are
    those of `QKClip`, when training begins.
    """

    def __init__(self, threshold: float = 100.0, **options: Any) -> None:
        super().__init__(**options)
        self.threshold = threshold
        self.clip: QKClip | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Find model, monitor batch and weights."""
        super().on_train_begin(args, state, control, **kwargs)
        self.clip = QKClip(kwargs["model"], self.threshold)

    def _look(self, args: Any, state: TrainerState, control: Any) -> None:
        super()._look(args, state, control)
        assert self.monitor is not None
        assert self.clip is not None
        clipped = self.clip(self.monitor.last)
        if len(clipped) and state.is_world_process_zero:
            self._log(args, state, control, state.global_step, {f"{FOLDER}/clipped": float(len(clipped))})
