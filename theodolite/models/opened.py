"""An opened and verified model, the argument of every measurement."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from theodolite.attention.inputs import AttentionInputs, softmax
from theodolite.corpus.cutting import contexts_of_one_length, whole_ids
from theodolite.errors import UsageError, WorkError, first_line
from theodolite.models.calls import Calls
from theodolite.models.guard import between_passes, measures, once_a_pass
from theodolite.models.source import Inputs, Source, decode_greedily
from theodolite.models.stored.checkpoint_tensors import StreamedBlocks
from theodolite.models.stored.dequantised import dequantised, has_own_class, quantised_layers
from theodolite.models.structure import NoAttention, Structure, first_output
from theodolite.models.structure_search import positions_of, recorded_inputs
from theodolite.models.weights.head_weights import (
    HeadWeights,
    read_head_weights,
    read_output_weights,
    state_of,
)
from theodolite.models.weights.weight_map import WeightMaps, own_parameter
from theodolite.system.choices import check_whole
from theodolite.system.files import digest
from theodolite.system.processor import parallel_map


@dataclass(frozen=True)
class Weights:
    """The identity of an opened model's weights.

    `sha256` is that of the checkpoint on disk, if that was local, or of the tensors where they were `changed` or the
    model was opened `in_memory`; `revision` is the commit on the hub, if they are still those.
    """

    sha256: str | None
    revision: str | None
    changed: bool = False
    in_memory: bool = False

    def described(self) -> dict[str, str | None]:
        """Return what a run's provenance records of them."""
        where = "in memory, changed" if self.changed else "in memory" if self.in_memory else None
        return {"revision": self.revision, "sha256": self.sha256, **({"weights": where} if where else {})}


@dataclass(frozen=True, repr=False)
class OpenModel:
    """A checkpoint that has been opened and verified.

    Attributes:
        source: what to hook and tap, how to run it, and what it reads; in evaluation mode.
        width: width of the residual stream d.
        causal: whether a query is kept from later keys.
        positions: how it encodes them, as `positions_of` says.
        calls: how each layer's attention module is called for one token at position 0.
        id: the path or hub name it was opened by; `revision` its hub commit, if any; `sha256` the hash of its
            config and weights on disk, if they were local. `weights` says whether it still has these weights.
        stored: how a GGUF file stores them: {"gguf": the quantisation, "tensor_types": the tensors of each type}.
        streamed: what reads its blocks from its files as they run, where it was opened so.
        weight_maps: which rows of which parameters its heads are made of, as far as they are known.
        chosen: the layers whose heads alone are looked at, where `only` chose some.
    """

    source: Source
    structure: Structure
    width: int
    causal: bool
    positions: str
    id: str
    calls: Calls = field(repr=False)
    tokenizer: PreTrainedTokenizerBase | None = None
    revision: str | None = None
    sha256: str | None = None
    stored: dict[str, Any] = field(default_factory=dict, repr=False)
    chosen: tuple[int, ...] | None = None
    streamed: StreamedBlocks | None = field(default=None, repr=False, compare=False)
    weight_maps: WeightMaps = field(default_factory=WeightMaps, repr=False, compare=False)
    _output_weights: dict[int, tuple[Any, Tensor]] = field(default_factory=dict, repr=False, compare=False)
    _interventions: list[str] = field(default_factory=list, repr=False, compare=False)
    _checksum: int | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        source: Source,
        structure: Structure,
        calls: Calls,
        inputs: Sequence[AttentionInputs],
        streamed: StreamedBlocks | None = None,
        **rest: Any,
    ) -> OpenModel:
        """Make it of what `verified_parts` gives; `UsageError` where queries attend to keys of other tokens."""
        if structure.cross and source.attention != "cross":
            raise UsageError(
                f"{source.family} has more or fewer queries than keys (memory keys, a cache, another stream): only "
                "attention among the tokens of a context is read"
            )
        causal = all(of.causal if of.mask is None else not bool(of.mask.triu(1).any()) for of in inputs)
        positions = positions_of(source, calls[structure.attending[0]], inputs[0].bias)
        named = rest.get("sha256") or rest.get("revision")
        rest["_checksum"] = weights_checksum(source.root) if named else None
        return cls(
            source, structure, structure.width, causal, positions, calls=calls, streamed=streamed, **rest
        )

    def __repr__(self) -> str:
        """Describe the model in a line."""
        interventions = f", {'; '.join(self._interventions)}" if self._interventions else ""
        return (
            f"OpenModel({self.id}: {self.source.family}, {self.layers} blocks × {self.heads} heads × width "
            f"{self.width}, {str(self.source.dtype).removeprefix('torch.')} on {self.device}{interventions})"
        )

    @property
    def root(self) -> nn.Module:
        """The model itself."""
        return self.source.root

    @property
    def hf(self) -> PreTrainedModel:
        """The model as `transformers` has it; `UsageError` where it is none of these."""
        if not isinstance(self.root, PreTrainedModel):
            raise UsageError(f"{self.id} is a module of its own, and this needs a model of transformers")
        return self.root

    @property
    def layers(self) -> int:
        """Number of blocks L."""
        return len(self.structure.attention)

    @property
    def heads(self) -> int:
        """Query heads a layer H; where layers differ (`heads_of`), of the one that has most."""
        return max(self.heads_of)

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
    def interventions(self) -> tuple[str, ...]:
        """Interventions that are open now, and what was done for good: it is not what the checkpoint on disk does."""
        return tuple(self._interventions)

    @contextmanager
    def intervention(self, name: str, *changes: AbstractContextManager[object]) -> Iterator[None]:
        """Make the changes while open, with `name` among `interventions`; they begin and end between passes."""
        with ExitStack() as undo:
            with between_passes(self.root):
                for change in changes:
                    undo.enter_context(change)
                self._interventions.append(name)
            try:
                yield
            finally:
                with between_passes(self.root):
                    self._interventions.remove(name)
                    undo.close()

    def record_intervention(self, name: str) -> None:
        """Add `name` to `interventions` for good: its weights were changed."""
        self._interventions.append(name)

    def weights(self) -> Weights:
        """Identify the weights that are in memory now: read in whole, once a pass."""

        def now() -> Weights:
            if self.sha256 is None and self.revision is None:
                return Weights(weights_sha256(self.root), None, in_memory=True)
            if self._checksum is None or weights_checksum(self.root) == self._checksum:
                return Weights(self.sha256, self.revision)
            return Weights(weights_sha256(self.root), None, changed=True)

        return once_a_pass(self.root, "weights", now)

    @property
    def device(self) -> torch.device:
        """The device for inputs."""
        return self.source.device

    @measures("self")
    def forward(self, inputs: Inputs) -> Tensor:
        """Run a pass without gradients or a cache: of `transformers`, the last hidden states (…, width)."""
        return first_output(self.source.run(inputs))

    @measures("self")
    def logits(
        self, ids: Int[Tensor, "contexts positions"], chosen: Bool[Tensor, "contexts positions"] | None = None
    ) -> Float[Tensor, "*positions vocabulary"]:
        """Compute the next-token logits of a pass without gradients or a cache; the model must have an output head.

        They are of all positions, (contexts, positions, vocabulary), or of those `chosen`, (tokens, vocabulary), which
        saves most of a pass where the vocabulary is large.
        """
        if self.source.predict is None:
            raise UsageError(f"{self.id} has no output head that is read, so it predicts no tokens")
        return self.source.predict(ids, chosen)

    @measures("self")
    def attention(
        self,
        ids: Int[Tensor, "contexts positions"] | Sequence[int],
        layer: int,
        heads: Sequence[int] | int | None = None,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        generate: int = 0,
    ) -> Float[Tensor, "contexts heads queries keys"]:
        """Compute how much attention each query of a layer pays to each key.

        Args:
            ids: token ids (contexts, positions); of a single context they may be (positions).
            heads: those wanted, in this order, or the number of one; None: all.
            attention_mask, position_ids: of padded or packed rows, as `Corpus.from_ids` takes them; each context is
                read by itself, and all must be as long as each other.
            generate: tokens that the model writes behind each context, the most probable each time, to be read with it.

        Returns:
            Weights in float32 or better. They sum to 1 over the keys, less where a learned sink column takes part.

        Raises:
            UsageError: no such layer, head or token; contexts of several lengths or too long; a model that writes none.
            WorkError: it writes by other logits than it has of the finished text.
        """
        check_whole(layer=layer, generate=generate)
        contexts = contexts_of_one_length(whole_ids(ids), attention_mask, position_ids)
        self.check_place(layer)
        heads = range(self.heads_of[layer]) if heads is None else heads
        chosen = list(heads) if isinstance(heads, Iterable) else [heads]
        for head in chosen:
            self.check_place(layer, head)
        self.check_tokens(contexts)
        if generate:
            self.check_writes(contexts.shape[1], generate)
            contexts = decode_greedily(self.source, contexts, generate)
        elif not self.has_positions(contexts.shape[1]):
            raise UsageError(
                f"contexts of {contexts.shape[1]} tokens are longer than the {self.longest} of {self.id}"
            )
        looked_at = self if self.structure.shared else self.only([layer])
        with recorded_inputs(self.root, looked_at.structure) as recorded:
            self.forward(contexts)
        inputs = recorded[looked_at.attending.index(layer)]
        return softmax(inputs.logits(), inputs.sink)[:, chosen]

    def check_writes(self, length: int, count: int) -> None:
        """Raise `UsageError` where it cannot continue contexts of a length by so many tokens."""
        if count < 1:
            raise UsageError(f"{count} tokens to write: give 1 or more")
        if self.source.predict is None or not self.causal:
            raise UsageError(
                f"{self.id} predicts no next token, so it writes none: only decoders with a language-model head do"
            )
        if not self.has_positions(length + count):
            raise UsageError(
                f"{length} tokens and {count} that are written are more than the {self.longest} that {self.id} has "
                "positions for: give a shorter --length, or write fewer"
            )

    def required_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer; `UsageError` where the checkpoint has none."""
        if self.tokenizer is None:
            raise UsageError(f"{self.id} has no tokenizer beside its weights that is read: save one there")
        return self.tokenizer

    def required_vocabulary(self) -> Any:
        """Return what random tokens are drawn from, the tokenizer or the number of ids; `UsageError` without tokens."""
        vocabulary = self.tokenizer or self.vocabulary
        if vocabulary is None:
            raise UsageError(f"{self.id} reads no tokens: random ones cannot be drawn")
        return vocabulary

    @property
    def vocabulary(self) -> int | None:
        """Rows of the token embedding, or None for a model that reads no tokens."""
        return self.source.vocabulary

    def has_tokens(self, ids: Int[Tensor, "*shape"]) -> bool:
        """Tell whether all ids are in its vocabulary."""
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
            f"{self.id}: the tokenizer belongs to another model, or the text has tokens that were added to it later"
        )

    def has_positions(self, length: int) -> bool:
        """Tell whether it has positions for so many tokens."""
        return self.longest is None or length <= self.longest

    @property
    def longest(self) -> int | None:
        """Tokens that the model has positions for, or None where it sets no limit (ALiBi)."""
        return self.source.longest

    def block_present(self, layer: int) -> AbstractContextManager[None]:
        """Keep the weights of a block in memory while open, where they are read as it runs."""
        return nullcontext() if self.streamed is None else self.streamed.present(layer)

    @measures("self")
    def head_weights(self, layer: int) -> HeadWeights:
        """Read the weights of one layer's heads: `w_q, w_k, w_v, b_q, b_k, b_v, scaling`, leading with heads.

        Raises:
            UsageError: there is no such layer.
            NoAttention: (a `WorkError`) the layer's block does not attend.
            NotAffine: (a `WorkError`) its queries and keys are no affine function of its input.
            WorkError: (of `open_streamed`) its weights are not there, or no numbers.
        """
        self._check_layer(layer)
        with self.block_present(layer):
            return read_head_weights(self.root, self.structure, layer, self.calls[layer], self.weight_maps)

    @measures("self")
    def output_weights(self, layer: int) -> Float64[Tensor, "heads value_width width"]:
        """Read W_O of one layer's heads: attention adds Σ_h o_h W_O[h] to the stream (before a norm of the sum).

        The last one asked for is kept until the block's parameters change (writes to `.data` are not seen).

        Raises:
            UsageError: there is no such layer.
            WorkError: what leaves the attention is no fixed affine function of its heads' outputs.
        """
        self._check_layer(layer)
        state, known = state_of(self.structure.blocks[layer]), self._output_weights.get(layer)
        if known is None or known[0] != state:
            self._output_weights.clear()
            try:
                with self.block_present(layer):
                    run = self.source.small_pass(1)
                    read = read_output_weights(self.root, self.structure, layer, self.calls[layer], run)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, TypeError, ValueError, LookupError) as error:  # of the module's own code
                raise WorkError(f"layer {layer}: its W_O cannot be read: {first_line(error)}") from error
            known = self._output_weights[layer] = (state, read)
        return known[1]

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.layers:
            raise UsageError(f"layer {layer} does not exist: this model has layers 0 to {self.layers - 1}")
        self.structure.attention_at(layer)  # names a layer that has none

    def attention_alone(self, layer: int) -> nn.Module:
        """Return the attention module of one layer, to change it; `UsageError` where other layers share it (ALBERT)."""
        if self.structure.shared:
            raise UsageError(f"several layers share one attention module in {self.id}: none is changed alone")
        return self.structure.attention_at(layer)

    @measures("self")
    def check_weights(self) -> None:
        """Raise `WorkError` where its first attention is quantised in a way that cannot be read: before a pass."""
        first = self.attending[0]
        for name, layer in quantised_layers(self.structure.attention_at(first), self.structure.names[first]):
            dequantised(name, layer)

    def only(self, layers: Sequence[int] | None) -> OpenModel:
        """Return the same model restricted to the heads of some layers (None: all); hidden states are those of all.

        `UsageError` where one does not exist or attend, and for a model whose layers share modules.
        """
        if layers is None:
            return self
        if self.structure.shared:
            raise UsageError(f"layers of {self.id} share one attention module: all of them are looked at")
        chosen = tuple(sorted(set(layers)))
        if not chosen:
            raise UsageError(f"no layer is chosen: {self.id} has {self.layers}, counted from 0")
        for layer in chosen:
            self.check_place(layer)
        whole = self.structure
        structure = replace(
            whole,
            attention=tuple(it if layer in chosen else None for layer, it in enumerate(whole.attention)),
            heads_of=tuple(it if layer in chosen else 0 for layer, it in enumerate(whole.heads_of)),
            value_widths=tuple(it if layer in chosen else 0 for layer, it in enumerate(whole.value_widths)),
        )
        return replace(self, structure=structure, chosen=chosen)

    def check_place(self, layer: int, head: int = 0) -> None:
        """Raise `UsageError` where there is no such layer, or no such head in it; and where it does not attend."""
        try:
            self._check_layer(layer)
        except NoAttention as error:
            raise UsageError(str(error)) from error
        heads = self.heads_of[layer]
        if not 0 <= head < heads:
            raise UsageError(f"head {head} does not exist: this model has heads 0 to {heads - 1}")


def weights_checksum(model: nn.Module) -> int:
    """Sum names, types, shapes and bytes of all weights in memory.

    A write to `.data` leaves the version counters of tensors as they are, so all are read, at 2 GB a second.
    """
    return zlib.crc32(repr(parallel_map(_crc, list(_weights(model).items()))).encode())


def weights_sha256(model: nn.Module) -> str:
    """Hash the weights in memory, to name them."""
    return digest({name: tensor.detach().cpu().contiguous() for name, tensor in _weights(model).items()})


def _crc(named: tuple[str, Tensor]) -> tuple[str, str, tuple[int, ...], int]:
    name, tensor = named
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return name, str(tensor.dtype), tuple(tensor.shape), zlib.crc32(values.data)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and the buffers that checkpoints hold, each once; what an intervention replaced, as it was."""
    found: dict[int, tuple[str, Tensor]] = {}
    for path, module in model.named_modules():
        held = {name: own_parameter(module, name, p) for name, p in module._parameters.items()}
        held |= {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for name, tensor in held.items():
            if tensor is not None and not tensor.is_meta:
                found.setdefault(id(tensor), (f"{path}.{name}", tensor))
    return dict(part for named in found.values() for part in _parts(*named))


def _parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensor, or the plain ones that one of a quantiser's class is made of."""
    if not has_own_class(tensor):
        yield name, tensor
        return
    parts: Any = tensor
    for part in parts.__tensor_flatten__()[0]:
        yield from _parts(f"{name}.{part}", getattr(tensor, part))
