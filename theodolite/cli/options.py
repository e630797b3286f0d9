"""Shared by the commands: options, opening models, reading texts, showing results. Nothing is measured here.

Heavy imports happen inside the functions, so that `theodolite --help` answers at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from rich.console import Console

from theodolite.cli.screen import bars, print_json, say_dimly, screen
from theodolite.corpus.documents import IMAGE_COLUMN, READERS, TABLES, Columns
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


def _said_how_stored(model: OpenModel) -> OpenModel:
    """Return the model, having said how a GGUF file stores its weights."""
    if model.stored:
        dtype = str(model.source.dtype).removeprefix("torch.")
        say_dimly(f"{model_name(model.id)}: {gguf_described(model.stored['gguf'], dtype)}")
    return model


DEFAULT_CONTEXTS = 256
DEFAULT_LENGTH = 512
"""Context length where the model has positions for more, and where it sets no limit."""

Model = Annotated[
    str | None,
    typer.Argument(
        help="Folder, GGUF file or hub name (NAME or NAME@REVISION) of a model; the embedded one if left out.",
        show_default=False,
    ),
]
Models = Annotated[
    list[str] | None,
    typer.Argument(
        help="Folder, GGUF file or hub name (NAME or NAME@REVISION), or several; the embedded model if left out.",
        show_default=False,
    ),
]


def contexts_help(default: int) -> str:
    """Return the help of `--contexts`."""
    return f"Maximum number of contexts [default: {default}; with --per-label, as many as the labels give]."


Batch = Annotated[int | None, typer.Option(help="Contexts per forward pass [default: 4096 tokens].")]
RunFolder = Annotated[
    Path | None, typer.Option("--out", "-o", help="Run folder to write [default: runs/MODEL-CORPUS].")
]
MOST_LAYERS = 100_000  # of a span that is written out
Stream = Annotated[
    bool,
    typer.Option("--stream", help="Read the model's files block by block: memory is that of one block."),
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
    """Parse numbers and spans of them, such as 0,5,10-12; `UsageError` where it is something else."""
    if given is None:
        return None
    numbers: list[int] = []
    for part in given.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last) < MOST_LAYERS):
            raise UsageError(f"{option} {visible(given, 40)}: give numbers and spans, such as 0,5,10-12")
        numbers += range(int(first), int(last) + 1)
    return numbers


@dataclass(frozen=True)
class Opening:
    """Options of how a model is opened."""

    dtype: Annotated[
        str,
        typer.Option(
            help="auto (the checkpoint's; of a GGUF file float32), float32, bfloat16, float16 or float64."
        ),
    ] = "auto"
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, … [default: cuda if there is one].")
    ] = None
    device_map: Annotated[
        str | None, typer.Option(help="auto spreads the model over devices (needs the extra `accelerate`).")
    ] = None
    attention: Annotated[
        str | None, typer.Option(help="Of an encoder-decoder: decoder (the default), encoder or cross.")
    ] = None

    def check(self, *models: str | None) -> None:
        """Check the options before any library of models is imported.

        Raises:
            UsageError: an unknown dtype or attention, two places, or a path that is no checkpoint.
        """
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
        """Read the text by configuration and tokenizer alone, to tell before weights are read what does not fit.

        `check` gets a model that cannot run, `how` is what `Text.read` takes. None: no text, or one (images, say) for
        the opened model to read.
        """
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
        """Open the model, saying so on the screen; the embedded one where none is named.

        Of a checkpoint with two towers (CLIP) it is that of images where the `text` that is to be read holds images.
        """
        from theodolite.models import open_model
        from theodolite.models.stored.loading import hide_progress_bars

        hide_progress_bars()
        model, options = self._options(model)
        with screen.status(f"opening {model or 'the embedded model'}"):
            opened = open_model(
                model,
                device=self.device,
                device_map=self.device_map,
                tower="vision" if text is not None and text.of_images else None,
                say=say_dimly,
                **options,
            )
        return _said_how_stored(opened)

    def open_streamed(
        self, model: str | None, stopped: Callable[[], bool], device: str | None = None
    ) -> OpenModel:
        """Open the model so that its blocks are read as they run, with a bar while its files are hashed."""
        from theodolite.models import open_streamed
        from theodolite.models.stored.loading import hide_progress_bars

        refuse_unread("a streamed model has no such option", {"--device-map": self.device_map})
        hide_progress_bars()
        name, options = self._options(model)
        megabytes = 1 << 20
        with bars(stopped, unit="MB") as show:
            opened = open_streamed(
                name,
                say=say_dimly,
                show_progress=lambda done, total: show(
                    "hashing weights", done // megabytes, total // megabytes
                ),
                device=self.device or device,
                **{option: value for option, value in options.items() if value is not None},
            )
        return _said_how_stored(opened)

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

    corpus: Annotated[
        str | None,
        typer.Option(
            help=f"A file or folder of {' '.join(READERS)}, or of images, one label a subfolder; one of "
            f"{', '.join(KEYWORDS)}; or hf:NAME[:CONFIG[:SPLIT]] [default: docs, the text in "
            "every Python; of evaluate: held-out, its topics that the embedded model was not trained on].",
        ),
    ] = None
    length: Annotated[
        int | None, typer.Option(help="Tokens per context [default: the model's maximum, up to 512].")
    ] = None
    contexts: Annotated[int | None, typer.Option(help=contexts_help(DEFAULT_CONTEXTS))] = None
    per_label: Annotated[
        int | None,
        typer.Option(
            help="Exactly so many contexts of each label (--label-by); labels with fewer are left out, and so is "
            "what has none."
        ),
    ] = None
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0
    text_column: Annotated[
        str,
        typer.Option(help=f"Column of texts, or of conversations, of tables ({', '.join(TABLES)}, hf:NAME)."),
    ] = "text"
    label_by: Annotated[
        str | None,
        typer.Option(
            help="What labels a document: file, folder, row (each of a table a label of its own) or column:NAME "
            "[default: a table's column label or topic, titles of WikiText's articles, subfolders of images].",
        ),
    ] = None
    encoding: Annotated[
        str | None,
        typer.Option(help="Of text files and .jsonl without a byte order mark, as latin-1 [default: utf-8]."),
    ] = None
    no_pack: Annotated[
        bool,
        typer.Option(
            "--no-pack",
            help="Each document by itself: short ones and remainders are contexts of their own length, no longer "
            "packed or dropped. --length is the longest.",
        ),
    ] = False

    default_contexts: ClassVar[int] = DEFAULT_CONTEXTS

    @property
    def columns(self) -> Columns:
        """The table columns to read."""
        return Columns(self.text_column, self.label_by, self.encoding)

    @property
    def of_images(self) -> bool:
        """True for a folder of images; False for data sets of the hub."""
        from theodolite.corpus.pictures import holds_images

        return self.corpus is not None and holds_images(Path(self.corpus))

    def check(self) -> None:
        """Check the options before any library of models is imported.

        Raises:
            UsageError: a text that is not there, a number out of range, options that do not go together.
        """
        from theodolite.corpus.sampling import Choice, check_length

        if self.length is not None:
            check_length(self.length)
        Choice(self.contexts, self.seed, self.per_label).check()
        check_spec(self.corpus, self.columns, self.per_label)

    def check_stream(self) -> None:
        """Check the options of a text that is read as one sequence, which has no contexts to choose.

        Raises:
            UsageError: as `check`; options of contexts.
        """
        read = ("--corpus", "--length", "--contexts", "--text-column", "--encoding")
        named = [name for name, value in self.given().items() if value and name not in read]
        if named:
            raise UsageError(f"with --stride the text is one sequence: leave out {named[0]}")
        self.check()

    def read(
        self,
        model: OpenModel,
        stopped: Callable[[], bool],
        *,
        stride: int | None = None,
        special_tokens: bool = True,
    ) -> Corpus:
        """Read the text for this model, saying so on the screen; for windows by a stride, as one stream.

        Raises:
            UsageError: the model has no tokenizer or image processor, or the text gives no context.
            KeyboardInterrupt: `stopped()` is true.
        """
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
        if "tokens_read" in corpus.selection:
            parts = "contexts" if stride is None else "windows"
            say_dimly(f"{corpus.name}: {parts} of its first {corpus.selection['tokens_read']:,} tokens")
        if short := corpus.selection.get("too_short"):
            say_dimly(f"{corpus.name}: {counted(short, 'context')} of fewer than 4 tokens left out")
        for why, files in corpus.selection.get("files_passed_over", {}).items():
            shown = [visible(name, 80) for name in files["names"][:5]]
            more = files["count"] - len(shown)
            names = listed([*shown, f"{more:,} more"] if more else shown, 6)
            say_dimly(f"{corpus.name}: {counted(files['count'], 'file')} passed over ({why}): {names}")
        if pictures := corpus.selection.get("picture_cut"):
            say_dimly(f"{corpus.name}: {counted(pictures, 'image')} larger than --length left out")
        if corpus.selection.get("unread_images") and hasattr(
            getattr(model.root, "config", None), "image_token_id"
        ):
            say_dimly(
                f"{corpus.name}: only its texts are read; its images too with --image-column {IMAGE_COLUMN}"
            )
        for what in ("a text", "a label", "an image"):
            if rows := corpus.selection.get(f"rows_without_{what.split()[1]}"):
                say_dimly(f"{corpus.name}: {counted(rows, 'document')} without {what}")
        if self.per_label is not None:
            say_dimly(_labels_line(corpus))
        return corpus

    def length_for(self, model: OpenModel, written: int = 0) -> int:
        """Return the tokens of a context, behind which the model may have to write some."""
        longest = DEFAULT_LENGTH if model.longest is None else model.longest - written
        return self.length or min(DEFAULT_LENGTH, longest)

    def _read(self, model: OpenModel, reader: Any, show: Callable[[int], None]) -> Corpus:
        from theodolite.corpus.named import make_corpus

        every = self.per_label is not None and not self.columns.rows
        contexts = self.contexts
        if contexts is None and not every:
            contexts = max(self.default_contexts, self.per_label or 0)
        length = self.length if model.vocabulary is None else self.length_for(model)
        choice = (contexts, self.seed, self.columns, self.per_label)
        return make_corpus(self.corpus, reader, length, *choice, pack=not self.no_pack, show_tokens=show)

    def given(self) -> dict[str, object]:
        """Return the options that say what is read, to be refused where nothing is."""
        return {
            "--corpus": self.corpus,
            "--length": self.length,
            "--contexts": self.contexts,
            "--per-label": self.per_label,
            "--text-column": None if self.text_column == Text.text_column else self.text_column,
            "--label-by": self.label_by,
            "--encoding": self.encoding,
            "--no-pack": self.no_pack,
        }


@dataclass(frozen=True)
class PairedText(Text):
    """Options of a text that may have a source, for an encoder-decoder, or images."""

    source_column: Annotated[
        str | None,
        typer.Option(
            help="Column of tables that an encoder reads; its decoder reads --text-column [default: both read that]."
        ),
    ] = None
    image_column: Annotated[
        str | None,
        typer.Option(
            help="Column of images (paths or bytes) of tables whose texts have an image each, for a model of both."
        ),
    ] = None

    @property
    def columns(self) -> Columns:
        """The table columns to read."""
        return replace(super().columns, source=self.source_column, image=self.image_column)

    def check(self) -> None:
        """As of any text; rows with a source or an image are not packed."""
        super().check()
        alone: dict[str, object] = {"--no-pack": self.no_pack}
        if self.image_column is not None:
            refuse_unread("with --image-column each row is a context of its own", alone)
        if self.source_column is not None:
            alone |= {"--image-column": self.image_column}
            refuse_unread("with --source-column each row is a context of its own", alone)

    def _read(self, model: OpenModel, reader: Any, show: Callable[[int], None]) -> Corpus:
        from theodolite.corpus.corpus import Corpus

        contexts = self.contexts or max(self.default_contexts, self.per_label or 0)
        how: Any = (contexts, self.seed, self.text_column, self.label_by, self.per_label)
        more: dict[str, Any] = {"encoding": self.encoding, "show_tokens": show}
        length = self.length_for(model)
        if self.image_column is not None:
            from theodolite.models import pictured_text_reader

            reader = pictured_text_reader(model)
            return Corpus.from_pictured(str(self.corpus), reader, length, self.image_column, *how, **more)
        if self.source_column is None:
            return super()._read(model, reader, show)
        if model.source.attention == "encoder":  # which reads nothing else
            return replace(self, text_column=self.source_column, source_column=None)._read(
                model, reader, show
            )
        more["alike"] = model.source.attention == "cross"
        pairs: Any = (self.source_column, model.source.target_start)
        return Corpus.from_pairs(str(self.corpus), reader, length, *pairs, *how, **more)


def _labels_line(corpus: Corpus) -> str:
    """Say how many labels a balanced corpus has, and how many were left out."""
    balanced = corpus.selection
    line = (
        f"{counted(len(corpus.label_names), 'label')} with {counted(balanced['per_label'], 'context')} each"
    )
    if balanced["labels_too_short"]:
        line += f"; {balanced['labels_too_short']} with fewer left out"
    if balanced["labels_not_drawn"]:
        line += f"; {balanced['labels_not_drawn']} more not drawn (--contexts)"
    return line


def finish(run: Run, page: Path | None, as_json: bool) -> None:
    """Show a survey's tables, or print them as JSON, and say where its report is."""
    from theodolite.report.terminal import show_run

    if as_json:
        _print_tables(run)
    else:
        show_run(run, Console())
    if page is not None:
        say_where(page, as_json)


def finish_trace(run: Run, folder: Path, as_json: bool) -> None:
    """Write and show the page of a trace, or print its tables as JSON, and say where it is."""
    from theodolite.report.outcome import Outcome, write_index, write_outcome
    from theodolite.report.sink_trace import TRACE, show_trace
    from theodolite.report.terminal import show_outcome

    outcome = Outcome()
    show_trace(outcome, run)
    page = write_outcome(TRACE, outcome, run.provenance, folder / "report")
    write_index(folder / "report", "Trace of sinks in")
    if as_json:
        _print_tables(run)
    else:
        show_outcome(TRACE, outcome, Console(soft_wrap=True))
    say_where(page, as_json)


def _print_tables(run: Run) -> None:
    from theodolite.report.terminal import tables_as_json

    print_json(tables_as_json(run))


def say_where(page: Path, as_json: bool) -> None:
    """Print where a page is: on standard error if JSON goes to standard output."""
    (screen if as_json else Console(soft_wrap=True)).print(f"Report: {page}", highlight=False)


def default_folder(model: OpenModel, corpus: Corpus, kind: str = "") -> Path:
    """Return the folder of a result where --out is not given."""
    return Path("runs") / f"{model_name(model.id)}-{model_name(corpus.name)}{kind}"
