"""The run folder: the hinge between measuring and reporting. Written once, readable for years.

A run is written under a temporary name and renamed, so a folder by the run's own name is always whole. Nothing here is
ever pickled, measured or drawn.
"""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow
import torch
from torch import Tensor

import theodolite
from theodolite.errors import UsageError
from theodolite.jobs.job import Job, Stage, States, Unfinished
from theodolite.measure.column import fault_of
from theodolite.system import files, run_folders
from theodolite.system.progress import ShowStage
from theodolite.system.wording import tokens_of

if TYPE_CHECKING:
    from theodolite.corpus.corpus import Corpus
    from theodolite.models import OpenModel

SCHEMA_VERSION = 6

ARRAYS = "arrays.safetensors"


@dataclass(frozen=True, repr=False, kw_only=True)
class Run:
    """The result of a survey: tables, arrays and where they come from. Tables that were not measured are empty.

    Attributes:
        layers: one row a residual layer (0 is the input of the first block), N = L + 1 rows.
        heads: one row a head, L · H rows.
        sinks: which tokens became sinks of which head, and how often.
        outliers: outlier dimensions of each layer, with their shares.
        massive: tokens with massive activations after the first position, left out of position and context.
        examples: the tokens of a few contexts with the attention that they receive.
        constituents: the share of each head's logit variance that each pair of parts of query and key carries.
        attribution: which constituents the heads that follow a pattern owe it to.
        traces: every sink of every head: what it catches, the tag that it writes, where the tag lives on.
        arrays: name → tensor; `docs/run-folder.md` lists names and shapes.
        provenance: versions, model, corpus, seed, counts, wall time.
        folder: where it was loaded from or written to, if it was.
    """

    layers: pd.DataFrame = field(default_factory=pd.DataFrame)
    heads: pd.DataFrame = field(default_factory=pd.DataFrame)
    sinks: pd.DataFrame = field(default_factory=pd.DataFrame)
    outliers: pd.DataFrame = field(default_factory=pd.DataFrame)
    massive: pd.DataFrame = field(default_factory=pd.DataFrame)
    examples: pd.DataFrame = field(default_factory=pd.DataFrame)
    constituents: pd.DataFrame = field(default_factory=pd.DataFrame)
    attribution: pd.DataFrame = field(default_factory=pd.DataFrame)
    traces: pd.DataFrame = field(default_factory=pd.DataFrame)
    arrays: dict[str, Tensor]
    provenance: dict[str, Any]
    folder: Path | None = field(default=None, compare=False)

    @property
    def kind(self) -> str:
        """The kind of measurement: a survey, the spectra of weights, a trace of sinks, or outputs of heads."""
        return run_folders.kind_of(self.provenance)

    def __repr__(self) -> str:
        model, corpus = self.provenance["model"], self.provenance.get("corpus")
        text = f" on {corpus['contexts']} × {tokens_of(corpus)} tokens of {corpus['name']}" if corpus else ""
        return f"Run of {model['id']} ({model['layers']} blocks × {model['heads']} heads){text}"

    def _repr_html_(self) -> str:
        """Show what is unusual in a notebook."""
        return theodolite.run_as_html(self)

    @classmethod
    def load(cls, folder: str | Path) -> Run:
        """Read a run folder; `UsageError` where no run is there, a damaged one, or one of another schema."""
        folder = Path(folder)
        provenance = run_folders.provenance_at(folder, SCHEMA_VERSION)
        sums = provenance.pop(files.CHECKSUMS, None) or {}
        paths = [folder / f"{name}.parquet" for name in TABLES]
        run_folders.check_files(folder, [*(path.name for path in paths), ARRAYS])
        try:
            tables = {path.stem: _read_table(path, sums, provenance["model"]) for path in paths}
            arrays = _read_arrays(folder / ARRAYS, sums)
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            raise UsageError(f"{folder} is damaged ({error}): {run_folders.measure_anew(folder)}") from error
        run = cls(**tables, arrays=arrays, provenance=provenance, folder=folder)
        if run.heads.empty and run.kind not in (run_folders.TRACE, run_folders.OUTPUTS):
            raise UsageError(f"{folder} is damaged (it has no heads): {run_folders.measure_anew(folder)}")
        return run

    def save(self, folder: str | Path) -> Run:
        """Write to `folder`, which must not exist yet (`UsageError`), at once or not at all; return the run on disk."""
        folder = Path(folder)
        if folder.exists():
            raise UsageError(f"{folder} exists already: choose another folder or remove it")
        with files.folder_written_atomically(folder) as temporary:
            sums = {}
            for name in TABLES:
                path = temporary / f"{name}.parquet"
                getattr(self, name).to_parquet(path, index=False, write_page_checksum=True)
                sums[path.name] = files.bytes_digest(path.read_bytes())
            sums[ARRAYS] = files.write_checked(temporary / ARRAYS, self.arrays)
            files.write_json_checked(temporary / run_folders.RUN, self.provenance | {files.CHECKSUMS: sums})
            # safetensors writes files that only their owner can read; a run is made to be shared.
            shutil.copymode(temporary / run_folders.RUN, temporary / ARRAYS)
        return replace(self, folder=folder)


TABLES = tuple(each.name for each in fields(Run) if each.type == "pd.DataFrame")


def _read_table(path: Path, sums: dict[str, str], model: dict[str, Any]) -> pd.DataFrame:
    """Read a table that is what was written, and whose columns a reader can use; or `CorruptFile`."""
    # As bytes: a folder by that name would be taken for a table in parts.
    written = BytesIO(files.read_bytes_checked(path, sums))
    table = pd.read_parquet(written, page_checksum_verification=True)
    if fault := fault_of(path.stem, table, model):
        raise files.CorruptFile(f"{path.name}: {fault}")
    return table


def _read_arrays(path: Path, sums: dict[str, str]) -> dict[str, Tensor]:
    """Read the arrays that were written, or `files.CorruptFile`."""
    try:
        return files.read_checked(path, sums.get(path.name))[0]
    except files.CorruptFile as error:
        raise files.CorruptFile(f"{path.name}: {error}") from error


def versions() -> dict[str, str]:
    """Return the versions of the packages that decide the numbers."""
    return {
        "theodolite": theodolite.__version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
    }


def describe_model(model: OpenModel) -> dict[str, Any]:
    """Describe the model and the packages, for the provenance."""
    return {
        "schema_version": SCHEMA_VERSION,
        "versions": versions(),
        "model": {
            "id": model.id,
            **model.weights().described(),
            **model.stored,
            "architecture": model.source.name,
            "family": model.source.family,
            "parameters": sum(p.numel() for p in model.root.parameters()),
            "dtype": str(model.source.dtype).removeprefix("torch."),
            "layers": model.layers,
            "heads": model.heads,
            "width": model.width,
            "head_width": model.head_width,
            "vocabulary": model.vocabulary,
            "causal": model.causal,
            "positions": model.positions,
            **({"attention": model.source.attention} if model.source.attention else {}),
            **({"chosen_layers": list(model.chosen)} if model.chosen else {}),
        },
        "device": model.device.type,
    }


def describe_corpus(corpus: Corpus) -> dict[str, Any]:
    """Describe the corpus, for the provenance."""
    contexts, length = corpus.contexts.shape
    images = corpus.images
    return {
        "name": corpus.name,
        "sha256": corpus.sha256,
        "contexts": contexts,
        "length": length,
        **({} if corpus.lengths is None else {"shortest": int(corpus.lengths.min())}),
        "labels": corpus.label_names,
        "seed": corpus.seed,
        **corpus.selection,
        **({} if images is None else {"grid": images.grid.described(), "pixels": list(images.size)}),
    }


def describe_pass(model: OpenModel, corpus: Corpus, seed: int, fingerprint: dict[str, Any]) -> dict[str, Any]:
    """Describe the corpus, the seed and the counts of a pass, for the provenance."""
    trailing = corpus.trailing(model.tokenizer)
    unknown = getattr(model.tokenizer, "unk_token_id", None)
    counts = {
        "contexts": len(corpus.contexts),
        "tokens": len(corpus.tokens),
        "unknown_tokens": 0 if unknown is None else int((corpus.tokens == unknown).sum()),
    }
    described = describe_corpus(corpus) | {"trailing_special_tokens": trailing}
    return {"corpus": described, "counts": counts, "seed": seed, "fingerprint": fingerprint}


TABLES_TITLE = "making tables"


def run_into(
    stages: Sequence[Stage],
    tables: Callable[[States], Run],
    out: str | Path | None,
    fingerprint: dict[str, Any],
    *,
    corpus: dict[str, Any] | None = None,
    show_progress: ShowStage = lambda what, done, total: None,
) -> Run:
    """Run all stages and make the tables; with a run folder `out`, resume what an interrupted call left there.

    Fingerprint and corpus are those of `Unfinished`; `show_progress` may raise to stop, and all that is whole is saved.
    `UsageError` where `out` holds something else, `WorkError` where the disk refused or a stage could not work.
    """
    work = Unfinished(out, fingerprint, corpus)
    with work.claimed():
        finished = finished_run(work)
        if finished is not None:
            return finished
        job = Job(stages, work, show_progress)
        states = job.run()
        try:
            show_progress(TABLES_TITLE, 0, 1)
            run = tables(states)
            show_progress(TABLES_TITLE, 1, 1)
        except BaseException:
            job.save()
            raise
        if work.out is not None:
            run = run.save(work.out)
        work.remove()
        return run


def finished_run(work: Unfinished) -> Run | None:
    """Return the run that the work becomes, if it is there already; `UsageError` where something else has its name."""
    out = work.out
    if out is None or not out.exists():
        return None
    if files.removed_if_empty(out):
        return None
    run_folders.check_out(out)
    run = Run.load(out)
    saved = run.provenance.get("fingerprint") or {}
    if saved != work.fingerprint:
        differs = run_folders.differences(saved, work.fingerprint, run.provenance.get("corpus"), work.corpus)
        raise UsageError(
            f"{out} holds a run of another model, corpus or options ({differs}): choose another --out or remove it"
        )
    work.remove()  # left when the process was killed as it finished
    return run
