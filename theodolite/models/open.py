"""Open a checkpoint, check it, and know where its heads are. The way in to every measurement.

Weights come from safetensors only, and no code of a checkpoint is ever run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from theodolite.attention.inputs import AttentionInputs
from theodolite.errors import TheodoliteError, UsageError
from theodolite.models.batches import Inputs, as_read
from theodolite.models.guard import between_passes, measures, once_a_pass
from theodolite.models.head_weights import Call, Calls, HeadWeights, capture_calls, read_head_weights
from theodolite.models.loading import (
    LOADING_ERRORS,
    commit_of,
    config_of,
    device_of,
    first_line,
    hash_checkpoint,
    load,
    load_tokenizer,
    refuse_nonfinite_weights,
    usable_device,
    without_progress_bars,
)
from theodolite.models.model_inputs import embedded_tokens, longest_of, positions_of, small_input
from theodolite.models.output_weights import read_output_weights, state_of
from theodolite.models.quantised import refuse_quantised_modules
from theodolite.models.structure import NoAttention, Structure, backbone, find_structure, first_tensor
from theodolite.models.towers import Tower, tower_of
from theodolite.models.verification import VERIFIED_LENGTH, attention_kind, verify_attention
from theodolite.models.weights_checksum import Weights, weights_checksum, weights_sha256
from theodolite.system import embedded
from theodolite.system.checkpoint_folders import local_folder
from theodolite.system.choices import check_dtype


@dataclass(frozen=True, repr=False)
class OpenModel:
    """A checkpoint that has been opened and verified.

    Attributes:
        hf: the model as `transformers` has it, in evaluation mode; its attention implementation is its own
            except while it is surveyed, its head weights are read or an intervention is under way.
        tokenizer: its tokenizer, or None where the checkpoint has none.
        width: width of the residual stream d.
        causal: whether a query is kept from later keys.
        id: the path or hub name it was opened by; `revision` its hub commit, if any; `sha256` the hash of its
            config and weights on disk, if they were local. `weights` says whether it still has these weights.
    """

    hf: PreTrainedModel
    structure: Structure
    width: int
    causal: bool
    positions: str
    id: str
    _calls: Calls = field(repr=False)
    tokenizer: PreTrainedTokenizerBase | None = None
    revision: str | None = None
    sha256: str | None = None
    _output_weights: dict[int, tuple[Any, Tensor]] = field(default_factory=dict, repr=False, compare=False)
    _load_layer: Callable[[int], AbstractContextManager[None]] = field(
        default=lambda layer: nullcontext(), repr=False, compare=False
    )
    _interventions: list[str] = field(default_factory=list, repr=False, compare=False)
    _checksum: int | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        structure: Structure,
        calls: Calls,
        inputs: Sequence[AttentionInputs],
        **rest: Any,
    ) -> OpenModel:
        """From what `find_structure`, `capture_calls` and `verify_attention` gave; `rest` are other attributes."""
        causal, bias = attention_kind(inputs)
        named = rest.get("sha256") or rest.get("revision")
        first = calls[structure.attending[0]]
        return cls(
            hf=model,
            structure=structure,
            width=first_tensor(*first).shape[-1],
            causal=causal,
            positions=positions_of(model, first, bias),
            _calls=calls,
            _checksum=weights_checksum(model) if named else None,
            **rest,
        )

    def __repr__(self) -> str:
        """In a line, without the module tree that `hf` has."""
        edits = f", {'; '.join(self._interventions)}" if self._interventions else ""
        return (
            f"OpenModel({self.id}: {self.hf.config.model_type}, {self.layers} layers × {self.heads} heads × width "
            f"{self.width}, {str(self.hf.dtype).removeprefix('torch.')} on {self.device}{edits})"
        )

    @property
    def layers(self) -> int:
        """Number of blocks L."""
        return len(self.structure.attention)

    @property
    def heads(self) -> int:
        """Query heads a layer H; where layers differ (`heads_of`), of the one that has most."""
        return self.structure.heads

    @property
    def heads_of(self) -> tuple[int, ...]:
        """Query heads of each layer; 0 where its block does not attend (a convolution, a state space)."""
        return self.structure.heads_of

    @property
    def attending(self) -> tuple[int, ...]:
        """The layers that attend."""
        return self.structure.attending

    @property
    def places(self) -> list[tuple[int, int]]:
        """Every head there is, (layer, head), in order."""
        return [(layer, head) for layer, heads in enumerate(self.heads_of) for head in range(heads)]

    @property
    def head_width(self) -> int:
        """Width of a query d_h; where layers differ, of the widest."""
        return self.structure.head_width

    @property
    def value_width(self) -> int:
        """Width of a value; where layers differ, of the widest."""
        return self.structure.value_width

    @property
    def interventions(self) -> tuple[str, ...]:
        """Interventions that are open now, and what was done for good: it is not what the checkpoint on disk does."""
        return tuple(self._interventions)

    @contextmanager
    def intervention(self, name: str, *edits: AbstractContextManager[object]) -> Iterator[None]:
        """While open, so are the edits, and `name` is among `interventions`; they begin and end between passes."""
        with ExitStack() as undo:
            with between_passes(self.hf):
                for edit in edits:
                    undo.enter_context(edit)
                self._interventions.append(name)
            try:
                yield
            finally:
                with between_passes(self.hf):
                    self._interventions.remove(name)
                    undo.close()

    def record_intervention(self, name: str) -> None:
        """From now on `name` is among `interventions`: its weights were changed for good."""
        self._interventions.append(name)

    def weights(self) -> Weights:
        """What its weights are now, in memory: known once a pass, and read in whole for that."""
        return once_a_pass(self.hf, "weights", self._weights_now)

    def _weights_now(self) -> Weights:
        if self._checksum is None or weights_checksum(self.hf) == self._checksum:
            return Weights(self.sha256, self.revision)
        return Weights(weights_sha256(self.hf), None, changed=True)

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        return device_of(self.hf)

    @measures
    def forward(self, inputs: Inputs) -> Float[Tensor, "contexts positions width"]:
        """The last hidden states of a pass over token ids or pixels, without gradients, a cache or the output head."""
        with torch.inference_mode():
            return backbone(self.hf)(**as_read(self.hf, inputs))[0]

    @measures
    def logits(
        self, ids: Int[Tensor, "contexts positions"]
    ) -> Float[Tensor, "contexts positions vocabulary"]:
        """The next-token logits of a pass without gradients or a cache; the model must have an output head."""
        with torch.inference_mode():
            return self.hf(input_ids=ids.to(self.device), use_cache=False).logits

    def required_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer.

        Raises:
            UsageError: the checkpoint has none.
        """
        if self.tokenizer is None:
            raise UsageError(f"{self.id} has no tokenizer beside its weights: save one there")
        return self.tokenizer

    def required_vocabulary(self) -> Any:
        """What random tokens are drawn from: the tokenizer, or the number of token ids.

        Raises:
            UsageError: the model reads no tokens.
        """
        vocabulary = self.tokenizer or self.vocabulary
        if vocabulary is None:
            raise UsageError(f"{self.id} reads no tokens: random ones cannot be drawn")
        return vocabulary

    @property
    def vocabulary(self) -> int | None:
        """Rows of the token embedding, or None for a model that reads no tokens."""
        if self.hf.main_input_name != "input_ids":
            return None
        return embedded_tokens(self.hf)

    def has_tokens(self, ids: Int[Tensor, "*shape"]) -> bool:
        """Whether all ids are in its vocabulary."""
        return self.vocabulary is not None and not bool(((ids < 0) | (ids >= self.vocabulary)).any())

    def check_tokens(self, ids: Int[Tensor, "*shape"]) -> None:
        """Raise `UsageError` where an id is not in its vocabulary; the line names the token."""
        if self.has_tokens(ids):
            return
        smallest, largest = (int(end) for end in ids.aminmax())
        wrong = smallest if smallest < 0 else largest
        named = self.tokenizer.convert_ids_to_tokens(wrong) if self.tokenizer and wrong >= 0 else None
        raise UsageError(
            f"token id {wrong}{f' ({named!r})' if named else ''} does not fit the {self.vocabulary} tokens of "
            f"{self.id}: the tokenizer belongs to another model, or leave out of the text what was added to it later"
        )

    def has_positions(self, length: int) -> bool:
        """Whether it has positions for so many tokens."""
        return self.longest is None or length <= self.longest

    @functools.cached_property
    def longest(self) -> int | None:
        """Tokens that the model has positions for, or None where it sets no limit (ALiBi)."""
        return longest_of(self.hf)

    @measures
    def head_weights(self, layer: int) -> HeadWeights:
        """The weights of one layer's heads: `w_q, w_k, w_v, b_q, b_k, b_v, scaling`, leading with heads.

        Raises:
            UsageError: there is no such layer.
            NoAttention: (a `WorkError`) the layer's block does not attend.
            NotAffine: (a `WorkError`) the layer's queries and keys are no affine function of its input.
            WorkError: of a model opened by `open_weights`: the layer's weights are not there, or no numbers.
        """
        self._check_layer(layer)
        with self._load_layer(layer):
            return read_head_weights(self.hf, self.structure, layer, self._call(layer))

    @measures
    def output_weights(self, layer: int) -> Float64[Tensor, "heads value_width width"]:
        """W_O of one layer's heads: its attention adds Σ_h o_h W_O[h] to the stream (before a norm of the sum).

        The last one asked for is kept until the block's parameters change (writes to `.data` are not seen).

        Raises:
            UsageError: there is no such layer.
            WorkError: what leaves the attention is no fixed affine function of its heads' outputs.
        """
        self._check_layer(layer)
        state = state_of(self.structure.blocks[layer])
        call = self._call(layer)
        known = self._output_weights.get(layer)
        if known is None or known[0] != state:
            self._output_weights.clear()
            sample = small_input(self.hf, 1)
            with self._load_layer(layer):
                read = read_output_weights(self.hf, self.structure, layer, call, sample)
            known = self._output_weights[layer] = (state, read)
        return known[1]

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.layers:
            raise UsageError(f"layer {layer} does not exist: this model has layers 0 to {self.layers - 1}")

    def _call(self, layer: int) -> Call:
        self.structure.attention_at(layer)  # names a layer that has none
        return self._calls[layer]

    def attention_alone(self, layer: int) -> nn.Module:
        """The attention module of one layer, to change what it does.

        Raises:
            UsageError: other layers share it (ALBERT).
        """
        if self.structure.shared:
            raise UsageError(
                f"{self.id}: several layers share one attention module, so none can be changed alone"
            )
        return self.structure.attention_at(layer)

    def check_weights(self) -> None:
        """Raise `WorkError` where the weights of its attention are numbers only to a quantiser: before a pass."""
        structure = self.structure
        refuse_quantised_modules(
            [(structure.names[layer], structure.attention_at(layer)) for layer in structure.attending]
        )

    def check_place(self, layer: int, head: int = 0) -> None:
        """Raise `UsageError` where there is no such layer, or no such head in it; and where it does not attend."""
        self._check_layer(layer)
        try:
            self.structure.attention_at(layer)
        except NoAttention as error:
            raise UsageError(str(error)) from error
        heads = self.heads_of[layer]
        if not 0 <= head < heads:
            raise UsageError(f"head {head} does not exist: this model has heads 0 to {heads - 1}")


@measures
def open_model(
    path_or_id: str | Path | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    device_map: str | dict[str, Any] | None = None,
    revision: str | None = None,
    tower: Tower | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> OpenModel:
    """Open and verify a checkpoint from a folder or the hub; the embedded model where no path is given.

    Args:
        path_or_id: a folder with `config.json` and safetensors weights, or a name on the hub.
        dtype: "auto" keeps the checkpoint's own; else "float32", "bfloat16" and so on.
        device: where the model goes; a CUDA device if there is one, else the CPU.
        device_map: spread the model over devices instead (needs `pip install theodolite[accelerate]`).
        revision: a branch, tag or commit on the hub.
        tower: of a checkpoint with two (CLIP): "text" or "vision", None: text; `say` is told which in one line.

    Raises:
        UsageError: no such checkpoint, pickled weights, an unknown or unsupported family.
        WorkError: weights missing, NaN or infinite, or the tapped attention is not the model's own.
    """
    check_dtype(dtype)
    target = usable_device(device)
    source = embedded.FOLDER if path_or_id is None else path_or_id
    local = local_folder(source)
    try:
        with without_progress_bars():
            if local is None:
                revision = commit_of(str(source), revision)
            config = tower_of(config_of(source, revision), tower, say)
            model = load(source, config, dtype, device_map, revision)
    except TheodoliteError:
        raise
    except LOADING_ERRORS as error:
        no_folder = " (there is no folder of that name; with HF_HUB_OFFLINE=1 no network is waited for)"
        where = "" if local else no_folder
        raise UsageError(f"cannot open {source}: {first_line(error)}{where}") from error
    if device_map is None:
        model = model.to(target)  # type: ignore[arg-type]
    model = model.eval().requires_grad_(False)
    refuse_nonfinite_weights(model)
    return OpenModel.of(
        model,
        *verified_parts(model),
        tokenizer=load_tokenizer(source, revision) if model.main_input_name == "input_ids" else None,
        id=embedded.NAME if path_or_id is None else str(path_or_id),
        revision=None if local else revision,
        sha256=hash_checkpoint(local) if local else None,
    )


def verified_parts(model: PreTrainedModel) -> tuple[Structure, Calls, Sequence[AttentionInputs]]:
    """What `OpenModel.of` takes of a model in evaluation mode, from small inputs.

    Raises:
        UsageError: an unsupported family, or a window in which tokens see nothing.
        WorkError: the tapped attention is not the model's own.
    """
    structure = find_structure(model, small_input(model, 1))
    calls = capture_calls(model, structure, small_input(model, 1))
    inputs = verify_attention(model, structure, small_input(model, VERIFIED_LENGTH))
    for layer, of_layer in zip(structure.attending, inputs, strict=True):
        if of_layer.mask is not None and not bool(of_layer.mask.any(dim=-1).all()):
            window = getattr(model.config.get_text_config(), "sliding_window", None)
            raise UsageError(
                f"some tokens of {structure.names[layer]} see no token, not even themselves: its config.json says "
                f"sliding_window = {window}; use a number above 0, or null for none"
            )
    return structure, calls, inputs
