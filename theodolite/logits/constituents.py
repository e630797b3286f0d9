"""The logits of a prompt, split into constituents."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from theodolite.corpus.cutting import contexts_of_one_length, whole_ids
from theodolite.errors import UsageError
from theodolite.measure.constituents import Constituents
from theodolite.models import OpenModel
from theodolite.models.guard import measures
from theodolite.models.query_key_parts import LayerPass, split_queries_and_keys, visit_layers
from theodolite.system.choices import check_whole
from theodolite.theory.decomposition import PARTS, Decomposition, decompose_apart, decompose_around


@runtime_checkable
class Surveyed(Protocol):
    """The part of a `Run` that hidden states are decomposed with: its arrays and its provenance."""

    @property
    def arrays(self) -> dict[str, Tensor]:
        """Name → tensor: `mean` and `positional_basis`."""

    @property
    def provenance(self) -> dict[str, Any]:
        """The provenance, which says of which model it is."""


@measures("model")
def constituents(
    model: OpenModel,
    ids: Int[Tensor, " positions"] | Int[Tensor, "contexts positions"],
    layer: int,
    *,
    decomposition: Surveyed | Decomposition | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> Constituents:
    """Split the pre-softmax logits of one layer on a prompt into {mean, pos, ctx, resid, bias} × the same.

    The hidden states h that enter the block are decomposed as h = mean + pos + ctx + resid (Song & Zhong 2024). Both
    sides go through the norm with its scale frozen at each token, through the projection, through a norm after it
    frozen likewise, and through the rotation, so the constituents add up to the model's own logits (the published code
    sends each part through the norm by itself, so its parts do not). The part "bias" is what there is without any
    hidden state.

    The model runs with the attention implementation that it has. In `transformers`, `eager` takes its softmax in
    float32 in most families even where the model is in float64: later layers' logits then agree to 1e-7 only.

    Args:
        model: from `open_model`.
        ids: token ids of one context (T) or of several (C, T), as the model reads them (special tokens too).
        layer: the block, counted from 0.
        decomposition: where mean and pos come from. A `Run` of this model with contexts at least as long (as long,
            where rotary positions turn by the length of a pass): its μ and positional basis; ctx is then the mean of
            what is left over positions 1 … T−1. A `Decomposition` of such hidden states likewise. None: the hidden
            states of these contexts themselves, at least 2, with position 0 apart as in a survey.
        attention_mask, position_ids: of padded or packed ids, as `Corpus.from_ids` takes them; their contexts must have
            one length.

    Raises:
        UsageError: ids, layer or decomposition do not fit the model or each other.
        WorkError: the layer's queries and keys are no affine function of its input even with frozen norms.
    """
    check_whole(layer=layer)
    model.check_place(layer)
    if model.vocabulary is None:
        raise UsageError(f"{model.id} reads {model.source.reads}, not token ids")
    contexts = contexts_of_one_length(whole_ids(ids), attention_mask, position_ids).long()
    if not model.has_positions(contexts.shape[1]):
        raise UsageError(
            f"{contexts.shape[1]} tokens are more than the {model.longest} that {model.id} reads"
        )
    model.check_tokens(contexts)
    model.check_weights()
    mean_and_pos = None if decomposition is None else _mean_and_pos(model, decomposition, contexts, layer)
    if mean_and_pos is None and len(contexts) < 2:
        raise UsageError(
            "one context cannot be decomposed by itself: give several, or a survey of this model as decomposition"
        )
    results: list[Constituents] = []

    def visit(layer_pass: LayerPass) -> None:
        h = layer_pass.stream
        parts = decompose_apart(h) if mean_and_pos is None else decompose_around(h, *mean_and_pos)
        split = split_queries_and_keys(layer_pass, parts, torch.float64)
        key = split.key.repeat_interleave(split.query.shape[2] // split.key.shape[2], dim=2)
        results.append(Constituents(PARTS, split.query, key, split.inputs, split.rounding))

    visit_layers(model, contexts, [layer], visit)
    return results[0]


def _mean_and_pos(
    model: OpenModel, decomposition: Surveyed | Decomposition, contexts: Tensor, layer: int
) -> tuple[Tensor, Tensor]:
    """Return μ and pos of the stream that enters a block."""
    if isinstance(decomposition, Surveyed):
        check_run(model, decomposition)
        mean, pos = decomposition.arrays["mean"][layer], whole_positional_basis(decomposition)[layer]
    elif not isinstance(decomposition, Decomposition):
        raise UsageError(
            f"decomposition is a {type(decomposition).__name__}: give a Run of this model or what `decompose` gives"
        )
    else:
        mean, pos = decomposition.mean, decomposition.pos
    if pos.shape[-1] != model.width:
        raise UsageError(f"the decomposition is of width {pos.shape[-1]}, {model.id} of {model.width}")
    if len(pos) < contexts.shape[1]:
        raise UsageError(
            f"the decomposition has {len(pos)} positions and the prompt {contexts.shape[1]}: give a shorter "
            "prompt or a survey of longer contexts"
        )
    return mean, pos


def whole_positional_basis(run: Surveyed) -> Float[Tensor, "layers positions width"]:
    """Return the positional basis at every position of the run's contexts, special tokens at the end included."""
    basis = run.arrays["positional_basis"]
    if "positional_basis_last" not in run.arrays:
        return basis
    return torch.cat([basis, run.arrays["positional_basis_last"]], dim=1)


def check_run(model: OpenModel, run: Surveyed) -> None:
    """Refuse a run of another model, or one without a positional basis: `UsageError`."""
    theirs = run.provenance["model"]
    same = theirs["width"] == model.width and theirs["layers"] == model.layers
    # What was opened is asked first: to know whether that was changed in memory, all of it is read.
    known = theirs["sha256"] and model.sha256 and theirs["sha256"] != model.sha256
    if not same or (known and theirs["sha256"] != model.weights().sha256):
        raise UsageError(f"the run is of another model ({theirs['id']}): give a survey of {model.id}")
    if "positional_basis" not in run.arrays:
        raise UsageError("the run has spectra only and no positional basis: give one of `theodolite survey`")
