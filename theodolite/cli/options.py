"""Shared by the commands: options, opening models, reading texts, showing results. Imports nothing heavy."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_type_hints

import typer
from rich.console import Console

from theodolite.cli.screen import bars, print_json, say_dimly, screen
from theodolite.corpus.documents import READERS, TABLES, Columns, holds_images
from theodolite.corpus.spec import KEYWORDS, check_spec
from theodolite.errors import UsageError
from theodolite.system import embedded
from theodolite.system.checkpoint_folders import local_checkpoint, of_page
from theodolite.system.choices import check_attention, check_dtype, check_one_place, refuse_unread
from theodolite.system.wording import counted, gguf_described, listed, model_name, visible

if TYPE_CHECKING:
    from theodolite.corpus.corpus import Corpus
    from theodolite.models import OpenModel
    from theodolite.passes.run import Run


DEFAULT_CONTEXTS = 256
DEFAULT_LENGTH = 512  # context length where the model has positions for more, and where it sets no limit

Model = Annotated[
    str | None,
    typer.Argument(help="Folder, GGUF file or hub name (NAME@REVISION) [default: the embedded model]."),
]
Models = Annotated[
    list[str] | None,
    typer.Argument(help="As many folders, GGUF files or hub names [default: the embedded model]."),
]
Batch = Annotated[int | None, typer.Option(help="Contexts per forward pass [default: 4096 tokens].")]
RunFolder = Annotated[
    Path | None, typer.Option("--out", "-o", help="Run folder to write [default: runs/MODEL-CORPUS].")
]
MOST_LAYERS = 100_000  # of a span that is written out
Stream = Annotated[
    bool, typer.Option("--stream", help="Read the model's files block by block, in the memory of one.")
]
Layers = Annotated[
    str | None,
    typer.Option(
        "--layers",
        metavar="0,5,10-12",
        help="Blocks whose heads are looked at, counted from 0 [default: all]. Hidden states are those of all blocks.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print only the result, as JSON.")]


def numbers_of(given: str | None, option: str) -> list[int] | None:
    """Parse numbers and spans of them, such as 0,5,10-12, in order; `UsageError` where it is something else."""
    if given is None:
        return None
    numbers: list[int] = []
    for part in given.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last) < MOST_LAYERS):
            raise UsageError(f"{option} {visible(given, 40)}: give numbers and spans, such as 0,5,10-12")
        numbers += range(int(first), int(last) + 1)
    return sorted(set(numbers))


def option(description: str, default: Any = None, *names: str, **how: Any) -> Any:
    """Declare an option: a field of a dataclass, or a parameter of a command `with_option_groups`."""
    return field(default=default, metadata={"option": typer.Option(*names, help=description, **how)})


def contexts_option(default: int) -> Any:
    """Declare `--contexts`."""
    most = f"[default: {default}; with --per-label, as many as the labels give]"
    return option(f"Maximum number of contexts {most}.")


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command for Typer in which an `option`, and each field of a dataclass parameter, is an option."""
    signature, types = inspect.signature(command), get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in types.items() if is_dataclass(kind)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        declared = [(name, types[name], parameter.default)]
        if name in groups:
            kinds = get_type_hints(groups[name], include_extras=True)
            declared = [(each.name, kinds[each.name], each) for each in fields(groups[name])]
        for each, kind, default in declared:
            if isinstance(default, Field):
                kind = Annotated[kind, default.metadata["option"]] if default.metadata else kind
                default = parameter.empty if default.default is MISSING else default.default
            how: dict[str, Any] = {"default": default, "annotation": kind}
            parameters.append(inspect.Parameter(each, parameter.KEYWORD_ONLY, **how))

    @functools.wraps(command)
    def flat(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{each.name: given.pop(each.name) for each in fields(group)})
        command(**given)

    flat.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return flat


@dataclass(frozen=True)
class Opening:
    """Options of how a model is opened."""

    dtype: str = option(
        "auto (the checkpoint's; GGUF: float32), float32, bfloat16, float16 or float64.", "auto"
    )
    device: str | None = option("cpu, cuda, cuda:1, … [default: cuda if there is one].")
    device_map: str | None = option("auto spreads the model over devices (needs the extra `accelerate`).")
    attention: str | None = option("Of an encoder-decoder: decoder (the default), encoder or cross.")

    def check(self, *models: str | None) -> None:
        """Raise `UsageError` for wrong options or paths, before any library of models is imported."""
        check_dtype(self.dtype)
        check_attention(self.attention)
        check_one_place(self.device, self.device_map)
        for model in models:
            name, options = self._options(model)
            if name is not None and options["revision"] is None:
                local_checkpoint(name)

    def read_first(
        self,
        model: str | None,
        text: Text | None,
        stopped: Callable[[], bool] = lambda: False,
        batch: int | None = None,
        check: Callable[[OpenModel, Corpus | None], object] = lambda model, corpus: None,
        **how: Any,
    ) -> Corpus | None:
        """Read the text by configuration and tokenizer, and `check`, before weights are read; None: impossible."""
        from theodolite.models.open import before_weights
        from theodolite.passes.corpus_pass import batch_of, check_fit

        name, options = self._options(model)
        tower: Any = "vision" if text is not None and text.of_images else None
        known = before_weights(name, options["attention"], options["revision"], tower)
        if known is None:
            return None
        corpus = None
        if text is not None and known.vocabulary is not None:
            corpus = text.read(known, stopped, **how)
            if how.get("stride") is None:
                check_fit(known, corpus, least_contexts=1)
                batch_of(corpus, batch)
        check(known, corpus)
        return corpus

    def open(self, model: str | None, text: Text | None = None) -> OpenModel:
        """Open the model (None: the embedded one), saying so; of CLIP the tower of images where the text is some."""
        from theodolite.models import open_model

        name, options = self._options(model)
        options |= {"tower": "vision" if text is not None and text.of_images else None}
        options |= {"device": self.device, "device_map": self.device_map}
        with screen.status(f"opening {name or 'the embedded model'}"):
            return self._opened_by(open_model, name, options)

    def open_streamed(
        self, model: str | None, stopped: Callable[[], bool], device: str | None = None
    ) -> OpenModel:
        """Open the model so that its blocks are read as they run, with a bar while its files are hashed."""
        from theodolite.models import open_streamed

        refuse_unread("a streamed model has no such option", {"--device-map": self.device_map})
        name, options = self._options(model)
        options = {option: value for option, value in options.items() if value is not None}
        megabytes = 1 << 20
        with bars(stopped, unit="MB") as show:

            def show_progress(done: int, total: int) -> None:
                show("hashing weights", done // megabytes, total // megabytes)

            options |= {"device": self.device or device, "show_progress": show_progress}
            return self._opened_by(open_streamed, name, options)

    def _opened_by(
        self, open_by: Callable[..., OpenModel], name: str | None, options: dict[str, Any]
    ) -> OpenModel:
        from theodolite.models.stored.loading import hide_progress_bars

        hide_progress_bars()
        model = open_by(name, say=say_dimly, **options)
        if model.stored:
            dtype = str(model.source.dtype).removeprefix("torch.")
            say_dimly(f"{model_name(model.id)}: {gguf_described(model.stored['gguf'], dtype)}")
        return model

    def _options(self, model: str | None) -> tuple[str | None, dict[str, Any]]:
        """Return the model's name without @REVISION or the address around it, and the options for opening it."""
        options = {"dtype": self.dtype, "revision": None, "attention": self.attention}
        if model is None or Path(model).exists():
            return model, options
        name, revision = of_page(model) or model.partition("@")[::2]
        return None if model == embedded.NAME else name, options | {"revision": revision or None}


@dataclass(frozen=True)
class Text:
    """Options of the text that is read."""

    corpus: str | None = option(
        f"A file or folder of {' '.join(READERS)}, or of images, one label a subfolder; one of "
        f"{', '.join(KEYWORDS)}; or hf:NAME[:CONFIG[:SPLIT]] [default: docs, the text in "
        "every Python; of evaluate: held-out, its topics that the embedded model was not trained on]."
    )
    length: int | None = option("Tokens per context [default: the model's maximum, up to 512].")
    contexts: int | None = contexts_option(DEFAULT_CONTEXTS)
    per_label: int | None = option("Exactly so many contexts of each label that has as many (--label-by).")
    seed: int = option("Random seed.", 0)
    text_column: str = option(
        f"Column of texts or conversations of tables ({', '.join(TABLES)}, hf:NAME).", "text"
    )
    label_by: str | None = option(
        "What labels a document: file, folder, row (each of a table a label of its own) or column:NAME "
        "[default: a table's column label or topic, titles of WikiText's articles, subfolders of images]."
    )
    encoding: str | None = option("Of files without a byte order mark, as latin-1 [default: utf-8].")

    default_contexts: ClassVar[int] = DEFAULT_CONTEXTS

    @property
    def columns(self) -> Columns:
        """The table columns to read."""
        return Columns(self.text_column, self.label_by, self.encoding)

    @property
    def of_images(self) -> bool:
        """True for a folder of images; False for data sets of the hub."""
        return self.corpus is not None and holds_images(Path(self.corpus))

    def check(self) -> None:
        """Raise `UsageError` for a text that is not there, and wrong options, before any library is imported."""
        from theodolite.corpus.sampling import Choice, check_length

        if self.length is not None:
            check_length(self.length)
        Choice(self.contexts, self.seed, self.per_label).check()
        check_spec(self.corpus, self.columns, self.per_label)

    def check_stream(self) -> None:
        """Check the options of a text that is read as one sequence, which has no contexts to choose."""
        read = ("--corpus", "--length", "--contexts", "--text-column", "--encoding")
        unread = {option: value for option, value in self.given().items() if option not in read}
        refuse_unread("with --stride the text is one sequence", unread)
        self.check()

    def read(
        self,
        model: OpenModel,
        stopped: Callable[[], bool],
        *,
        stride: int | None = None,
        special_tokens: bool = True,
    ) -> Corpus:
        """Read the text for this model, saying so on the screen; for windows by a stride, as one stream."""
        from theodolite.corpus.named import make_stream
        from theodolite.evaluate.perplexity import window_length
        from theodolite.models import image_reader

        of_images = model.vocabulary is None
        reader: Any = image_reader(model) if of_images else model.required_tokenizer()
        self.check()
        what = "images" if of_images else "tokens"
        with screen.status("reading the text") as status:

            def show(count: int) -> None:
                if stopped():
                    raise KeyboardInterrupt
                status.update(f"reading the text: {count:,} {what}")

            if stride is not None and not of_images:
                window = window_length(model, self.length)
                tokens = None if self.contexts is None else window + (self.contexts - 1) * stride
                corpus = make_stream(self.corpus, reader, self.columns, tokens, special_tokens=special_tokens)
            else:
                corpus = self._read(model, reader, show)
        for line in _remarks(corpus, "contexts" if stride is None else "windows"):
            say_dimly(f"{corpus.name}: {line}")
        return corpus

    def length_for(self, model: OpenModel, written: int = 0) -> int:
        """Return the tokens of a context, behind which the model may have to write some."""
        longest = DEFAULT_LENGTH if model.longest is None else model.longest - written
        return self.length or min(DEFAULT_LENGTH, longest)

    def _read(self, model: OpenModel, reader: Any, show: Callable[[int], None]) -> Corpus:
        from theodolite.corpus.named import make_corpus
        from theodolite.corpus.sampling import Choice

        every = self.per_label is not None and not self.columns.rows
        contexts = self.contexts
        if contexts is None and not every:
            contexts = max(self.default_contexts, self.per_label or 0)
        length = self.length if model.vocabulary is None else self.length_for(model)
        choice = Choice(contexts, self.seed, self.per_label, show=show)
        return make_corpus(self.corpus, reader, length, choice, self.columns)

    def given(self) -> dict[str, object]:
        """Return the options given that say what is read, to be refused where nothing is."""
        defaults = {option.name: option.default for option in fields(self) if option.name != "seed"}
        given = {name: value for name, value in vars(self).items() if value != defaults.get(name, value)}
        return {f"--{name.replace('_', '-')}": value for name, value in given.items()}


@dataclass(frozen=True)
class PairedText(Text):
    """Options of a text that may have a source, for an encoder-decoder, or images."""

    source_column: str | None = option("Column of tables that an encoder reads [default: --text-column].")
    image_column: str | None = option("Column of images (paths or bytes), one in each text, of tables.")

    @property
    def columns(self) -> Columns:
        """The table columns to read."""
        return replace(super().columns, source=self.source_column, image=self.image_column)

    def check(self) -> None:
        """As of any text; a model reads either a source or an image beside it."""
        super().check()
        if self.source_column is not None:
            refuse_unread("--source-column gives each row a source", {"--image-column": self.image_column})

    def _read(self, model: OpenModel, reader: Any, show: Callable[[int], None]) -> Corpus:
        if self.image_column is None and self.source_column is None:
            return super()._read(model, reader, show)
        if model.source.attention == "encoder" and self.source_column is not None:  # which reads nothing else
            encoder = replace(self, text_column=self.source_column, source_column=None)
            return encoder._read(model, reader, show)

        from theodolite.corpus.corpus import Corpus
        from theodolite.models import pictured_text_reader

        path, length = str(self.corpus), self.length_for(model)
        how: dict[str, Any] = {
            "contexts": self.contexts or max(self.default_contexts, self.per_label or 0),
            "show_tokens": show,
        }
        names = ("seed", "text_column", "label_by", "per_label", "encoding")
        how |= {name: getattr(self, name) for name in names}
        if self.image_column is not None:
            reader = pictured_text_reader(model)
            return Corpus.from_pictured(path, reader, length, self.image_column, **how)
        start, alike = model.source.target_start, model.source.attention == "cross"
        assert self.source_column is not None
        return Corpus.from_pairs(path, reader, length, self.source_column, start, alike=alike, **how)


LEFT_OUT = {
    "too_short": ("context", "of fewer than 4 tokens left out"),
    "picture_cut": ("image", "larger than --length left out"),
    "rows_without_text": ("document", "without a text"),
    "rows_without_label": ("document", "without a label"),
    "rows_without_image": ("document", "without an image"),
    "images_unread": ("image", "not read: --image-column image reads them"),
}
"""What a corpus counts, and what is said of it."""


def _remarks(corpus: Corpus, parts: str) -> Iterator[str]:
    """Say how much of a text was read, what was left out, and how labels were balanced."""
    selection = corpus.selection
    if "tokens_read" in selection:
        yield f"{parts} of its first {selection['tokens_read']:,} tokens"
    for entry, (noun, why) in LEFT_OUT.items():
        if selection.get(entry):
            yield f"{counted(selection[entry], noun)} {why}"
    for why, files in selection.get("files_passed_over", {}).items():
        shown = [visible(name, 80) for name in files["names"][:5]]
        more = files["count"] - len(shown)
        names = listed([*shown, f"{more:,} more"] if more else shown, 6)
        yield f"{counted(files['count'], 'file')} passed over ({why}): {names}"
    if "per_label" in selection:
        labels = counted(len(corpus.label_names), "label")
        line = f"{labels} with {counted(selection['per_label'], 'context')} each"
        if selection["labels_too_short"]:
            line += f"; {selection['labels_too_short']} with fewer left out"
        if selection["labels_not_drawn"]:
            line += f"; {selection['labels_not_drawn']} more not drawn (--contexts)"
        yield line


def written_report(run: Run, folder: Path) -> Path:
    """Write the report of a survey into its folder, saying so on the screen."""
    from theodolite.report.page import write_report

    with screen.status("writing the report"):
        return write_report(run, folder / "report")


def finish(run: Run, folder: Path | None, as_json: bool) -> None:
    """Write the report of a survey, show its tables, or print them as JSON, and say where it is."""
    from theodolite.report.terminal import show_run, tables_as_json

    page = None if folder is None else written_report(run, folder)
    if as_json:
        print_json(tables_as_json(run))
    else:
        show_run(run, Console())
    if page is not None:
        say_where(page, as_json)


def finish_trace(run: Run, folder: Path, as_json: bool) -> None:
    """Write and show the page of a trace, or print its tables as JSON, and say where it is."""
    from theodolite.report.outcome import Outcome, write_index, write_outcome
    from theodolite.report.sink_trace import TRACE, show_trace
    from theodolite.report.terminal import show_outcome, tables_as_json

    outcome = Outcome()
    show_trace(outcome, run)
    page = write_outcome(TRACE, outcome, run.provenance, folder / "report")
    write_index(folder / "report", "Trace of sinks in")
    if as_json:
        print_json(tables_as_json(run))
    else:
        show_outcome(TRACE, outcome, Console(soft_wrap=True))
    say_where(page, as_json)


def say_where(page: Path, as_json: bool) -> None:
    """Print where a page is: on standard error if JSON goes to standard output."""
    (screen if as_json else Console(soft_wrap=True)).print(f"Report: {page}", highlight=False)


def default_folder(model: OpenModel, corpus: Corpus, kind: str = "") -> Path:
    """Return the folder of a result where --out is not given."""
    return Path("runs") / f"{model_name(model.id)}-{model_name(corpus.name)}{kind}"
