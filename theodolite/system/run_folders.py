"""Describe a run folder, as far as `run.json` says, and check its files; nothing heavy is imported."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from theodolite.errors import UsageError
from theodolite.system import files
from theodolite.system.wording import listed

RUN = "run.json"

OPTIONS = (
    *("length", "contexts", "seed", "label_by", "encoding", "per_label", "batch", "dtype", "device"),
    *("attention", "local_sinks", "method", "sparsity", "pattern", "rank_ratio", "damping", "exact"),
    *("skip", "format"),
)
"""Entries of a fingerprint, or of what provenance says of a corpus, that a command has an option for."""


def is_run(folder: str | Path) -> bool:
    """Tell whether a folder is a run folder."""
    return (Path(folder) / RUN).is_file()


def check_run(folder: str | Path) -> None:
    """Raise `UsageError` unless it is a run folder."""
    if not is_run(folder):
        raise UsageError(f"no run at {folder}: give a folder that `theodolite survey` wrote")


def measure_anew(folder: str | Path) -> str:
    """Say what to do with a damaged run folder: a survey neither overwrites nor reads one."""
    return f"remove {folder}, then run the survey again"


def check_files(folder: str | Path, names: Collection[str]) -> None:
    """Raise `UsageError` unless all these files of a run are there."""
    if missing := [name for name in names if not (Path(folder) / name).exists()]:
        raise UsageError(f"{folder} lacks {listed(missing, len(missing))}: {measure_anew(folder)}")


def check_tables(folder: str | Path, provenance: Mapping[str, Any]) -> None:
    """Raise `UsageError` unless a run's files are there, and its tables those that were written, by their checksums."""
    sums = provenance.get(files.CHECKSUMS) or {}
    check_files(folder, sums)
    try:
        for name in sums:
            if name.endswith(".parquet"):
                files.read_bytes_checked(Path(folder) / name, sums)
    except (OSError, files.CorruptFile) as error:
        raise UsageError(f"{folder} is damaged ({error}): {measure_anew(folder)}") from error


def provenance_at(folder: str | Path, schema: int | None = None) -> dict[str, Any]:
    """Read a run folder's provenance, of that `schema` if one is given; `UsageError` where it is none, or damaged."""
    check_run(folder)
    try:
        provenance = files.read_json_checked(Path(folder) / RUN)
        version = provenance["schema_version"]
        known = schema in (None, version)
    except files.CorruptFile as error:
        raise UsageError(f"{folder} is damaged ({error}): {measure_anew(folder)}") from error
    except (KeyError, TypeError) as error:
        raise UsageError(f"{folder}/run.json is damaged: {measure_anew(folder)}") from error
    if not known:
        raise UsageError(f"{folder} has schema {version}, this theodolite reads {schema}: survey again")
    if not _is_provenance(provenance):
        raise UsageError(f"{folder}/run.json is damaged: {measure_anew(folder)}")
    return provenance


def _is_provenance(values: dict[str, Any]) -> bool:
    """Tell whether a provenance has the entries that every reader needs, each of its type."""
    model, corpus = values.get("model"), values.get("corpus") or {}
    others = [values.get(name) or {} for name in ("fingerprint", "versions", "checksums", "counts")]
    if not all(isinstance(group, dict) for group in (model, corpus, *others)):
        return False
    sizes = [model.get(name, 0) for name in ("layers", "heads")]  # type: ignore[union-attr]
    sizes += [corpus.get(name) for name in ("contexts", "length")] if corpus else []
    return all(type(size) is int and size >= 0 for size in sizes)


def check_out(out: Path | None) -> None:
    """Raise `UsageError` where a run cannot be written, or something else lies there."""
    files.check_target(out)
    if out is not None and out.exists() and not is_run(out) and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError(f"{out} exists and is no run: choose another --out")


def differences(
    there: dict[str, Any],
    now: dict[str, Any],
    corpus_there: dict[str, Any] | None = None,
    corpus_now: dict[str, Any] | None = None,
) -> str:
    """Say what differs between two fingerprints, and corpora, by the names of options: `--length 64 there, 32 now`."""
    kinds = [kind_of({"fingerprint": each}) for each in (there, now)]
    said = {"kind": "{} there, {} now".format(*kinds)} if kinds[0] != kinds[1] else {}
    for entry, words in (("model", "the model"), ("columns", "the columns that theodolite measures")):
        if there.get(entry) != now.get(entry):
            said[entry] = words
    if there.get("corpus") != now.get("corpus"):
        texts = _entries(
            corpus_there or {}, corpus_now or {}, ("sha256", "labels", "trailing_special_tokens")
        )
        said |= texts or {"corpus": "the text (--corpus, --length, --contexts or --seed)"}
    others = _entries(there, now, ("model", "columns", "corpus", "versions", "schema_version", *KINDS))
    if "--length" in said:
        others.pop("--batch", None)  # its default follows from the length
    said |= others | _entries(there.get("versions") or {}, now.get("versions") or {})
    return "; ".join(said.values()) or "another version of theodolite"


SURVEY, SPECTRA, TRACE, OUTPUTS = "survey", "spectra", "trace", "head outputs"

KINDS = {"trace": TRACE, "outputs": OUTPUTS, "heads": "survey of heads"}
"""What was measured, by the entry of a fingerprint that tells it; without one it is a survey, or spectra."""


def kind_of(provenance: dict[str, Any]) -> str:
    """Return a run's kind, from its provenance: a survey, spectra, or one of `KINDS`."""
    fingerprint = provenance.get("fingerprint") or {}
    named = (name for key, name in KINDS.items() if fingerprint.get(key))
    return next(named, SURVEY if "corpus" in fingerprint else SPECTRA)


def _entries(there: dict[str, Any], now: dict[str, Any], but: tuple[str, ...] = ()) -> dict[str, str]:
    said = {}
    for key in dict.fromkeys([*there, *now]):
        old, new = there.get(key), now.get(key)
        if key in but or key.startswith("labels_") or old == new:
            continue
        if there.get("method") != now.get("method") and not (key in there and key in now):
            continue  # a setting that one of the two methods has not
        option = "--corpus" if key == "name" else f"--{key.replace('_', '-')}" if key in OPTIONS else key
        simple = all(isinstance(value, str | int | float | None) for value in (old, new))
        said[option] = f"{option} {_shown(old)} there, {_shown(new)} now" if simple else option
    return said


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "given" if value else "not given"
    return str(value).removeprefix("torch.")
