"""Estimate norms, energies and shares of means over contexts so that sampling noise adds nothing on average.

The mean of C contexts is the truth and noise, and the noise makes every square of it too large. Split the contexts into
G disjoint groups, whose means P_g (T×d) have independent noise: a product of different groups has the product of the
truth as its expectation. So every number here is made of such products alone (a U-statistic). One below zero is left
so: nothing is seen above the noise. Errors are the jackknife's over the groups.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int, Shaped
from torch import Tensor
from torch.nn import functional

# Share of the jackknife's correction that counts as error of a corrected number. The intervals of the largest
# eigenvalue of noise alone then hold 0 in 95 % of draws, without it in 87 %; of a signal the correction is small.
CORRECTED = 0.25
DENSE = 200  # size from which on the largest eigenvalue alone is sought, by Lanczos' method


@dataclass(frozen=True)
class Jackknifed:
    """A number (…), and what it is without each of the groups, (G, …)."""

    value: Tensor
    without: Tensor

    @classmethod
    def constant(cls, value: Tensor, groups: int) -> Jackknifed:
        """Make a number that no group changes."""
        return cls(value, value.expand(groups, *value.shape))

    @property
    def error(self) -> Tensor:
        """The standard error √((G − 1)/G Σ (θ_g − mean θ_g)²), with G − 1 degrees of freedom."""
        deviations = self.without - self.without.mean(dim=0)
        return deviations.square().mean(dim=0).sqrt() * math.sqrt(len(self.without) - 1)

    def about(self, value: Tensor, error: Tensor) -> Jackknifed:
        """Return another value and error, with the deviations scaled to that error; of none, the first has one."""
        deviations = self.without - self.without.mean(dim=0)
        none = (self.error == 0).to(deviations)
        deviations = deviations - none
        deviations[0] += none * len(deviations)
        size = Jackknifed(value, deviations).error
        return Jackknifed(value, value + deviations * (error / torch.where(size > 0, size, 1.0)))

    def corrected(self) -> Jackknifed:
        """Take off the bias that the jackknife finds, (G − 1)(mean θ_g − θ); `CORRECTED` of it counts as error."""
        bias = (len(self.without) - 1) * (self.without.mean(dim=0) - self.value)
        return self.about(self.value - bias, torch.hypot(self.error, CORRECTED * bias))

    def root(self) -> Jackknifed:
        """Take the root, with the sign of the value; the error is half the longer side of the interval of two errors.

        At 0 a root has no slope to carry an error by. Far above its error, this is the usual error of a root.
        """
        root, (low, high) = _root(self.value), (_root(self.value + side * self.error) for side in (-2, 2))
        return self.about(root, torch.maximum(root - low, high - root) / 2)

    def __getitem__(self, index: Any) -> Jackknifed:
        """Take some of several numbers."""
        every = index if isinstance(index, tuple) else (index,)
        return Jackknifed(self.value[index], self.without[(slice(None), *every)])

    def where(self, kept: Bool[Tensor, " *shape"] | bool) -> Jackknifed:
        """Give NaN for what is not kept."""
        return Jackknifed(
            *(torch.where(torch.as_tensor(kept), v, math.nan) for v in (self.value, self.without))
        )

    def if_known(self, known: Bool[Tensor, " *shape"] | bool) -> Jackknifed:
        """Give no error where it is not known: NaN for what it is without a group."""
        return Jackknifed(self.value, torch.where(torch.as_tensor(known), self.without, math.nan))

    def above_noise(self) -> Tensor:
        """Tell what is above 0 by two standard errors."""
        return self.value > 2 * self.error


def ratio(parts: Shaped[Tensor, "groups ..."], wholes: Shaped[Tensor, "groups ..."]) -> Jackknifed:
    """Compute Σb/Σt over groups, and without each."""
    b, t = parts.sum(dim=0), wholes.sum(dim=0)
    return Jackknifed(b / t, (b - parts) / (t - wholes))


def combined(function: Callable[..., Tensor], *parts: Jackknifed) -> Jackknifed:
    """Compute a function of numbers, from all groups and without each."""
    without = [function(*(part.without[g] for part in parts)) for g in range(len(parts[0].without))]
    return Jackknifed(function(*(part.value for part in parts)), torch.stack(without))


def stacked(rows: Sequence[Jackknifed]) -> Jackknifed:
    """Stack the numbers of several rows: (rows, …)."""
    return Jackknifed(
        torch.stack([row.value for row in rows]), torch.stack([row.without for row in rows], dim=1)
    )


def together(rows: Sequence[Mapping[str, Jackknifed]]) -> dict[str, Jackknifed]:
    """Stack the numbers of several rows by name."""
    return {name: stacked([row[name] for row in rows]) for name in rows[0]}


def leaving_out(function: Callable[[Tensor], Tensor], groups: int) -> Jackknifed:
    """Compute a function of the groups that are used, given as weights (G,) of 1 and 0: all, and all but each."""
    used = _used(groups)
    return Jackknifed(function(used[0]), torch.stack([function(some) for some in used[1:]]))


def product(
    left: Float[Tensor, "groups *rest width"], right: Float[Tensor, "groups *rest width"] | None = None
) -> Jackknifed:
    """Estimate ⟨a, b⟩ of the means a and b of the groups' vectors; without `right`, ‖a‖². NaN with one group."""
    right = left if right is None else right
    whole, other = left.sum(dim=0), right.sum(dim=0)
    paired = torch.linalg.vecdot(left, right)
    groups = len(left)
    value = (torch.linalg.vecdot(whole, other) - paired.sum(dim=0)) / (groups * (groups - 1) or math.nan)
    # ⟨S − a_g, S′ − b_g⟩ − Σ_{h ≠ g} ⟨a_h, b_h⟩
    crossed = torch.linalg.vecdot(left, other) + torch.linalg.vecdot(right, whole)
    pairs = (groups - 1) * (groups - 2) or math.nan
    without = (torch.linalg.vecdot(whole, other) - crossed + 2 * paired - paired.sum(dim=0)) / pairs
    return Jackknifed(value, without)


@dataclass(frozen=True)
class PairProducts:
    """The symmetric (P_a P_bᵀ + P_b P_aᵀ)/2 of all pairs of groups, in the order of `_pairs`.

    Attributes:
        groups: their number.
        upper: the entries on and above the diagonal, row by row, (pairs, rows · (rows + 1)/2).
    """

    groups: int
    upper: Float64[Tensor, "pairs entries"]

    @classmethod
    def of(cls, p: Float[Tensor, "groups rows width"]) -> PairProducts:
        """Multiply the groups' matrices P."""
        groups, rows, _ = p.shape
        p = p.double()
        row, column = torch.triu_indices(rows, rows)
        entries = row * rows + column
        upper = p.new_empty(groups * (groups - 1) // 2, len(entries))
        for pair, (one, other) in zip(upper, _pairs(groups).T.tolist(), strict=True):
            product = p[one] @ p[other].T
            torch.index_select((product + product.T).flatten(), 0, entries, out=pair)
        return cls(groups, upper.div_(2))

    @property
    def _rows(self) -> int:
        return int(math.sqrt(2 * self.upper.shape[1]))

    @property
    def _entries(self) -> Int[Tensor, "2 entries"]:
        return torch.triu_indices(self._rows, self._rows)

    def scaled(self, scale: Float[Tensor, " rows"]) -> PairProducts:
        """Return the products of D P, D diagonal."""
        row, column = self._entries
        return PairProducts(self.groups, self.upper * (scale[row] * scale[column]))

    def of_differences(self) -> PairProducts:
        """Return the products of (P_0 − P_1)/√2, (P_2 − P_3)/√2 …, in which there is nothing but noise."""
        half = self.groups // 2
        differences = torch.zeros(half, self.groups, dtype=torch.float64)
        differences[range(half), range(0, 2 * half, 2)] = math.sqrt(0.5)
        differences[range(half), range(1, 2 * half, 2)] = -math.sqrt(0.5)
        (one, other), (a, b) = (differences[side] for side in _pairs(half)), _pairs(self.groups)
        return PairProducts(half, (one[:, a] * other[:, b] + one[:, b] * other[:, a]) @ self.upper)

    def largest_square(self) -> Jackknifed:
        """Estimate ‖P‖₂², the largest eigenvalue of P Pᵀ, with the jackknife's correction."""
        one, other = _pairs(self.groups)
        row, column = self._entries

        used = _used(self.groups)
        weights = used[:, one] * used[:, other]
        means = weights / weights.sum(dim=1, keepdim=True) @ self.upper

        def largest(mean: Float[Tensor, " entries"]) -> Tensor:
            matrix = mean.new_empty(self._rows, self._rows)
            matrix[row, column] = matrix[column, row] = mean
            return _largest_eigenvalue(matrix)

        every = torch.stack([largest(mean) for mean in means])
        return Jackknifed(every[0], every[1:]).corrected()

    def energy(self, scales: Float[Tensor, "uses rows"] | None = None) -> Jackknifed:
        """Estimate ‖D P Pᵀ D‖_F² by products of four different groups; NaN with fewer than four.

        Args:
            scales: the diagonal D for all groups, then without each; None: 1.
        """
        row, column = self._entries
        squares = 2.0 - (row == column).double()[None]  # an entry above the diagonal is one below it, too
        if scales is not None:
            squares = squares * (scales[:, row] * scales[:, column]).square()
        tables = torch.stack([(self.upper * square) @ self.upper.T for square in squares])
        return _mean_of(tables, _disjoint(self.groups))


def largest_square(p: Float[Tensor, "groups rows width"]) -> Jackknifed:
    """Estimate ‖P‖₂² on the smaller side of P, where there is less noise, with the jackknife's correction."""
    return PairProducts.of(p if p.shape[1] <= p.shape[2] else p.mT).largest_square()


def product_energy(
    left: Float[Tensor, "groups rows width"], right: Float[Tensor, "groups columns width"]
) -> Jackknifed:
    """Estimate ‖A Bᵀ‖_F² = ⟨AᵀA, BᵀB⟩ by products of four different groups; NaN with fewer than four.

    In O(groups² · rows · width²); nothing of rows × columns is formed.
    """
    table = _grams(left) @ _grams(right).T
    return _mean_of(table.unsqueeze(0), _different(len(left)))


def corner_energies(
    left: Float[Tensor, "uses *batch groups low width"],
    right: Float[Tensor, "uses *batch groups low width"],
    counts: Sequence[int],
) -> Jackknifed:
    """Estimate the energies of the first n × n entries of A Bᵀ by products of four different groups, (*batch, counts).

    Args:
        left, right: A and B of each group, as for all groups and then as without each; or one for all of these.
        counts: each n.
    """
    groups = left.shape[-3]
    products = torch.einsum("...anw,...bmw->...abnm", left.double(), right.double()).flatten(-4, -3)
    corners = (products[..., :n, :n].flatten(-2) for n in counts)
    return _mean_of(torch.stack([flat @ flat.mT for flat in corners], dim=-3), _different(groups))


def _pairs(groups: int) -> Int[Tensor, "2 pairs"]:
    return torch.combinations(torch.arange(groups), 2).T


def _grams(p: Float[Tensor, "groups rows width"]) -> Float64[Tensor, "ordered_pairs flat"]:
    """Compute P_aᵀP_b of all ordered pairs of groups."""
    groups, _, width = p.shape
    beside = p.transpose(0, 1).flatten(1)
    products = (beside.T @ beside).unflatten(0, (groups, width)).unflatten(2, (groups, width))
    return products.transpose(1, 2).double().flatten(2).flatten(0, 1)


@functools.cache
def _disjoint(groups: int) -> Float64[Tensor, "uses pairs pairs"]:
    """Mark two pairs of groups that share none by 1: of all groups, and without each."""
    return _without_each(functional.one_hot(_pairs(groups).T, groups).sum(dim=1).double())


@functools.cache
def _different(groups: int) -> Float64[Tensor, "uses ordered_pairs ordered_pairs"]:
    """Mark four different groups by 1, as `_disjoint` does two pairs."""
    each = torch.eye(groups, dtype=torch.float64)
    return _without_each((each[:, None] + each).flatten(0, 1))


def _without_each(holds: Float64[Tensor, "pairs groups"]) -> Float64[Tensor, "uses pairs pairs"]:
    used = 1 - torch.cat([torch.zeros(1, len(holds)), holds.T])
    used = used * (holds <= 1).all(dim=1)  # no group with itself
    return (holds @ holds.T == 0) * used[:, :, None] * used[:, None]


def _mean_of(
    products: Float64[Tensor, "uses *rest pairs pairs"], marked: Float64[Tensor, "all_uses pairs pairs"]
) -> Jackknifed:
    """Average the marked products of all groups, and without each; NaN where none is marked."""
    means = torch.einsum("u...ij,uij->u...", products.expand(len(marked), *products.shape[1:]), marked)
    counts = marked.sum(dim=(1, 2)).reshape(-1, *[1] * (means.ndim - 1))
    means = means / torch.where(counts > 0, counts, math.nan)
    return Jackknifed(means[0], means[1:])


def _used(groups: int) -> Float64[Tensor, "uses groups"]:
    ones = torch.ones(1, groups, dtype=torch.float64)
    return torch.cat([ones, ones - torch.eye(groups, dtype=torch.float64)])


def _root(value: Tensor) -> Tensor:
    return value.abs().sqrt() * value.sign()


def _largest_eigenvalue(matrix: Float64[Tensor, "size size"]) -> Tensor:
    if not len(matrix) or not matrix.isfinite().all():  # of too few groups
        return matrix.new_tensor(math.nan)
    if len(matrix) <= DENSE:
        return torch.linalg.eigvalsh(matrix)[-1]
    from scipy.sparse.linalg import eigsh

    start = np.cos(np.arange(len(matrix)))  # the same in every process
    return torch.from_numpy(eigsh(matrix.numpy(), 1, which="LA", v0=start, return_eigenvectors=False))[0]
