"""Safe reading of a run for the report: what is absent or all NaN comes back as None. And published averages."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from importlib import resources
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from theodolite.corpus.groups import GROUPS
from theodolite.corpus.images import PatchGrid, grid_described
from theodolite.errors import UsageError
from theodolite.estimates import Estimate, Estimates, Floats
from theodolite.judging import Criterion
from theodolite.measure.column import BASIS, Column, declared
from theodolite.measure.head_roles import ROLES, HeadRole
from theodolite.passes.run import Run
from theodolite.system.wording import head_name

OF_GROUPS = GROUPS, "groups of contexts"  # what the standard errors of the layers table rest on


def column(frame: pd.DataFrame, name: str) -> Floats | None:
    """Return a column as float64 in the frame's order, None where it is absent, empty, or has no finite value."""
    if name not in frame.columns:
        return None
    values = pd.to_numeric(frame[name], errors="coerce").to_numpy(dtype=np.float64)
    return values if np.isfinite(values).any() else None


def caller_columns(run: Run, table: str) -> list[Column]:
    """List the columns of a table that the caller's own measurements declared, and that it has."""
    known, described = declared(table), declared(table, run.provenance)
    return [one for name, one in described.items() if name not in known and name in getattr(run, table)]


def limit_of(table: str, name: str) -> Criterion:
    """Return the criterion that a column meets in a healthy model."""
    criterion = declared(table)[name].healthy
    assert criterion is not None, name
    return criterion


def offered(run: Run) -> dict[str, Column]:
    """Return the columns of heads that pickers offer, by name."""
    described = declared("heads", run.provenance).items()
    return {name: one for name, one in described if one.offered and one.kind == "number"}


def opening_head(run: Run) -> tuple[int, int]:
    """Find the head that most clearly has a role: its score is the largest multiple of the threshold; or the first."""
    row = run.heads.loc[_clearness(run).max(axis=1).fillna(0.0).idxmax()]
    return int(row["layer"]), int(row["head"])


def roles_of_heads(run: Run) -> list[list[HeadRole]]:
    """List the roles that each head has, the clearest first, in the order of the heads' table."""
    known = [role for role in ROLES if role.column in run.heads]
    values = _clearness(run).to_numpy(dtype=np.float64)
    ranked = np.argsort(-np.nan_to_num(values), axis=1, kind="stable")
    return [[known[i] for i in order if row[i] >= 1] for row, order in zip(values, ranked, strict=True)]


def _clearness(run: Run) -> pd.DataFrame:
    """Compute every head's score in every role that was measured, as a multiple of the role's threshold."""
    thresholds = {role.column: role.threshold for role in ROLES if role.column in run.heads}
    return run.heads[list(thresholds)] / pd.Series(thresholds, dtype=float)


def array(run: Run, name: str) -> npt.NDArray[Any] | None:
    """Return an array of the run in its own dtype and memory, None where it is absent or empty."""
    tensor = run.arrays.get(name)
    return None if tensor is None or tensor.numel() == 0 else tensor.detach().cpu().numpy()


def need(run: Run, name: str) -> npt.NDArray[Any]:
    """Return `array` for a figure that cannot be drawn without it: `UsageError` where it is absent."""
    return _there(array(run, name), name)


def need_column(frame: pd.DataFrame, name: str) -> Floats:
    """Return `column` for a figure that cannot be drawn without it: `UsageError` where it is absent."""
    return _there(column(frame, name), name)


def _there(values: npt.NDArray[Any] | None, name: str) -> npt.NDArray[Any]:
    if values is None:
        raise UsageError(f"this run has no {name!r}; survey the model on a text to get it")
    return values


def value_of(run: Run, name: str) -> Floats:
    """Return a layer column, NaN where the run has none."""
    values = column(run.layers, name)
    return np.full(len(run.layers), np.nan) if values is None else values


def error_of(run: Run, name: str) -> Floats:
    """Return the standard errors of a column of the layers table, NaN where the run has none."""
    return value_of(run, f"{name}_se")


AT_FLOOR = "at the noise floor"


def at_floor(run: Run, name: str) -> npt.NDArray[np.bool_]:
    """Mark the layers in which nothing of a number is seen above the noise of few contexts.

    It is below 0 though what it estimates cannot be, below its own floor, or empty where what it divides by is noise.
    """
    described, values = declared("layers", run.provenance).get(name), value_of(run, name)
    if described is None or not described.error or name not in run.layers:
        return np.zeros(len(run.layers), dtype=bool)
    floor = value_of(run, described.floor if described.floor == f"{name}_floor" else "")
    below = ((values < 0) & (described.range[0] == 0)) | (values <= floor)
    # Of fewer contexts, shares of the positional basis are empty for want of groups, whatever the noise.
    enough = (provenance(run, "corpus", "contexts") or 0) >= 5
    divides = described.group == BASIS or name == "incoherence_mean"
    return below | (np.isnan(values) & np.isfinite(value_of(run, "position_energy")) & (enough and divides))


def layer_estimates(run: Run, name: str) -> Estimates:
    """Return a layer column with its standard errors."""
    return Estimates(value_of(run, name), error_of(run, name), *OF_GROUPS)


def mean_over_layers(
    values: Sequence[float] | Floats, errors: Floats | None = None
) -> tuple[float, float, float]:
    """Average over layers: mean, standard deviation over layers (over N, as Table 1), standard error of the mean.

    The latter is the mean of the layers' errors, the most that it can be: layers share their contexts. NaN: unknown.
    """
    values = np.asarray(values, dtype=np.float64)
    finite = np.isfinite(values)
    if not finite.any():
        return np.nan, np.nan, np.nan
    known = finite & np.isfinite(values if errors is None else errors)
    error = float(errors[known].mean()) if errors is not None and known.any() else np.nan
    return float(values[finite].mean()), float(values[finite].std()), error


def layer_average(run: Run, name: str) -> tuple[Estimate, float]:
    """Return `mean_over_layers` of a column as an estimate, and the standard deviation over layers."""
    mean, deviation, error = mean_over_layers(value_of(run, name), error_of(run, name))
    return Estimate(mean, error, *OF_GROUPS), deviation


def layer_mean(run: Run, name: str) -> tuple[float, float] | None:
    """Return a column's mean over layers with its standard error; None where `column` gives none."""
    mean, _ = layer_average(run, name)
    return (mean.value, mean.error) if math.isfinite(mean.value) else None


def layer_numbers(run: Run) -> Floats:
    """Return the residual layers 0…L in the frame's order."""
    return need_column(run.layers, "layer")


def blocks(run: Run) -> int:
    """Return L, the number of blocks, with those that do not attend where a text was read."""
    if len(run.layers):
        return int(run.layers["layer"].max())
    return int(run.heads["layer"].max()) + 1 if len(run.heads) else 0


def heads_per_block(run: Run) -> int:
    """Return H, the number of heads of the widest block."""
    return int(run.heads["head"].max()) + 1 if len(run.heads) else 0


def head_labels(run: Run) -> list[str]:
    """Label every row of the head table as `L3H5`, in its order."""
    return [head_name(*place) for place in run.heads[["layer", "head"]].itertuples(index=False)]


def head_grid(run: Run, name: str) -> Floats | None:
    """Lay out a head measure as an (L, H) grid, NaN where a head is missing; None where `column` gives none."""
    values = column(run.heads, name)
    return None if values is None else laid_out(run, values)


def laid_out(run: Run, values: Floats) -> Floats:
    """Lay out a value of each row of the head table as an (L, H) grid, NaN where a head is missing."""
    grid = np.full((blocks(run), heads_per_block(run)), np.nan)
    grid[run.heads["layer"].to_numpy(dtype=int), run.heads["head"].to_numpy(dtype=int)] = values
    return grid


def provenance(run: Run, *path: str) -> Any:
    """Return `run.provenance[a][b]…`, None where a step is missing."""
    value: Any = run.provenance
    for step in path:
        if not isinstance(value, dict) or step not in value:
            return None
        value = value[step]
    return value


def grid_of(run: Run) -> PatchGrid | None:
    """Return how the tokens of the run's images lie; None where it has read text, or nothing."""
    return grid_described(provenance(run, "corpus") or {})


def entropy_limits(run: Run) -> Floats:
    """Compute the highest entropy in nats of each query of each block, (L, T): ln of the keys that it sees.

    A learned sink column is one more outcome beside the keys.
    """
    outcomes = np.array(need(run, "visible_keys"))
    if (learned := column(run.heads, "sink_learned")) is not None:
        outcomes[run.heads["layer"][learned > 0].unique()] += 1
    return np.log(np.maximum(outcomes, 1))


def entropy_share(run: Run) -> Floats | None:
    """Compute each head's mean entropy over the mean of its block's `entropy_limits`, in table order; None without."""
    entropy = column(run.heads, "entropy")
    if entropy is None or array(run, "visible_keys") is None:
        return None
    highest = np.maximum(entropy_limits(run).mean(axis=1), 1e-9)
    return entropy / highest[run.heads["layer"].to_numpy()]


def massive_tokens(run: Run) -> pd.DataFrame:
    """List the tokens with massive activations after the first position, each with its largest value and `layers`."""
    if run.massive.empty:
        return pd.DataFrame()
    ordered = run.massive.sort_values("value", key=np.abs, ascending=False, kind="stable")
    rows = ordered.groupby(["context", "position"], sort=False)
    layers = rows["layer"].agg(lambda found: sorted(map(int, found))).rename("layers")
    return rows.first().drop(columns="layer").join(layers).reset_index()


def attributed(run: Run, pattern: str) -> list[pd.DataFrame]:
    """List the rows of each head of a pattern in the attribution table, strongest head first."""
    if run.attribution.empty:
        return []
    rows = run.attribution[run.attribution["pattern"] == pattern]
    heads = [of_head for _, of_head in rows.groupby(["layer", "head"], sort=True)]
    return sorted(heads, key=lambda of_head: -float(of_head["score"].iloc[0]))


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Convert the rows of a table to plain JSON values; NaN and infinities to None."""

    def plain(value: Any) -> Any:
        value = value.item() if hasattr(value, "item") else value
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return [{str(key): plain(value) for key, value in row.items()} for row in table.to_dict(orient="records")]


def packaged(name: str) -> dict[str, Any]:
    """Read a TOML file that lies beside this one."""
    return tomllib.loads((resources.files("theodolite.report") / name).read_text(encoding="utf-8"))


def evenly(count: int, most: int) -> list[int]:
    """Choose at most `most` of 0…count−1, evenly spread, first and last included."""
    if count <= most:
        return list(range(count))
    return sorted({round(step) for step in np.linspace(0, count - 1, most)})


# Rows of Table 1, whose fields `published.toml` says.
TABLE_1 = tuple(SimpleNamespace(**row) for row in packaged("published.toml")["average"])
# The same on OpenWebText, the one text that all four models were measured on.
AVERAGES: dict[str, SimpleNamespace] = {row.model: row for row in TABLE_1 if row.text == "OpenWebText"}
_FAMILIES = {
    "BERT": ("bert", "electra"),
    "BLOOM": ("bloom", "falcon", "mpt"),
    "Llama 2": ("llama", "mistral", "mixtral", "phi", "qwen", "gemma", "neox", "gpt_oss", "olmo", "cohere"),
}


def closest(run: Run) -> str:
    """Find the published model to show first: the same family, else the same kind of position, else GPT-2."""
    family, positions = ((provenance(run, "model", of) or "").lower() for of in ("family", "positions"))
    for model, parts in _FAMILIES.items():
        if any(part in family for part in parts):
            return model
    return {"rotary": "Llama 2", "alibi": "BLOOM"}.get(positions, "GPT-2")
