"""Hold every table of this checkout against those of another: `python -m tools.same_tables OTHER [--work FOLDER]`.

OTHER is a clone at the commit to compare with. Both survey, trace, prune and compare the embedded model, with its
weights in float64 and in float32; what differs by more than 1e-10 of a column's largest value is printed. A renamed
table or column is a difference, too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from safetensors.numpy import load_file

HERE = Path(__file__).resolve().parent.parent
TOLERANCE = 1e-10
TEXT = ["--contexts", "64", "--length", "128"]
VOLATILE = {"wall_seconds", "versions", "fingerprint", "schema_version", "created"}


def commands(out: Path) -> list[list[str]]:
    """List the commands that both checkouts run; folders under `out`."""
    runs = [
        [command, *options, "--dtype", dtype, "--out", str(out / f"{command}-{dtype}")]
        for dtype in ("float64", "float32")
        for command, options in (("survey", TEXT), ("spectra", []), ("trace", [*TEXT, "--local-sinks"]))
    ]
    pruned = str(out / "pruned")
    prune = f"prune --method oats --sparsity 0.5 --contexts 16 --length 128 --out {pruned}".split()
    compare = f"compare embedded {pruned} --contexts 32 --length 128 --out {out / 'compare'}".split()
    return [*runs, prune, compare]


def produce(checkout: Path, out: Path) -> None:
    """Make every table of a checkout."""
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    for arguments in commands(out):
        print(f"{checkout.name}: theodolite {' '.join(arguments[:2])} …", file=sys.stderr)
        command = [sys.executable, "-m", "theodolite", *arguments]
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")


def differences(old: Path, new: Path) -> Iterator[str]:
    """Yield one line for each table, column, array or entry that is not the same."""
    names = [{str(path.relative_to(folder)) for path in folder.rglob("*")} for folder in (old, new)]
    for name in sorted(names[0] ^ names[1]):
        if name.endswith((".parquet", ".safetensors")):
            yield f"{name}: only in the {'old' if name in names[0] else 'new'} one"
    for name in sorted(names[0] & names[1]):
        if name.endswith(".parquet"):
            tables = [dict(pd.read_parquet(folder / name)) for folder in (old, new)]
        elif name.endswith(".safetensors"):
            tables = [load_file(folder / name) for folder in (old, new)]
        elif name.endswith(("run.json", "pruning.json", "comparison.json")):
            tables = [_entries(json.loads((folder / name).read_text())) for folder in (old, new)]
        else:
            continue
        for column in sorted(set(tables[0]) | set(tables[1])):
            if column not in tables[0] or column not in tables[1]:
                yield f"{name}: {column} only in the {'old' if column in tables[0] else 'new'} one"
            elif difference := unlike(*(np.asarray(table[column]) for table in tables)):
                yield f"{name}: {column} {difference}"


def _entries(document: dict[str, Any]) -> dict[str, Any]:
    return {name: repr(value) for name, value in document.items() if name not in VOLATILE}


def unlike(old: np.ndarray, new: np.ndarray) -> str:
    """Say how two columns differ; nothing where they do not."""
    if old.shape != new.shape:
        return f"has shape {new.shape}, had {old.shape}"
    if not all(values.dtype.kind in "fiub" for values in (old, new)):
        changed = int((old.astype(str) != new.astype(str)).sum())
        return f"differs in {changed} of {old.size} entries" if changed else ""
    old, new = old.astype(float), new.astype(float)
    if (np.isnan(old) != np.isnan(new)).any():
        return "is NaN elsewhere"
    largest = max(np.abs(old[np.isfinite(old)]).max(initial=0), np.finfo(float).tiny)
    furthest = np.abs((new - old)[old != new]) / largest
    furthest = np.nanmax(furthest, initial=0)
    return f"differs by {furthest:.1e} of its largest value" if furthest > TOLERANCE else ""


def main() -> None:
    """Run both and print what differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path, help="a clone at the commit to compare with")
    parser.add_argument("--work", type=Path, help="folder for both results [default: a temporary one]")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        work = chosen.work or Path(scratch)
        for name, checkout in (("old", chosen.other.resolve()), ("new", HERE)):
            if not (work / name).exists():
                produce(checkout, work / name)
        lines = list(differences(work / "old", work / "new"))
    print("\n".join(lines) or "every table is the same")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
