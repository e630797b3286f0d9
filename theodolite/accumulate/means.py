"""First moments of the residual stream: what the positional and the context basis are made of.

Positions 1 … T−1 are averaged; position 0, whose token is an outlier in most models, is kept apart, and so are the
special tokens that a tokenizer puts behind every text ([SEP]). Of an image the patches are averaged, and all tokens
before them (`leading`: [CLS], registers, or none) kept apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from theodolite.accumulate.sums import (
    LayerSums,
    State,
    cache_sized_groups,
    contexts_in_cache,
    each_part,
    position_slices,
    token_slices,
)
from theodolite.corpus.groups import GROUPS, Groups


@dataclass(frozen=True)
class Sample:
    """The contexts whose mean vectors are kept, and those of their tokens that are kept one by one.

    `slot` says where a context's mean goes, −1 for those not kept; kept tokens have a context and a position each.
    """

    slot: Int[Tensor, " contexts"]
    token_context: Int[Tensor, " tokens"]
    token_position: Int[Tensor, " tokens"]

    @property
    def size(self) -> int:
        """Number of contexts kept."""
        return int((self.slot >= 0).sum())

    @property
    def kept(self) -> Int[Tensor, " sampled"]:
        """The contexts kept, by index in the corpus."""
        return (self.slot >= 0).nonzero().flatten()


BLOCK = 16  # neighbouring positions that are in one half of a context; fewer in a text of under 64 tokens


def halves_of_positions(length: int) -> Int[Tensor, " positions"]:
    """Return which of two halves each position of a text is in: blocks in turn, since neighbours are correlated."""
    return torch.arange(length) // max(1, min(BLOCK, length // 4)) % 2


class Means(LayerSums):
    """Sums over contexts of hidden states, norms, cosines and rank-collapse residuals; kept context means.

    State (N residual layers, G groups of contexts): contexts (N, G); readers (N, G, T), how many of them have a
    position, and position_sum (N, G, T, d) over these; norm_sum and cosine_sum (N, G; layer ℓ against ℓ−1) over tokens;
    norm_first_sum and collapse_sum (N, G) over contexts; context_mean (N, 2, S, d) over either half of the positions
    (`halves_of_positions`) and context_tokens (N, 2, S), over how many; token (N, Q, d); with `trailing` special tokens
    behind every context norm_last_sum (N, G). Tokens that an update leaves out are in none of these.

    A context may have fewer than T tokens; the contexts of one `update` have as many. `position_sum` is the largest
    thing here, 25 MB a layer at T = 512 and d = 768; in float32 what differs between the groups would be lost.
    """

    def __init__(
        self, layers: int, length: int, width: int, sample: Sample, trailing: int = 0, leading: int = 1
    ) -> None:
        scalars = ["contexts", "cosine_sum", "collapse_sum"]
        scalars += [f"norm{ending}_sum" for ending in token_slices(0, trailing, leading)]
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(scalars, (GROUPS,))
        shapes |= {
            "readers": (GROUPS, length),
            "position_sum": (GROUPS, length, width),
            "context_mean": (2, sample.size, width),
            "context_tokens": (2, sample.size),
            "token": (len(sample.token_context), width),
        }
        super().__init__(layers, shapes)
        self.length = length
        self.leading, self.trailing = leading, trailing
        self.sample = sample
        self.groups = Groups(len(sample.slot))
        self.halves = halves_of_positions(length - leading - trailing)
        self._previous: tuple[Tensor, Tensor] | None = None

    def update(
        self,
        layer: int,
        hidden: Float[Tensor, "batch positions width"],
        first_context: int,
        left_out: Bool[Tensor, "batch positions"] | None = None,
    ) -> None:
        """Add one layer's hidden states of contexts `first_context …` without tokens left out; layers come in order."""
        batch, read, _ = hidden.shape
        device, at_once = hidden.device, contexts_in_cache(hidden[0].numel())
        if not layer:
            self._previous = None
        parts = each_part(lambda part: self._lengths(hidden, part, left_out), batch, device, at_once)
        sums = {name: torch.cat([some[name] for some in parts]) for name in parts[0]}
        self._previous = hidden, sums.pop("norm")
        for ending, positions in token_slices(read, self.trailing, self.leading).items():
            if ending:
                sums[f"norm{ending}_sum"] = self._previous[1][:, positions].mean(dim=1)
        slots = self.sample.slot[first_context : first_context + batch].to(device)
        for name in ("context_mean", "context_tokens"):
            values = sums.pop(name)[slots >= 0].transpose(0, 1)
            self.at(name, layer, device)[:, slots[slots >= 0]] = values
        local = self.sample.token_context - first_context
        tokens = ((local >= 0) & (local < batch)).nonzero().flatten()
        if len(tokens):
            vectors = hidden[local[tokens].to(device), self.sample.token_position[tokens].to(device)]
            self.at("token", layer, device)[tokens.to(device)] = vectors.double()
        places = position_slices(read, self.length, self.trailing)
        for group, part in cache_sized_groups(self.groups, first_context, batch, device, at_once):
            states, count = hidden[part], part.stop - part.start
            readers = torch.full((read,), float(count), dtype=torch.float64, device=device)
            if left_out is not None:
                states = states.masked_fill(left_out[part].unsqueeze(-1), 0)
                readers -= left_out[part].sum(dim=0)
            summed = states.double().sum(0) if count > 1 else states[0]
            for source, place in places:
                self.at("position_sum", layer, device)[group, place] += summed[source]
                self.at("readers", layer, device)[group, place] += readers[source]
            self.at("contexts", layer, device)[group] += count
            for name, values in sums.items():
                self.add(name, layer, values[part].sum(), group)

    def resume(self, hidden: Float[Tensor, "batch positions width"]) -> None:
        """Take the hidden states that the next update is to be compared with: the same contexts, a layer before."""
        self._previous = hidden, torch.linalg.vector_norm(hidden, dim=-1, dtype=torch.float64)

    def _lengths(self, hidden: Tensor, part: slice, left_out: Tensor | None) -> dict[str, Tensor]:
        """Compute each context's mean vectors, token norms, cosine to the previous layer and rank-collapse residual."""
        text = slice(self.leading, hidden.shape[1] - self.trailing)
        h = hidden[part].to(torch.float64, copy=True)
        halves = functional.one_hot(self.halves[: text.stop - text.start], 2).T.to(h)
        norm = torch.linalg.vector_norm(h, dim=-1)
        x, norms = h[:, text], norm[:, text]
        if left_out is not None:
            gone = left_out[part, text]
            x, norms = x.masked_fill(gone.unsqueeze(-1), 0), norms.masked_fill(gone, 0)
            halves = halves * ~gone[:, None]
        tokens = halves.sum(dim=-1).expand(len(h), -1)
        of_halves = halves @ x
        values = {"norm": norm, "norm_sum": norms.sum(dim=1), "context_tokens": tokens}
        values["context_mean"] = of_halves / tokens.clamp_min(1).unsqueeze(-1)
        if self._previous is not None:
            p, p_norm = (tensor[part, text].to(h) for tensor in self._previous)
            cosine = torch.linalg.vecdot(x, p) / (norms * p_norm).clamp_min(1e-300)
            values["cosine_sum"] = cosine.sum(dim=1)
        mean = of_halves.sum(dim=1, keepdim=True) / tokens.sum(dim=1).clamp_min(1)[:, None, None]
        size = torch.linalg.vector_norm(norms, dim=-1)
        x = x.sub_(mean)
        if left_out is not None:
            x.masked_fill_(gone.unsqueeze(-1), 0)
        spread = torch.linalg.vector_norm(x, dim=(1, 2))
        return values | {"collapse_sum": spread / size.clamp_min(1e-300)}


def decomposed_means(state: State, trailing: int = 0, leading: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Return μ (N, d), pos (N, T, d) and ctx (N, 2, S, d) of all layers; μ is the mean over the tokens of the text.

    pos_t is of the contexts that reach position t. What the positions that a mean is over average to is taken off it:
    else ctx would say which half of the positions it is of, or how long the context is.
    """
    text = slice(leading, state["position_sum"].shape[2] - trailing)
    halves = halves_of_positions(text.stop - text.start)
    layers = []
    for layer, sums in enumerate(state["position_sum"]):
        mean, pos = mean_and_pos(sums.sum(dim=0), state["readers"][layer].sum(dim=0), text)
        of_halves = []
        for half in (0, 1):
            averages = pos[text][halves == half]
            averages = averages.cumsum(dim=0) / torch.arange(1, len(averages) + 1)[:, None]
            last = (state["context_tokens"][layer, half].long() - 1).clamp_min(0)
            centred = state["context_mean"][layer, half] - mean
            of_halves.append(centred - averages[last] if len(averages) else centred)
        layers.append((mean, pos, torch.stack(of_halves)))
    mean, pos, ctx = (torch.stack(of_layers) for of_layers in zip(*layers, strict=True))
    return mean, pos, ctx


def mean_and_pos(
    position_sum: Float[Tensor, "positions width"], readers: Float[Tensor, " positions"], text: slice
) -> tuple[Float[Tensor, " width"], Float[Tensor, "positions width"]]:
    """Compute μ, the mean over the tokens of the text, and pos of the contexts that these are sums of."""
    position_mean = position_sum / readers.clamp_min(1)[:, None]
    mean = (readers[text] / readers[text].sum()) @ position_mean[text]
    return mean, position_mean - mean


def means_of_first(
    state: State, layer: int, groups: Int[Tensor, " groups"], trailing: int = 0, leading: int = 1
) -> tuple[Float[Tensor, " width"], Float[Tensor, "positions width"]]:
    """Return μ and pos of the first of these groups that has each position; pos is 0 where none has it."""
    readers = state["readers"][layer, groups]
    first = (readers > 0).double().argmax(dim=0)
    place = torch.arange(len(first))
    readers, sums = readers[first, place], state["position_sum"][layer, groups[first], place]
    mean, pos = mean_and_pos(sums, readers, slice(leading, len(first) - trailing))
    return mean, pos * (readers > 0)[:, None]


def means_of_halves(
    state: State, layer: int, trailing: int = 0, leading: int = 1
) -> tuple[Float[Tensor, "2 width"], Float[Tensor, "2 positions width"]]:
    """Return μ and pos of the contexts in either half of the groups; of a single group, twice its own."""
    filled = (state["contexts"][layer] > 0).nonzero().flatten()
    text = slice(leading, state["position_sum"].shape[2] - trailing)
    sides = []
    for half in (filled[0::2], filled[1::2] if len(filled) > 1 else filled):
        sums, readers = (state[name][layer, half].sum(dim=0) for name in ("position_sum", "readers"))
        mean, pos = mean_and_pos(sums, readers, text)
        sides.append((mean, (pos * (readers > 0)[:, None]).float()))
    means, positions = zip(*sides, strict=True)
    return torch.stack(means), torch.stack(positions)


class KeptStreams(LayerSums):
    """The hidden states of a few contexts, whole, so that later stages need no forward pass; zero behind their ends.

    State: stream (L, S, T, d), what enters each block in the S contexts `kept`, in the dtype of the model.
    """

    def __init__(
        self, layers: int, length: int, width: int, kept: Int[Tensor, " sampled"], dtype: torch.dtype
    ) -> None:
        super().__init__(layers, {"stream": (len(kept), length, width)}, dtype=dtype)
        self.kept = kept

    def update(self, layer: int, hidden: Float[Tensor, "batch positions width"], first_context: int) -> None:
        """Keep one layer's hidden states of those of contexts `first_context …` that are kept."""
        place = (self.kept >= first_context) & (self.kept < first_context + len(hidden))
        if layer < self.layers and place.any():
            stream = self.at("stream", layer, hidden.device)
            kept = hidden[(self.kept[place] - first_context).to(hidden.device)]
            stream[place.to(hidden.device), : hidden.shape[1]] = kept.to(stream.dtype)
