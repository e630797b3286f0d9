"""The share of each head's logit variance that each pair of parts carries, over a sample of a text."""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from theodolite.accumulate.means import means_of_first
from theodolite.accumulate.sums import State, position_slices
from theodolite.corpus.corpus import Corpus
from theodolite.corpus.groups import Groups
from theodolite.errors import WorkError
from theodolite.measure.constituents import share_sums
from theodolite.measure.position import CUTOFFS, qk_low_frequency
from theodolite.models import OpenModel
from theodolite.models.guard import measures
from theodolite.models.query_key_parts import LayerPass, of_streams, split_queries_and_keys, visit_layers
from theodolite.system.progress import Progress
from theodolite.theory.decomposition import PARTS, DecompositionByGroups, decompose_by_groups

SPLIT_CONTEXTS = 8
SPLIT_TOKENS = 2048
"""Contexts of a corpus whose logits are split in a survey: 8, or half as many where these are more tokens than that."""

TOKENS_AT_ONCE = 8192
"""More would need more memory than the rest of a survey."""


class SharesPass:
    """Logits of a seeded sample of contexts, each split around the means of other contexts.

    Mean and pos of a context are those of one group of contexts for its queries, of another one for its keys, and it is
    in neither: their noise is in no product with itself. Contexts have different groups, so that leaving out contexts
    shows that noise, too.

    State, of L layers, S sampled contexts and H heads: products (L, S, H, parts, parts), additive and total (L, S, H)
    of `share_sums`; low_frequency (L, S, H, cutoffs) of queries and keys as they are. Of layers that do not attend,
    zeros. Notes: `refused`, layer → why it could not be split, and `heads`, how many each layer has.

    `means` is the state of `Means`, of all contexts. The queries and keys of all contexts but one are made of the
    `streams` that `KeptStreams` has of `sample_of`.
    """

    def __init__(
        self,
        model: OpenModel,
        corpus: Corpus,
        seed: int,
        means: State,
        streams: Float[Tensor, "layers sampled positions width"],
    ) -> None:
        self.model = model
        self.means, self.streams = means, streams
        self.trailing = corpus.trailing(model.tokenizer)
        sample = sample_of(corpus, seed)
        self.corpus = corpus.subset(sample)
        self.groups = Groups(len(corpus.contexts)).of(sample)
        lengths, alike = self.corpus.lengths, defaultdict(list)
        for part in self.corpus.batches(max(1, TOKENS_AT_ONCE // corpus.contexts.shape[1])):
            alike[0 if lengths is None else int(lengths[part.start])].append(part)
        self.alike: list[list[slice]] = list(alike.values())  # batches of contexts of one length
        self.total = len(self.alike) * model.layers
        self.notes: dict[str, Any] = {"refused": {}, "heads": list(model.heads_of)}
        rows = (model.layers, len(sample), model.heads)
        sizes = {
            "products": (*rows, len(PARTS), len(PARTS)),
            "additive": rows,
            "total": rows,
            "low_frequency": (*rows, len(CUTOFFS)),
        }
        self._state: State = {name: torch.zeros(size, dtype=torch.float64) for name, size in sizes.items()}

    def state(self) -> State:
        """Return all tensors."""
        return self._state

    def restore(self, state: State) -> None:
        """Restore a state that `state` returned."""
        for name, values in self._state.items():
            values.copy_(state[name])

    @measures("self.model")
    def run(self, progress: Progress) -> None:
        """Split the logits of every layer, for contexts of one length after another."""
        layers = self.model.layers
        for number in range(progress.done // layers, len(self.alike)):
            progress.checkpoint(number * layers)
            batches = self.alike[number]
            # The passes of a model that is read block by block must be the same for every block.
            left = list(self.model.attending)
            if self.model.streamed is None:
                left = self._of_streams(batches, number * layers, progress)
            for rows in batches if left else ():
                take = functools.partial(self._take, rows=rows)
                visit_layers(self.model, self.corpus.inputs(rows), left, take)
        progress.checkpoint(self.total)

    def _of_streams(self, batches: list[slice], done: int, progress: Progress) -> list[int]:
        """Split the logits of contexts from their streams; returns the layers where these do not say enough."""
        left: list[int] = []

        def visit(layer_pass: LayerPass) -> None:
            layer, read = layer_pass.layer, layer_pass.stream.shape[1]
            try:
                for rows in batches:
                    streams = self.streams[layer, rows, :read]
                    self._take(of_streams(layer_pass, streams, first=rows is batches[0]), rows)
            except WorkError:
                left.append(layer)
            progress.report(done + layer + 1)

        first = batches[0].start
        one = self.corpus.inputs(slice(first, first + 1))
        visit_layers(self.model, one, list(self.model.attending), visit)
        return left

    def _take(self, layer_pass: LayerPass, rows: slice) -> None:
        layer, state = layer_pass.layer, self._state
        leading, grid = self.corpus.leading, self.corpus.grid
        shape = None if grid is None else grid.shape
        read = layer_pass.stream.shape[1]
        text = slice(leading, read - self.trailing)
        query, key = (t[:, :, text] for t in (layer_pass.inputs.query, layer_pass.inputs.key))
        heads = slice(query.shape[1])
        state["low_frequency"][layer, rows, heads] = qk_low_frequency(query, key, shape).cpu()
        parts = self._parts(layer_pass, self.groups[rows])
        try:
            split = split_queries_and_keys(layer_pass, parts, working_dtype(layer_pass.stream))
        except WorkError as error:
            self.notes["refused"][str(layer)] = str(error)
            return
        sums = share_sums(split.query, split.key, split.inputs, self.trailing, leading)
        for name, values in sums.items():
            state[name][layer, rows, heads] = values

    def _parts(self, layer_pass: LayerPass, own: Int[Tensor, " contexts"]) -> DecompositionByGroups:
        """Decompose contexts of these groups by the next group's means for queries, the one after's for keys."""
        layer, read = layer_pass.layer, layer_pass.stream.shape[1]
        filled = (self.means["contexts"][layer] > 0).nonzero().flatten()
        groups, place = len(filled), torch.searchsorted(filled, own)
        sides = [(place + min(step, groups - 1)) % groups for step in (1, 2)]
        needed, index = torch.cat(sides).unique(return_inverse=True)
        # For positions that a group lacks, those after it: none of them is of the other side, or the context's own.
        chains = [filled[(n + torch.arange(0, max(groups - 2, 1), 2)) % groups] for n in needed]
        trailing, leading = self.trailing, self.corpus.leading
        means = [means_of_first(self.means, layer, chain, trailing, leading) for chain in chains]
        mean = torch.stack([mean for mean, _ in means])
        pos = torch.stack([pos for _, pos in means])
        pos = torch.cat([pos[:, place] for _, place in position_slices(read, pos.shape[1], trailing)], dim=1)
        query, key = index.chunk(2)
        return decompose_by_groups(layer_pass.stream, mean, pos, query, key, leading)


def contexts_within(tokens: int, length: int, least: int, most: int) -> int:
    """Count the contexts of `length` tokens that `tokens` allow, within bounds: a fixed cost at any length."""
    return max(least, min(most, tokens // length))


def split_contexts(length: int) -> int:
    """Return contexts of `length` tokens whose logits are split, where there are as many."""
    return contexts_within(SPLIT_TOKENS, length, SPLIT_CONTEXTS // 2, SPLIT_CONTEXTS)


def sample_of(corpus: Corpus, seed: int) -> Int[Tensor, " sampled"]:
    """Draw a seeded sample of at most `split_contexts` contexts, by number and in their order, as many of each group.

    Of contexts of unlike lengths those at least as long as the mean: the energy of the shortest is all of low
    frequency.
    """
    contexts, length = corpus.contexts.shape
    order = torch.randperm(contexts, generator=torch.Generator().manual_seed(seed))
    if corpus.lengths is not None:
        order = order[corpus.lengths[order] >= corpus.lengths.double().mean()]
    group = Groups(contexts).of(order)
    by_group = group.argsort(stable=True)
    before = torch.searchsorted(group[by_group], group[by_group])  # how many are of groups before its own
    turn = torch.empty_like(order)
    turn[by_group] = torch.arange(len(order)) - before
    return order[turn.argsort(stable=True)][: split_contexts(length)].sort().values


def working_dtype(stream: Tensor) -> torch.dtype:
    """Return the dtype in which shares are computed: the model's own, float32 at least."""
    return torch.promote_types(stream.dtype, torch.float32)
