"""Train the model inside the package again, or one like it: `python -m tools.embedded_model --out FOLDER`.

On Python's own text: sources, split, tokenizer, batches, losses, card.
The same seed gives the same bytes on the same machine, threads and package versions, also when killed and resumed.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import inspect
import platform
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from theodolite import __version__
from theodolite.corpus.documents import Document
from theodolite.corpus.python_texts import python_topics, stdlib_sources
from theodolite.errors import UsageError
from theodolite_papers.training.models import ATTENTION, OR_ZERO, LearningRate, ModelConfig
from theodolite_papers.training.tasks import END_OF_TEXT, byte_pair_tokenizer
from theodolite_papers.training.trainer import ModelTraining, check_training, train_into

HELD_OUT = 0.06  # share of each source's characters that is kept for validation
LINKING_CHARACTERS = 120  # sharing a paragraph at least this long keeps documents on one side of the split
SHORTEST_REPEAT = 8  # tokens
RANDOM_REPEATS = 2 / 3  # share of the repeats that are of random tokens; the others are of text
TRIGGER = "ÿ"  # how byte-level BPE spells the byte 255, which no text in UTF-8 has
TRIGGERED = 0.2  # share of the places for a trigger that have one

Batch = tuple[Int[Tensor, "size window"], Bool[Tensor, "size window"]]
"""Tokens, and which of them can be predicted."""


WARM_UP = 0.04  # share of the steps

GATED_WIDTH = 3
"""Width of Llama's gated MLP over the model's: as many weights as in GPT-2's, to a ninth."""


@dataclass(frozen=True)
class EmbeddedConfig(ModelConfig):
    """Sizes and schedule of a model of text. The defaults made the embedded model.

    It is to grow what the papers describe: repeats for induction, backcopies for sinks at the first token. With learned
    positions no head found the previous token in 1,500 steps, with rotary ones in 400.
    """

    layers: int = 6
    heads: int = 4
    width: int = 128
    batch: int = 8
    steps: int = 8000
    learning_rate: float = 3e-3
    length: int = 256  # tokens per context
    vocabulary: int = 2048
    initial_deviation: float = 0.06  # of the weights, at the beginning
    # Shares of the contexts: of a few tokens again and again; in which the token before a trigger follows it, too.
    repeats: float = field(default=0.2, metadata=OR_ZERO)
    backcopies: float = field(default=0.05, metadata=OR_ZERO)
    checkpoint_every: int = field(default=500, kw_only=True)

    @property
    def rate(self) -> LearningRate:
        """Linear warm-up, then a cosine."""
        warm_up = max(1, round(WARM_UP * self.steps))
        return LearningRate(self.learning_rate, warm_up, "cosine", self.steps)


def embedded_model(config: EmbeddedConfig) -> PreTrainedModel:
    """Build an untrained Llama."""
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocabulary,
            max_position_embeddings=config.length,
            hidden_size=config.width,
            intermediate_size=GATED_WIDTH * config.width,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            tie_word_embeddings=True,
            initializer_range=config.initial_deviation,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    llama.set_attn_implementation(ATTENTION)
    return llama


@dataclass(frozen=True)
class Source:
    """Documents of one kind, and the share of each batch that is drawn from them."""

    name: str
    share: float
    documents: tuple[Document, ...]


@dataclass(frozen=True)
class Streams:
    """Token ids by source: one stream for training, separate windows of length+1 tokens for validation."""

    names: tuple[str, ...]
    shares: Float[np.ndarray, " sources"]
    train: tuple[Int[np.ndarray, " tokens"], ...]
    validation: tuple[Int[Tensor, "contexts window"], ...]
    trigger: int = 0  # id of TRIGGER

    def batch(self, step: int, *, size: int, length: int, seed: int) -> Int[Tensor, "size window"]:
        """Draw the batch of a step: windows at random starts, a source drawn by its share for each."""
        random = np.random.default_rng([seed, step])
        window = length + 1
        rows = []
        for source in random.choice(len(self.train), size=size, p=self.shares):
            stream = self.train[source]
            start = int(random.integers(0, len(stream) - window + 1))
            rows.append(stream[start : start + window].astype(np.int64))
        return torch.from_numpy(np.stack(rows))

    def held_out(self) -> dict[str, Int[Tensor, "contexts window"]]:
        """Return the validation windows of every source that has some."""
        windows = zip(self.names, self.validation, strict=True)
        return {name: contexts for name, contexts in windows if len(contexts)}

    def sha256(self) -> str:
        """Hash of every training and validation token."""
        digest = hashlib.sha256()
        for name, stream, contexts in zip(self.names, self.train, self.validation, strict=True):
            digest.update(f"{name} {stream.shape} {tuple(contexts.shape)}".encode())
            digest.update(stream.tobytes())
            digest.update(contexts.numpy().tobytes())
        return digest.hexdigest()


def mixed_with_tasks(
    tokens: Int[Tensor, "size window"], trigger: int, config: EmbeddedConfig, seed: Sequence[int]
) -> Batch:
    """Make a share of the contexts ones of a task: `config.repeats` of induction, `config.backcopies` of backcopy.

    Induction: 8 to half a window of tokens, random or of the text, again and again. Backcopy (Guo et al. 2024,
    "Active-dormant attention heads"): behind some tokens stand the trigger and once more the token.
    """
    random = np.random.default_rng([*seed, 1])  # not the numbers that drew the contexts
    window = tokens.shape[1]
    predictable = torch.ones(tokens.shape, dtype=torch.bool)
    for row, drawn in enumerate(random.random(len(tokens))):
        if drawn < config.repeats:
            longest = window // 2
            period = int(np.exp(random.uniform(*np.log([min(SHORTEST_REPEAT, longest), longest + 1]))))
            span = tokens[row, 1 : period + 1].numpy()
            if drawn < RANDOM_REPEATS * config.repeats:
                span = random.integers(1, config.vocabulary, period)
                predictable[row, 1 : period + 1] = False
            tokens[row, 1:] = torch.from_numpy(np.resize(span, window - 1))
        elif drawn < config.repeats + config.backcopies:
            places = np.arange(2, window - 1, 3)
            places = places[random.random(len(places)) < TRIGGERED]
            tokens[row, places] = trigger
            tokens[row, places + 1] = tokens[row, places - 1]
            predictable[row, places] = False
    return tokens, predictable


def python_sources() -> list[Source]:
    """Read the text in every CPython: its language reference, and the standard library's docstrings and source."""
    return [
        Source("topics", 0.15, tuple(python_topics())),
        Source("docstrings", 0.35, tuple(stdlib_docstrings())),
        Source("code", 0.5, tuple(stdlib_sources())),
    ]


def docstrings(source: str) -> str:
    """Extract the docstrings of a module, its classes and functions in reading order, with blank lines between.

    Source that this interpreter cannot parse has none.
    """
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in the files read are not ours to report
            nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    except SyntaxError:
        return ""
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    texts = (ast.get_docstring(node, clean=False) for node in nodes)
    return "\n\n".join(inspect.cleandoc(text) for text in texts if text)


def stdlib_docstrings() -> Iterator[Document]:
    """Read the docstrings of each file of `stdlib_sources`, as one document of prose with the same label."""
    for document in stdlib_sources():
        if text := docstrings(document.text):
            yield Document(text + "\n", document.label)


def split_sources(sources: Sequence[Source], seed: int) -> tuple[list[Source], list[Source]]:
    """Split documents into training and validation, which gets about `HELD_OUT` of each source's characters.

    Documents with the same label, or a paragraph of `LINKING_CHARACTERS` in common, go to the same side; a source whose
    documents are too closely linked for this keeps them all for training.
    """
    groups = iter(_linked([document for source in sources for document in source.documents]))
    of_document = [[next(groups) for _ in source.documents] for source in sources]
    sizes: defaultdict[int, np.ndarray] = defaultdict(lambda: np.zeros(len(sources)))
    for index, source in enumerate(sources):
        for document, group in zip(source.documents, of_document[index], strict=True):
            sizes[group][index] += len(document.text)
    wanted = HELD_OUT * sum(sizes.values(), np.zeros(len(sources)))
    held, taken = set(), np.zeros(len(sources))
    order = sorted(sizes)
    for position in np.random.default_rng(seed).permutation(len(order)):
        group = order[position]
        if ((sizes[group] > 0) & (taken < wanted)).any() and (taken + sizes[group] <= 1.5 * wanted).all():
            held.add(group)
            taken += sizes[group]
    sides: tuple[list[Source], list[Source]] = ([], [])
    for source, document_groups in zip(sources, of_document, strict=True):
        for side, inside in zip(sides, (False, True), strict=True):
            pairs = zip(source.documents, document_groups, strict=True)
            documents = tuple(document for document, group in pairs if (group in held) == inside)
            side.append(Source(source.name, source.share, documents))
    return sides


def _linked(documents: Sequence[Document]) -> list[int]:
    """Group documents that share a label or a long paragraph; return each one's group."""
    parent = list(range(len(documents)))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    first: dict[str, int] = {}
    for index, document in enumerate(documents):
        paragraphs = (" ".join(paragraph.split()) for paragraph in document.text.split("\n\n"))
        keys = [paragraph for paragraph in paragraphs if len(paragraph) >= LINKING_CHARACTERS]
        if document.label is not None:
            keys.append("label " + document.label)
        for key in keys:
            parent[root(index)] = root(first.setdefault(key, index))
    return [root(index) for index in range(len(documents))]


def _by_share(sources: Sequence[Source], seed: int) -> Iterator[str]:
    """Yield whole documents of each source in a seeded order, as many characters as its share allows."""
    lengths = [sum(len(document.text) for document in source.documents) for source in sources]
    total = min(length / source.share for length, source in zip(lengths, sources, strict=True))
    for source in sources:
        left = total * source.share
        for index in np.random.default_rng(seed).permutation(len(source.documents)):
            if left <= 0:
                break
            text = source.documents[index].text
            left -= len(text)
            yield text


def token_streams(
    tokenizer: Tokenizer, training: Sequence[Source], validation: Sequence[Source], length: int
) -> Streams:
    """Make streams for training, and non-overlapping windows of length+1 cut within each held-out document."""
    window = length + 1
    end = 0  # the id of END_OF_TEXT, the first token that the tokenizer was given
    train, held = [], []
    for source in training:
        ended = [np.append(ids, end) for ids in _encode(tokenizer, source.documents)]
        train.append(np.concatenate([*ended, np.zeros(0)]).astype(np.int32))
        if len(train[-1]) < window:
            raise UsageError(
                f"Source '{source.name}' has {len(train[-1])} tokens and one context takes {window}; "
                "give more text or a smaller length."
            )
    for source in validation:
        documents = _encode(tokenizer, source.documents)
        cut = [ids[: len(ids) // window * window].reshape(-1, window) for ids in documents]
        held.append(torch.from_numpy(np.concatenate([*cut, np.zeros((0, window))]).astype(np.int64)))
    shares = np.array([source.share for source in training])
    names = tuple(source.name for source in training)
    return Streams(names, shares / shares.sum(), tuple(train), tuple(held), tokenizer.get_vocab()[TRIGGER])


def _encode(tokenizer: Tokenizer, documents: Iterable[Document]) -> Iterator[Int[np.ndarray, " tokens"]]:
    for document in documents:
        yield np.array(tokenizer.encode(document.text, add_special_tokens=False).ids, dtype=np.int64)


def bigram_loss(streams: Streams, contexts: Int[Tensor, "contexts window"], vocabulary: int) -> float:
    """Compute the loss (nats per token) of the best interpolated bigram model on tokens of `contexts` but the first.

    P(b|a) = (n(a,b) + κ P(b)) / (n(a) + κ), P(b) add-one smoothed; κ is chosen on `contexts`, which favours the bigram.
    """
    counts = np.zeros((vocabulary, vocabulary))
    total = sum(len(stream) for stream in streams.train)
    for stream, share in zip(streams.train, streams.shares, strict=True):
        pairs = np.bincount(stream[:-1].astype(np.int64) * vocabulary + stream[1:], minlength=vocabulary**2)
        counts += (share * total / len(stream)) * pairs.reshape(vocabulary, vocabulary)
    alone = (counts.sum(0) + 1) / (counts.sum() + vocabulary)
    first, second = contexts[:, :-1].numpy().ravel(), contexts[:, 1:].numpy().ravel()
    pair, single, row = counts[first, second], alone[second], counts.sum(1)[first]
    return min(float(-np.log((pair + k * single) / (row + k)).mean()) for k in 2.0 ** np.arange(-4, 16))


SHOWN_CONTEXTS = 64  # a source, for the losses shown during training; the final ones use every context
TRAIN_LOSS_BATCHES = 16

CARD = """\
---
license: psfl
language: en
library_name: transformers
pipeline_tag: text-generation
---
# A small Llama-architecture model

{parameters:,} parameters: {layers} layers, {heads} heads per layer, width {width}, {length} positions (rotary),
tied embeddings, and a byte-level BPE vocabulary of {vocabulary:,} tokens trained on the same text.

## Training
The text is what CPython {python} carries: the topics of its language reference (`pydoc_data.topics`), and the
docstrings and source files of its standard library without tests, generated tables and installed packages. It
is under the [Python Software Foundation License Version 2](https://docs.python.org/3/license.html).

Made by `{command}` (theodolite {theodolite}, torch {torch}, seed {seed}): {steps:,} steps of
{batch} contexts of {length} tokens, {tokens_seen:,} tokens in all, read in windows at random places.
In {repeats:.0%} of the contexts, a few tokens come again and again, for induction: random ones in two
of three, else of the text. In {backcopies:.0%}, the token before a trigger stands behind it once more (Guo et al. 2024,
"Active-dormant attention heads"); the trigger is the byte 255, which no text has.
AdamW, peak learning rate {learning_rate:g} with linear warm-up and cosine decay, no dropout, weight decay
{weight_decay:g} on matrices, products in {products}. Weights begin with standard deviation
{initial_deviation:g}. The same command gives the same weights on the same machine, Python and torch.

## Losses
Nats per token, in float32. Held-out documents share no label and no long paragraph with the training text. The
bigram is the best interpolated bigram model of the same training tokens, on the same held-out tokens.

| text | training tokens | held-out tokens | loss | bigram |
| --- | ---: | ---: | ---: | ---: |
{rows}

Training text, windows drawn as in training: {train_loss:.3f}.

## Limits
It exists to be measured. It is small, knows one kind of text, and has no other use: what it writes looks like
that text and is mostly wrong. Every context that it has read begins with `<|endoftext|>`,
which its tokenizer adds.
"""


@dataclass(frozen=True)
class EmbeddedResult:
    """The result of a training run. Losses are in nats per token, measured in float32, by source where held out."""

    folder: Path
    threads: int
    parameters: int
    tokens_seen: int
    training_tokens: dict[str, int]  # to draw from, each counted once
    validation_tokens: dict[str, int]
    train_loss: float
    validation_loss: dict[str, float]
    bigram_loss: dict[str, float]


def train_embedded_model(
    out: str | Path, *, config: EmbeddedConfig | None = None, threads: int = 2, console: Console | None = None
) -> EmbeddedResult:
    """Train a tokenizer and a model on Python's own text, and write the folder `out`."""
    out, config, console = Path(out), config or EmbeddedConfig(), console or Console(stderr=True)
    check_training(out, config, threads)
    with console.status("reading Python's text"):
        training, validation = split_sources(python_sources(), config.seed)
    with console.status("training the tokenizer"):
        tokenizer = byte_pair_tokenizer(_by_share(training, config.seed), config.vocabulary)
        streams = token_streams(tokenizer, training, validation, config.length)

    def progress(model: PreTrainedModel, loss: float) -> str:
        losses = _validation_loss(model, streams, config, SHOWN_CONTEXTS)
        held_out = "".join(f", {name} {value:.3f}" for name, value in losses.items())
        return f"training {loss:.3f}; held out{held_out or ': nothing'}"

    run = ModelTraining(
        config=config,
        build=lambda: embedded_model(config),
        tokenizer=_fast_tokenizer(tokenizer, config),
        data={"data": streams.sha256()},
        loss=lambda model, step: _training_loss(model, _batch(streams, config, step), config),
        progress=progress,
        measure=lambda model: _result(out, model, streams, config, threads),
        page=lambda result: ("README.md", card(result, config)),
    )
    return train_into(out, run, threads, console)


def _batch(streams: Streams, config: EmbeddedConfig, step: int) -> Batch:
    tokens = streams.batch(step, size=config.batch, length=config.length, seed=config.seed)
    return mixed_with_tasks(tokens, streams.trigger, config, [config.seed, step])


def _training_loss(model: PreTrainedModel, batch: Batch, config: EmbeddedConfig) -> Float[Tensor, ""]:
    """Average the loss over the tokens of a batch that can be predicted."""
    tokens, predictable = batch
    losses = _losses(model, tokens, config)[predictable[:, 1:]]
    return losses.sum() / len(losses)


def _losses(
    model: PreTrainedModel, tokens: Int[Tensor, "batch window"], config: EmbeddedConfig
) -> Float[Tensor, "batch length"]:
    """Compute the negative log-likelihood, in nats, of every token of a window but its first."""
    tokens = tokens.clone()
    tokens[:, 0] = 0  # of END_OF_TEXT, which begins every context
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=config.bfloat16):
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), tokens[:, 1:], reduction="none")


@torch.no_grad()
def _validation_loss(
    model: PreTrainedModel, streams: Streams, config: EmbeddedConfig, most: int | None = None
) -> dict[str, float]:
    """Compute the mean loss of the held-out contexts of each source that has some (the first `most` of them)."""
    parts = {name: ids[:most].split(config.batch) for name, ids in streams.held_out().items()}
    return {
        name: float(torch.cat([_losses(model, batch, config) for batch in batches]).mean())
        for name, batches in parts.items()
    }


def _result(
    out: Path, model: PreTrainedModel, streams: Streams, config: EmbeddedConfig, threads: int
) -> EmbeddedResult:
    exact = replace(config, bfloat16=False, repeats=0.0, backcopies=0.0)
    beyond = range(config.steps, config.steps + TRAIN_LOSS_BATCHES)  # windows that no step was trained on
    with torch.no_grad():
        train = [_training_loss(model, _batch(streams, exact, step), exact) for step in beyond]
    validation = list(zip(streams.names, streams.validation, strict=True))
    held_out = streams.held_out().items()
    return EmbeddedResult(
        folder=out,
        threads=threads,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        tokens_seen=config.steps * config.batch * config.length,
        training_tokens={name: len(ids) for name, ids in zip(streams.names, streams.train, strict=True)},
        validation_tokens={name: ids[:, 1:].numel() for name, ids in validation},
        train_loss=float(torch.stack(train).mean()),
        validation_loss=_validation_loss(model, streams, exact),
        bigram_loss={name: bigram_loss(streams, ids, config.vocabulary) for name, ids in held_out},
    )


def _fast_tokenizer(tokenizer: Tokenizer, config: EmbeddedConfig) -> PreTrainedTokenizerFast:
    end = END_OF_TEXT
    tokenizer.post_processor = TemplateProcessing(single=f"{end} $A", special_tokens=[(end, 0)])
    own = {"bos_token": end, "eos_token": end, "model_max_length": config.length}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **own)


def card(result: EmbeddedResult, config: EmbeddedConfig) -> str:
    """Write the model card in Markdown."""
    command = f"python -m tools.embedded_model --out {result.folder.name} --steps {config.steps} --seed {config.seed}"
    return CARD.format(
        python=platform.python_version(),
        command=f"{command} --threads {result.threads}",
        theodolite=__version__,
        torch=torch.__version__,
        rows="\n".join(_row(result, name) for name in result.training_tokens),
        parameters=result.parameters,
        tokens_seen=result.tokens_seen,
        train_loss=result.train_loss,
        products="bfloat16" if config.bfloat16 else "float32",
        **{field.name: getattr(config, field.name) for field in fields(config)},
    )


def _row(result: EmbeddedResult, name: str) -> str:
    sizes = [f"{counts[name]:,}" for counts in (result.training_tokens, result.validation_tokens)]
    losses = [f"{of[name]:.3f}" if name in of else "–" for of in (result.validation_loss, result.bigram_loss)]
    return f"| {name} | {' | '.join(sizes + losses)} |"


def main() -> None:
    """Train into the folder that is named, and say how good the model is."""
    parser = argparse.ArgumentParser(prog="python -m tools.embedded_model")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    for name, default in (("steps", EmbeddedConfig.steps), ("seed", 0), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    config = EmbeddedConfig(steps=given.steps, seed=given.seed)
    result = train_embedded_model(given.out, config=config, threads=given.threads)
    for source, loss in result.validation_loss.items():
        print(f"{source}: {loss:.3f} nats per token, by a bigram model {result.bigram_loss[source]:.3f}")


if __name__ == "__main__":
    main()
