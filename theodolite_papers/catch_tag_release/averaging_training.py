"""Small attention models trained to average the numbers after a separator, as in section 4 of Zhang et al. 2025.

Several seeds are trained at once: every parameter has them as its first dimension. The same seeds give the same bytes
on the same machine and number of threads.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from theodolite.system.processor import using_threads
from theodolite_papers.catch_tag_release.averaging_model import mean_after
from theodolite_papers.training.trainer import CLIP, updates

LENGTH = 20
"""Tokens, [SEP] among them."""

WIDTH = 16
"""Of the wider models: eight times that of the paper's."""

PUBLISHED, PUBLISHED_LARGE_TAG = "paper's, s_tag from N(0, 1)", "paper's, s_tag from N(5, 1)"
STANDARD, QK_NORM = f"standard, d = {WIDTH}", f"standard with QK-norm, d = {WIDTH}"
PENALISED = ", sink penalised"
"""What recipes are called."""

HELD_OUT_SEED = 1 << 31
"""Added to a seed for sequences not used in training."""

RECORDED = 10
"""Steps whose losses are averaged to one point of a curve."""

FREE_ATTENTION = 0.15
"""Mean attention of a sequence to [SEP] that costs nothing where it is penalised: half of what makes a sink."""

PENALTY_WEIGHT = 1.0
"""Weight of what exceeds it in the loss: four times the variance of the target, were all attention there."""

START_SCALE = 0.5
"""Of the entries of the paper's matrices before training; at 1 fewer seeds learn."""

START_TAG = 5.0
"""Mean of s_tag with `large_tag`: [SEP] starts outside the range of the numbers, which are N(0, 1) with tag −1."""

WARM_UP, FINAL_RATE = 50, 0.02

Numbers = Float[Tensor, "seeds batch length"]
Places = Int[Tensor, "seeds batch"]


@dataclass(frozen=True)
class AveragingRecipe:
    """Size, schedule and variant of a model that is trained to average.

    width: 2: the paper's architecture; more: a standard one. rate: the peak of a cosine. large_tag: s_tag starts at
    `START_TAG` + N(0, 1). normed: QK-norm in the second layer. penalised: attention to [SEP] costs above
    `FREE_ATTENTION`.
    """

    name: str
    width: int
    steps: int
    batch: int
    rate: float
    large_tag: bool = False
    normed: bool = False
    penalised: bool = False


@dataclass(frozen=True)
class ForwardPass:
    """The output; the first layer's attention, what it adds to the residual stream, and the stream after it."""

    output: Float[Tensor, "seeds batch"]
    attention: Float[Tensor, "seeds batch length length"]
    written: Float[Tensor, "seeds batch length width"]
    hidden: Float[Tensor, "seeds batch length width"]


class TwoLayers(nn.Module, ABC):
    """Two attention layers: the first writes into the residual stream, the second reads it."""

    @abstractmethod
    def embed(self, numbers: Numbers, is_separator: Tensor) -> Tensor:
        """Compute the embeddings E, (seeds, batch, T, width)."""

    @abstractmethod
    def first(self, embedded: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the first layer's attention and what it writes; `visible`: (…, T, T), the keys a query sees."""

    @abstractmethod
    def second(self, hidden: Tensor) -> Tensor:
        """Compute the last token's output, (seeds, batch)."""

    @abstractmethod
    def value_output(self) -> Float[Tensor, "seeds width width"]:
        """Compute the first layer's value-output matrix: W_V¹, times W_O¹ where there is one."""

    @abstractmethod
    def query_key(self) -> Float[Tensor, "seeds width width"]:
        """Compute the second layer's query-key matrix, W_Q² W_K²ᵀ."""

    def forward(
        self,
        numbers: Numbers,
        separator: Places,
        *,
        hide_separator: bool = False,
        ablated: Float[Tensor, "seeds width"] | None = None,
    ) -> ForwardPass:
        """Read sequences. `hide_separator`: from later tokens, in layer 1. `ablated`: projected out of its output."""
        place = torch.arange(numbers.shape[-1])
        visible, is_separator = place[:, None] >= place, place == separator[..., None]
        embedded = self.embed(numbers, is_separator)
        if hide_separator:
            after = place > separator[..., None]
            visible = visible & ~(after[..., :, None] & is_separator[..., None, :])
        attention, written = self.first(embedded, visible)
        if ablated is not None:
            along = ablated[:, None, :, None]
            written = written - (written @ along) @ along.mT
        hidden = embedded + written
        return ForwardPass(self.second(hidden), attention, written, hidden)


class PublishedModel(TwoLayers):
    """Eqs. (1) and (2), with all of θ learned: two coordinates, no weights in the first layer's logits."""

    def __init__(self, generators: Sequence[torch.Generator], *, large_tag: bool = False) -> None:
        super().__init__()
        self.value_1 = _normal(generators, 1, 2, 2)
        self.query_2, self.key_2 = (_normal(generators, 1, 2, 2) for _ in range(2))
        self.value_2 = _normal(generators, 1, 2, 1)
        for parameter in self.parameters():
            parameter.data *= START_SCALE
        self.s_num, self.s_tag = _normal(generators, 1, 1), _normal(generators, 1, 1)
        if large_tag:
            self.s_tag.data += START_TAG

    def embed(self, numbers: Numbers, is_separator: Tensor) -> Tensor:  # noqa: D102
        tag = torch.where(is_separator, -self.s_tag, -torch.ones_like(numbers))
        return torch.stack([torch.where(is_separator, self.s_num, numbers), tag], -1)

    def first(self, embedded: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        attention = (embedded @ embedded.mT).masked_fill(~visible, -torch.inf).softmax(-1)
        return attention, attention @ (embedded @ self.value_1)

    def second(self, hidden: Tensor) -> Tensor:  # noqa: D102
        logits = (hidden[..., -1:, :] @ self.query_2) @ (hidden @ self.key_2).mT
        return (logits.softmax(-1) @ (hidden @ self.value_2))[..., 0, 0]

    def value_output(self) -> Float[Tensor, "seeds width width"]:  # noqa: D102
        return self.value_1[:, 0]

    def query_key(self) -> Float[Tensor, "seeds width width"]:  # noqa: D102
        return (self.query_2 @ self.key_2.mT)[:, 0]


class StandardModel(TwoLayers):
    """Two attention layers of one head with residuals: x embeds as x·u + v, [SEP] as w, and the last token is read."""

    def __init__(
        self, generators: Sequence[torch.Generator], *, width: int = WIDTH, normed: bool = False
    ) -> None:
        super().__init__()
        self.normed, self.temperature = normed, math.sqrt(width)
        self.slope, self.constant, self.separator = (_normal(generators, 1, 1, width) for _ in range(3))
        self.matrices = nn.ParameterDict(
            {
                f"{what}_{layer}": _normal(generators, 1, width, width)
                for layer in (1, 2)
                for what in ("query", "key", "value", "output")
            }
        )
        self.readout = _normal(generators, 1, width, 1)
        for parameter in self.parameters():
            parameter.data /= self.temperature

    def embed(self, numbers: Numbers, is_separator: Tensor) -> Tensor:  # noqa: D102
        of_numbers = numbers[..., None] * self.slope + self.constant
        return torch.where(is_separator[..., None], self.separator, of_numbers)

    def first(self, embedded: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        return self._attend(1, embedded, embedded, visible)

    def second(self, hidden: Tensor) -> Tensor:  # noqa: D102
        last = hidden[..., -1:, :]
        _, written = self._attend(2, last, hidden, torch.ones((), dtype=torch.bool))
        return ((last + written) @ self.readout)[..., 0, 0]

    def value_output(self) -> Float[Tensor, "seeds width width"]:  # noqa: D102
        return (self.matrices["value_1"] @ self.matrices["output_1"])[:, 0]

    def query_key(self) -> Float[Tensor, "seeds width width"]:  # noqa: D102
        return (self.matrices["query_2"] @ self.matrices["key_2"].mT)[:, 0]

    def _attend(self, layer: int, queries: Tensor, keys: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        names = ("query", "key", "value", "output")
        query, key, value, output = (self.matrices[f"{name}_{layer}"] for name in names)
        query_vectors, key_vectors = queries @ query, keys @ key
        if self.normed and layer == 2:
            query_vectors, key_vectors = _unit_scale(query_vectors), _unit_scale(key_vectors)
        logits = query_vectors @ key_vectors.mT / self.temperature
        attention = logits.masked_fill(~visible, -torch.inf).softmax(-1)
        return attention, attention @ (keys @ value @ output)


@dataclass(frozen=True)
class TrainedModels:
    """Models of one kind: as they began, as they ended, and their losses: (seeds, points), `RECORDED` steps each."""

    recipe: AveragingRecipe
    seeds: tuple[int, ...]
    initial: TwoLayers
    model: TwoLayers
    losses: Float[Tensor, "seeds points"]


def draw(generators: Sequence[torch.Generator], count: int, length: int = LENGTH) -> tuple[Numbers, Places]:
    """Draw sequences of the task, `count` a generator: N(0, 1) numbers, [SEP] anywhere but in the last place."""
    numbers = torch.stack([torch.randn(count, length, generator=generator) for generator in generators])
    places = torch.stack([torch.randint(0, length - 1, (count,), generator=each) for each in generators])
    return numbers, places


def build(recipe: AveragingRecipe, generators: Sequence[torch.Generator]) -> TwoLayers:
    """Make a model of a kind before its training, float32."""
    if recipe.width == 2:
        return PublishedModel(generators, large_tag=recipe.large_tag)
    return StandardModel(generators, width=recipe.width, normed=recipe.normed)


def attention_to_separator(
    forward_pass: ForwardPass, separator: Places
) -> Float[Tensor, "seeds batch length"]:
    """Return A¹_it for each query i, 0 for those before [SEP]."""
    index = separator[..., None, None].expand(*forward_pass.attention.shape[:-1], 1)
    return forward_pass.attention.gather(-1, index)[..., 0]


def train_averaging(
    recipe: AveragingRecipe, seeds: Sequence[int], *, steps: int | None = None
) -> TrainedModels:
    """Train one model per seed on the squared error. `steps`: instead of the recipe's own, a multiple of `RECORDED`."""
    steps = recipe.steps if steps is None else steps
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    losses = torch.zeros(len(seeds), steps)
    with using_threads(1):  # more are slower at this size, and sums would depend on their number
        model = build(recipe, generators)
        initial = copy.deepcopy(model)

        def loss(step: int) -> Tensor:
            numbers, places = draw(generators, recipe.batch)
            forward_pass = model(numbers, places)
            errors = (forward_pass.output - mean_after(numbers, places)).square().mean(-1)
            losses[:, step] = errors.detach()
            return errors.sum() + (sink_penalty(forward_pass, places) if recipe.penalised else 0)

        def rate(step: int) -> float:
            cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
            return recipe.rate * (min(1.0, (step + 1) / WARM_UP) * (FINAL_RATE + (1 - FINAL_RATE) * cosine))

        optimizer = torch.optim.Adam(model.parameters())
        for _ in updates(model, optimizer, loss, rate, range(steps), clip=_clip):
            pass
    return TrainedModels(recipe, tuple(seeds), initial, model, losses.unflatten(-1, (-1, RECORDED)).mean(-1))


def sink_penalty(forward_pass: ForwardPass, separator: Places) -> Tensor:
    """Compute a penalised model's loss term: attention to [SEP] in excess of `FREE_ATTENTION`, summed over seeds."""
    after = torch.arange(forward_pass.attention.shape[-1]) > separator[..., None]
    attention = (attention_to_separator(forward_pass, separator) * after).sum(-1) / after.sum(-1)
    return PENALTY_WEIGHT * (attention - FREE_ATTENTION).clamp_min(0).mean(-1).sum()


def _clip(model: nn.Module) -> None:
    """Clip each seed's gradient by its own norm: a seed that fails must not slow the others."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)
    factors = (CLIP / norms).clamp(max=1)
    for gradient in gradients:
        gradient *= factors.view(-1, *(1,) * (gradient.ndim - 1))


def _unit_scale(vectors: Tensor) -> Tensor:
    """Divide vectors by their RMS, without a gain."""
    return vectors * vectors.square().mean(-1, keepdim=True).add(1e-6).rsqrt()


def _normal(generators: Sequence[torch.Generator], *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.stack([torch.randn(*shape, generator=generator) for generator in generators]))
