"""A cache for `generate` that keeps traced sinks and the most recent tokens, up to a number for each layer.

It knows which tokens are kept, and tells the model so by the mask of each pass; `kept_tokens.py` decides which.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from theodolite.errors import UsageError, first_line
from theodolite.models.guard import measures
from theodolite.models.kept_tokens import Room, kept
from theodolite.models.opened import OpenModel
from theodolite.models.structure import first_output
from theodolite.system.choices import check_whole

Sinks = Callable[[Int[Tensor, "contexts positions"]], Bool[Tensor, "contexts positions"]]
"""Which tokens are sinks, by their id and by whether they are the first of their context, as `Exclusions.tokens`."""

MASKED_KERNELS = ("eager", "sdpa")
"""Implementations of attention that take a mask of queries by keys."""


class TracedCache(Cache):
    """Keys and values of traced sinks and of the most recent tokens: at most `size` tokens a layer.

    To be given as `past_key_values`, to `model.hf.generate` or to `model.hf` chunk by chunk. A token attends to itself
    and to what is kept then, `size` tokens in all; what has left the cache does not come back. The same tokens are kept
    in all layers, of each row its own. Positions stay the true ones, so no more tokens of a context are read than the
    model has positions for. Within one pass the keys of all its tokens are in memory: read a long prompt in chunks.

    Until a context has `size` tokens everything is kept. Rows may be padded on the left, with their `attention_mask`;
    where no `position_ids` are given, they count from the first token that is none of padding.

    Args:
        model: a causal model of transformers all of whose layers attend to all earlier tokens.
        sinks: which tokens are sinks (`exclusions.tokens`); None: none are.
        size: tokens that each layer keeps at most.
        places: how many of them may be sinks: one at position 0 stays, and of later ones the latest; None: an
            eighth, and one at least.
        first: tokens at the beginning that stay whether they are sinks or not, and take up places.

    Raises:
        UsageError: the model attends in another way or adds a bias by distance (ALiBi), `sinks` is no function, or the
            numbers are not whole or leave no window; while it is used: tokens that are not given as ids, a mask with
            holes, more tokens than positions, `sinks` that give no bool for each token, a pass of another model.
    """

    _beginnings: Tensor | None  # tokens read of each row, without padding
    _stay: Tensor | None  # which candidates of the pass under way are kept
    _told: int  # tokens of a row that this cache was told of, padding included
    _positions: Tensor
    _flags: Tensor  # whether each that is kept is a sink

    def __init__(
        self,
        model: OpenModel,
        sinks: Sinks | None,
        size: int,
        *,
        places: int | None = None,
        first: int = 0,
    ) -> None:
        _check(model)
        if sinks is not None and not callable(sinks):
            raise UsageError(
                f"sinks is of type {type(sinks).__name__}: give a function of token ids (exclusions.tokens), or None"
            )
        check_whole(size=size, first=first, places=0 if places is None else places)
        super().__init__(layer_class_to_replicate=_Layer)
        if places is None:
            places = max(first, min(max(size // 8, 1), size - 1))
        self.room = Room(size, places, first)
        self._sinks = sinks
        self._model = model.hf
        self._longest = model.longest
        self._forget()
        self._listen()
        _verify(model)

    @property
    def positions(self) -> Int[Tensor, "rows kept"]:
        """Position in its context of each token that is kept, in order; −1 of padding."""
        return self._positions

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values that the tokens of this pass attend to; what is kept of them stays.

        Raises:
            UsageError: the pass is not one of the model that the cache was made for.
        """
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        layer: Any = self.layers[layer_idx]
        if self._stay is None or layer.tokens_read != self._told:
            raise UsageError(
                "this cache was not told which tokens are read: give it to the model that it was made for, in an "
                "unbroken row of passes"
            )
        layer.keys, layer.values = (_chosen(tensor, self._stay) for tensor in (keys, values))
        return keys, values

    def read(
        self, ids: Int[Tensor, "rows new"], mask: Tensor | None
    ) -> tuple[Bool[Tensor, "rows 1 new candidates"], Int[Tensor, "rows new"]]:
        """Take note of the tokens of a pass before it: what each of them attends to, and their positions.

        Args:
            ids: the tokens that are read now.
            mask: 1 of tokens, 0 of padding, of all that were read and of these; None: there is no padding.

        Raises:
            UsageError: a mask that hides tokens after the first of their context, or of another shape, more tokens of a
                context than the model has positions for, or `sinks` that give no bool for each token.
        """
        rows, new = ids.shape
        if self._beginnings is None:
            self._beginnings = ids.new_zeros(rows)
            self._positions = ids.new_zeros(rows, 0)
            self._flags = torch.zeros_like(self._positions, dtype=torch.bool)
        if len(self._beginnings) != rows:
            raise UsageError(
                f"this cache holds {len(self._beginnings)} contexts, and {rows} are read: make another"
            )
        seen = torch.ones_like(ids, dtype=torch.bool) if mask is None else _of_new(mask, ids)
        read = self._beginnings.unsqueeze(1) + seen.cumsum(dim=1)
        if bool((~seen & (read > 0)).any()):
            raise UsageError("a context has padding after its first token: pad on the left")
        if self._longest is not None and (longest := int(read.max())) > self._longest:
            raise UsageError(
                f"the model has positions for {self._longest} tokens, and a context would be {longest} long: read "
                "fewer, or begin another one with cache.reset()"
            )
        positions = torch.where(seen, read - 1, -1)
        sinks = self._are_sinks(ids, positions)
        self._beginnings = read[:, -1]
        self._positions = torch.cat([self._positions, positions], dim=1)
        self._flags = torch.cat([self._flags, sinks], dim=1)
        self._told += new
        attended = kept(self.room, self._flags, self._positions, new)
        last = attended[:, -1]
        self._stay = last.nonzero()[:, 1].view(rows, -1)
        attended = attended & (self._positions >= 0).unsqueeze(1)
        # Itself even where it is padding: no row of a softmax is empty.
        attended[:, :, -new:] |= torch.eye(new, dtype=torch.bool, device=ids.device)
        self._positions, self._flags = (t.gather(1, self._stay) for t in (self._positions, self._flags))
        return attended.unsqueeze(1), positions

    def _are_sinks(self, ids: Tensor, positions: Tensor) -> Tensor:
        if self._sinks is None:
            return torch.zeros_like(ids, dtype=torch.bool)
        as_first = _flags(self._sinks, ids.reshape(-1, 1)).view_as(ids)
        as_later = _flags(self._sinks, torch.cat([ids[:, :1], ids], dim=1))[:, 1:]
        return torch.where(positions == 0, as_first, as_later) & (positions >= 0)

    def _forget(self) -> None:
        self._beginnings = self._stay = None
        self._positions = torch.zeros(0, 0, dtype=torch.int64)
        self._flags = torch.zeros(0, 0, dtype=torch.bool)
        self._told = 0

    def _listen(self) -> None:
        """Be told of each pass of the model, as long as this cache is there."""
        tell = functools.partial(_tell, weakref.ref(self))
        weakref.finalize(self, self._model.register_forward_pre_hook(tell, with_kwargs=True).remove)

    def __deepcopy__(self, memo: dict[int, Any]) -> TracedCache:
        """What it holds is copied, the model is not."""
        copied = object.__new__(type(self))
        shared = {"_model": self._model, "_sinks": self._sinks}
        own = {name: value for name, value in self.__dict__.items() if name not in shared}
        copied.__dict__.update(copy.deepcopy(own, memo) | shared)
        copied._listen()
        return copied

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Keys of the next pass, and 0."""
        return self._positions.shape[1] + query_length, 0

    def reset(self) -> None:
        """Forget everything."""
        self.layers.clear()
        self._forget()

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Refused: what has left the cache does not come back.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "a cache that leaves tokens out cannot go back: assisted generation needs another one"
        )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in another order, as beam search wants them."""
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]  # int32 comes, too
        self._of_rows(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row several times."""
        super().batch_repeat_interleave(repeats)
        self._of_rows(lambda rows: rows.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Some of the rows."""
        super().batch_select_indices(indices)
        self._of_rows(lambda rows: rows[indices.to(rows.device)])

    def _of_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        if self._beginnings is not None:
            self._beginnings, self._positions, self._flags = map(
                change, (self._beginnings, self._positions, self._flags)
            )


class _Layer(DynamicLayer):
    """A layer that says how many tokens it has read, not how many it keeps: models count positions by that."""

    is_croppable = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.tokens_read = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.tokens_read += key_states.shape[-2]
        return super().update(key_states, value_states, *args, **kwargs)

    def get_seq_length(self) -> int:
        return self.tokens_read


def _tell(
    told: weakref.ref[TracedCache], model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Before a pass with this cache: what is read, and a mask of what is kept in place of the one of padding."""
    signature = inspect.signature(model.forward)
    given = signature.bind(*args, **kwargs).arguments
    given |= given.pop("kwargs", {})
    cache = told()
    is_read = given.get("past_key_values") is cache
    if cache is None or not is_read:
        return None
    ids = given.get("input_ids")
    if ids is None:
        raise UsageError("this cache knows sinks by their token: give the model input_ids")
    if model.config._attn_implementation not in MASKED_KERNELS:
        raise UsageError(
            f"attention by {model.config._attn_implementation} takes no mask of queries by keys: use "
            "model.hf.set_attn_implementation('sdpa')"
        )
    attended, positions = cache.read(ids, given.get("attention_mask"))
    if given.get("position_ids") is None and "position_ids" in signature.parameters:
        given["position_ids"] = positions.clamp(min=0)
    if model.config._attn_implementation == "eager":
        hidden = torch.finfo(model.dtype).min
        attended = torch.zeros_like(attended, dtype=model.dtype).masked_fill(~attended, hidden)
    return (), given | {"attention_mask": attended}


def _flags(sinks: Sinks, ids: Tensor) -> Tensor:
    """What the function says of these contexts, if it is what it has to be."""
    flags: object = sinks(ids)
    if not isinstance(flags, Tensor) or flags.dtype != torch.bool or flags.shape != ids.shape:
        what = (
            f"{flags.dtype} of shape {tuple(flags.shape)}"
            if isinstance(flags, Tensor)
            else type(flags).__name__
        )
        raise UsageError(
            f"the function of sinks gave {what} for ids of shape {tuple(ids.shape)}: it must give a bool for each"
        )
    return flags


def _of_new(mask: Tensor, ids: Tensor) -> Tensor:
    """Of a mask of padding (rows, all tokens so far), that of the new tokens."""
    if mask.ndim != 2 or mask.shape[0] != ids.shape[0] or mask.shape[1] < ids.shape[1]:
        raise UsageError(
            f"an attention mask of shape {tuple(mask.shape)}: this cache makes its own, give it that of padding "
            "(rows, tokens)"
        )
    return mask[:, -ids.shape[1] :].to(ids.device, torch.bool)


def _chosen(states: Tensor, places: Tensor) -> Tensor:
    """Keys or values (rows, heads, tokens, width) of some tokens of each row."""
    index = places.to(states.device)[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[-1])
    return states.gather(2, index)


def _check(model: OpenModel) -> None:
    if not isinstance(model, OpenModel):
        raise UsageError(
            f"a cache is made for a model that open_model has opened, not for {type(model).__name__}"
        )
    takes_one = "past_key_values" in inspect.signature(model.hf.forward).parameters
    if not model.causal or model.hf.config.is_encoder_decoder or not takes_one:
        raise UsageError(f"{model.id} is no causal decoder: it has no cache to choose for")
    try:
        kinds = {type(layer) for layer in DynamicCache(config=model.hf.config).layers}
    except ValueError as error:
        raise UsageError(
            f"{model.id}: transformers makes no cache by its config ({first_line(error)})"
        ) from error
    if kinds - {DynamicLayer} or "local" in getattr(model.hf.config, "attention_layers", ()):
        raise UsageError(
            f"{model.id} has layers that do not attend to all earlier tokens (windows, state spaces): what they keep "
            "is their own"
        )
    if model.positions in ("alibi", "relative bias"):
        raise UsageError(
            f"{model.id} adds a bias by distance to its logits ({model.positions}), which it reads off a token's place "
            "in the cache: only positions in queries and keys, or in the stream, stay true"
        )


_SERVED: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()
"""Models that were seen to heed the mask and the positions that a cache gives them."""

TRIED, TRIED_SIZE = 8, 3
"""Tokens that this is seen on, and those that are kept of them."""

TOLERANCE = 0.05
"""Of the largest output: rounding in bfloat16 is a third of it, and a mask that is not heeded many times as much."""


@measures
def _verify(model: OpenModel) -> None:
    """See once that a model does with this cache what it does without, and the same in one pass as token by token.

    Raises:
        UsageError: it does not: its attention heeds another mask than the one it is given.
    """
    if model.hf in _SERVED:
        return
    ids = model.source.sample(TRIED)

    def read(size: int, width: int) -> Tensor:
        cache = TracedCache(model, None, size)
        parts = ids.split(width, dim=1)
        return torch.cat([_output(model, part, past_key_values=cache) for part in parts], dim=1)

    _SERVED.add(model.hf)  # for the caches that are made here
    serves = False
    try:
        pairs = (
            (_output(model, ids, use_cache=False), read(TRIED, 1)),
            (read(TRIED_SIZE, TRIED), read(TRIED_SIZE, 1)),
        )
        serves = all(bool((one - other).abs().max() <= TOLERANCE * one.abs().max()) for one, other in pairs)
    finally:
        if not serves:
            _SERVED.discard(model.hf)
    if not serves:
        raise UsageError(
            f"{model.id} ({model.source.family}) does not do with this cache what it does without: its attention "
            "heeds another mask than the one it is given"
        )


def _output(model: OpenModel, ids: Tensor, **given: Any) -> Tensor:
    with torch.no_grad():
        return first_output(model.hf(input_ids=ids, **given))
