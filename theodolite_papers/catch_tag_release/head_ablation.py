"""Ablate the head of a sink in a live model, and measure what changes behind it: does the model need the tag?

Each ablation has norm-matched random controls. All are compared on the same contexts, so a change has the standard
error of a mean of paired differences. The groups of tokens are those of the untouched model throughout.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from theodolite import Corpus, OpenModel
from theodolite.attention.catches import attend_and_catch
from theodolite.attention.inputs import AttentionInputs
from theodolite.errors import UsageError
from theodolite.models.guard import measures
from theodolite.models.hooks import Hooks, hooked
from theodolite.passes.corpus_pass import batch_of, next_token_losses
from theodolite.sinks.interventions import ablate_direction, attention_knockout, without_low_rank
from theodolite.sinks.prompt import LEFT_OUT, UNCAUGHT
from theodolite.system.progress import ShowStage, shown
from theodolite.theory.grouping import variance_explained

CONTEXTS = 64
"""Contexts at most: every ablation reads them again."""

CONTROLS = 3
"""Seeded controls of each ablation, of which the mean is taken."""

LOSS_CAUGHT, LOSS_OTHERS = "loss on caught tokens", "loss on other tokens"
LOSS_DIFFERENCE = "loss on caught tokens minus that on others"
HEAD_SINKS, LATER_SINKS = "sinks of the head", "later sinks behind the head"


Ablate = Callable[[slice], AbstractContextManager[object]]
"""An ablation, while open, of the contexts of a batch."""


@dataclass(frozen=True)
class _Groups:
    """A head's sinks in a context, by position (below 0: a learned column), and the sink that caught each token.

    `of`: an index into `sinks`, `UNCAUGHT`, or `LEFT_OUT`.
    """

    sinks: Int[Tensor, " sinks"]
    of: Int[Tensor, " positions"]

    def explained(self, hidden: Float[Tensor, "positions width"]) -> float:
        """Compute η² of the grouping; NaN where there is nothing to compare."""
        known = self.of != LEFT_OUT
        return variance_explained(hidden.cpu()[known], self.of[known])


class _HeadTap(Hooks):
    """Record a head's groups in each context of a batch, later sinks behind it, and η² of given groups by layer."""

    def __init__(self, layer: int, head: int, given: Sequence[_Groups] = ()) -> None:
        self.layer, self.head = layer, head
        self.given = given
        self.groups: list[_Groups] = []
        self.later_sinks = torch.zeros(len(given), dtype=torch.float64)
        self.eta: list[Tensor] = []

    def stream(self, layer: int, hidden: Tensor) -> None:
        if self.given and layer > self.layer:
            etas = [groups.explained(h) for groups, h in zip(self.given, hidden, strict=True)]
            self.eta.append(torch.tensor(etas, dtype=torch.float64))

    def attention(self, layer: int, inputs: AttentionInputs) -> Tensor:
        output, contexts = attend_and_catch(inputs)
        for catches in contexts if layer == self.layer else ():
            of_head = catches.head == self.head
            groups = torch.full((inputs.query.shape[2],), LEFT_OUT)
            groups[catches.counted[catches.of[of_head].unique()].any(dim=0).cpu()] = UNCAUGHT
            for number, caught in enumerate(catches.caught[of_head].cpu()):
                groups[caught] = number
            self.groups.append(_Groups(catches.position[of_head].cpu(), groups))
        if self.given and layer > self.layer:
            later = [float((catches.position > 0).sum()) for catches in contexts]
            self.later_sinks += torch.tensor(later, dtype=torch.float64)
        return output


@measures("model")
def ablation_test(
    model: OpenModel,
    corpus: Corpus,
    layer: int,
    head: int,
    direction: Float[Tensor, " width"],
    show_progress: ShowStage = lambda what, done, total: None,
) -> pd.DataFrame:
    """Ablate one head that has sinks, and measure what changes.

    Ablations: its tag, by projecting it out of its output (control: as much from every token, along random directions
    of what the head can write); its attention to its sinks (control: to as many other keys of each context); the
    leading part of W_Q, W_K, W_V of its layer, of the head width over eight (control: random matrices with the same
    singular values).

    Measures, one value per context: next-token loss in nats on caught tokens and on others; sinks of the head; sinks at
    later positions in all heads of deeper layers; η² of the head's own grouping in each later residual layer.

    Args:
        model: a model with an output head.
        corpus: of this the contexts in which the head has a sink, at most `CONTEXTS`.
        layer, head: which.
        direction: of the tag, in the residual stream, such as a row of `tag_direction`.
        show_progress: told (what is being done, ablations done, ablations in all); it may raise to stop.

    Returns:
        A row for each `ablation` and `measure`: `untouched`, `change` and `change_se`, `control` and `control_se` (the
        change under the controls), `beyond` and `beyond_se` (the change less that under the controls, paired by
        context; the spread of the controls is in its error), `beyond_most`, `beyond_least` and their `_se` (the same of
        the one control under which the measure rises most, or falls most), `contexts` that have this measure.

    Raises:
        UsageError: a model without an output head, other contexts than of text and of one length, or none in which
            the head has a sink.
    """
    if corpus.lengths is not None or not corpus.text_alone:
        raise UsageError(
            "an ablation test needs a text in contexts of one length: make the corpus with pack=True"
        )
    if model.source.predict is None:
        raise UsageError(f"{model.id} predicts no tokens: an ablation test needs the loss")
    ids, groups = _contexts_with_sinks(model, corpus, layer, head)
    batch = batch_of(corpus, None)

    def effects(ablate: Ablate) -> dict[str, Float[Tensor, " contexts"]]:
        """Return each measure by name; NaN for a context that has none of it."""
        batches: list[dict[str, Tensor]] = []
        for start in range(0, len(ids), batch):
            part = slice(start, min(start + batch, len(ids)))
            tap = _HeadTap(layer, head, groups[part])
            with ablate(part), hooked(model, tap):
                loss = next_token_losses(model.logits(ids[part]), ids[part])
            of = torch.stack([each.of[:-1] for each in groups[part]])  # the last token has no next one
            of_caught, of_others = _mean_where(loss, of >= 0), _mean_where(loss, of == UNCAUGHT)
            sinks = torch.tensor([len(each.sinks) for each in tap.groups], dtype=torch.float64)
            values = {LOSS_CAUGHT: of_caught, LOSS_OTHERS: of_others, LOSS_DIFFERENCE: of_caught - of_others}
            values |= {HEAD_SINKS: sinks, LATER_SINKS: tap.later_sinks}
            etas = enumerate(tap.eta, start=layer + 1)
            batches.append(values | {f"η² in layer {later}": eta for later, eta in etas})
        return {name: torch.cat([values[name] for values in batches]) for name in batches[0]}

    untouched = effects(lambda part: nullcontext())

    def change_under(ablate: Ablate) -> dict[str, Tensor]:
        return {name: value - untouched[name] for name, value in effects(ablate).items()}

    rows = []
    ablations = _ablations(model, layer, head, direction, groups)
    for ablation, ablate, control in shown(ablations, "ablations", show_progress):
        change = change_under(ablate)
        controls = [change_under(functools.partial(control, seed)) for seed in range(CONTROLS)]
        for name, value in untouched.items():
            by_seed = torch.stack([effect[name] for effect in controls])
            mean, means = by_seed.mean(dim=0), torch.tensor([_mean(values)[0] for values in by_seed])
            row: dict[str, Any] = {"ablation": ablation, "measure": name, "untouched": _mean(value)[0]}
            for column, values in (
                ("change", change[name]),
                ("control", mean),
                ("beyond", change[name] - mean),
                ("beyond_most", change[name] - by_seed[int(means.argmax())]),
                ("beyond_least", change[name] - by_seed[int(means.argmin())]),
            ):
                row[column], row[f"{column}_se"] = _mean(values)
            row["beyond_se"] = math.hypot(row["beyond_se"], float(means.std() / CONTROLS**0.5))
            rows.append(row | {"contexts": int(value.isfinite().sum())})
    return pd.DataFrame(rows)


def _contexts_with_sinks(
    model: OpenModel, corpus: Corpus, layer: int, head: int
) -> tuple[Int[Tensor, "contexts positions"], list[_Groups]]:
    chosen, groups = [], []
    for part in corpus.contexts.split(batch_of(corpus, None)):
        tap = _HeadTap(layer, head)
        with hooked(model, tap):
            model.forward(part)
        for ids, of_context in zip(part, tap.groups, strict=True):
            if bool((of_context.of >= 0).any()):
                chosen.append(ids)
                groups.append(of_context)
        if len(chosen) >= CONTEXTS:
            break
    if not chosen:
        raise UsageError(
            f"head {head} of layer {layer} has no sink in this text: choose another --layer and --head"
        )
    return torch.stack(chosen[:CONTEXTS]), groups[:CONTEXTS]


def _ablations(
    model: OpenModel, layer: int, head: int, direction: Tensor, groups: list[_Groups]
) -> list[tuple[str, Ablate, Callable[[int, slice], AbstractContextManager[object]]]]:
    """List the ablations of a head: name, ablation, and by seed a norm-matched random control."""
    rank = max(1, model.head_width // 8)
    sinks = torch.zeros(len(groups), len(groups[0].of), dtype=torch.bool)
    for context, of_context in enumerate(groups):
        sinks[context, of_context.sinks[of_context.sinks >= 0]] = True
    column = torch.tensor([bool((of_context.sinks < 0).any()) for of_context in groups])
    count = (sinks.sum(dim=1) + column).unsqueeze(1)

    def others(seed: int) -> Bool[Tensor, "contexts positions"]:
        """Draw as many keys of each context that are no sinks, and not the first; one for a learned column, too."""
        noise = torch.rand(sinks.shape, generator=torch.Generator().manual_seed(seed))
        noise[sinks] = 2.0
        noise[:, 0] = 2.0
        return noise.argsort(dim=1).argsort(dim=1) < count

    return [
        (
            "tag ablated",
            lambda part: ablate_direction(model, layer, head, direction),
            lambda seed, part: ablate_direction(model, layer, head, direction, control=seed),
        ),
        (
            "sinks knocked out",
            lambda part: attention_knockout(model, layer, head, sinks[part], sink_column=bool(column.any())),
            lambda seed, part: attention_knockout(model, layer, head, others(seed)[part]),
        ),
        (
            f"rank {rank} of Q, K, V removed",
            lambda part: without_low_rank(model, layer, rank),
            lambda seed, part: without_low_rank(model, layer, rank, control=seed),
        ),
    ]


def _mean_where(values: Tensor, chosen: Tensor) -> Tensor:
    """Average each row over the chosen ones; NaN where there is none."""
    count = chosen.sum(dim=1)
    return torch.where(count > 0, (values * chosen).sum(dim=1) / count.clamp_min(1), torch.nan)


def _mean(values: Tensor) -> tuple[float, float]:
    """Return the mean over the contexts that have a value, and its standard error."""
    known = values[values.isfinite()]
    if not len(known):
        return float("nan"), float("nan")
    error = float(known.std() / len(known) ** 0.5) if len(known) > 1 else float("nan")
    return float(known.mean()), error
