"""A source and a target, each in its own half of an encoder-decoder."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tests.calls import call, same_bytes
from theodolite import Corpus, Run, open_model, survey, trace_sinks
from theodolite.attention.inputs import attend, softmax
from theodolite.attention.summary import SINK_THRESHOLD
from theodolite.errors import UsageError
from theodolite.models.hooks import Hooks, hooked

WORDS = [
    ("the cat", "die Katze sitzt"),
    ("a dog here", "ein Hund"),
    ("one bird sings", "ein Vogel singt laut"),
]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Rows of unlike lengths; one without a source, and one that is too short."""
    rows = [{"en": f"{en} {i % 3}", "de": f"{de} {i % 2}"} for i in range(4) for en, de in WORDS]
    rows += [{"en": None, "de": "nichts dazu"}, {"en": "x", "de": "y"}]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def starting(copied):
    """starting(family) → its folder, with the token that a decoder starts with, as checkpoints of it have."""

    def folder(family: str) -> Path:
        path = copied(family)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({"decoder_start_token_id": 2} | config))
        return path

    return folder


class _Weights(Hooks):
    def __init__(self) -> None:
        self.layers: list[torch.Tensor] = []

    def attention(self, layer, inputs):
        self.layers.append(softmax(inputs.logits(), inputs.sink))
        return attend(inputs)


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_the_encoder_reads_the_source_and_the_decoder_the_target(family, starting, table):
    """Oracle: transformers, pair by pair, on what its tokenizer and its shift of labels make of each row."""
    folder = starting(family)
    model = open_model(folder)
    hf = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, attn_implementation="eager").eval()
    start = model.source.target_start
    assert start == hf.config.decoder_start_token_id
    corpus = Corpus.from_pairs(table, model.tokenizer, 16, "en", start, text_column="de")
    rows = [json.loads(line) for line in table.read_text().splitlines()[:12]]
    wanted = set()
    for row in rows:
        source = model.tokenizer(row["en"], truncation=True, max_length=16)["input_ids"]
        labels = torch.tensor([model.tokenizer(text_target=row["de"])["input_ids"]])
        wanted.add((*hf.prepare_decoder_input_ids_from_labels(labels)[0, :16].tolist(), -1, *source))
    found = set()
    for part in corpus.batches(3):
        tap = _Weights()
        with hooked(model, tap):
            model.forward(corpus.inputs(part))
        for place, number in enumerate(range(part.start, part.stop)):
            ids = corpus.ids(slice(number, number + 1))
            source = corpus.sources[number : number + 1]
            source = source[source != -1][None]
            found.add((*ids[0].tolist(), -1, *source[0].tolist()))
            with torch.no_grad():
                own = hf(input_ids=source, decoder_input_ids=ids, output_attentions=True)
            for weights, expected in zip(tap.layers, own.decoder_attentions, strict=True):
                torch.testing.assert_close(weights[place], expected[0], rtol=0, atol=1e-5)
    assert found == wanted
    assert corpus.selection == {"source_column": "en", "rows_without_text": 1, "too_short": 1}
    other = Corpus.from_pairs(table, model.tokenizer, 16, "de", start, text_column="de")
    assert other.sha256 != corpus.sha256
    alike = corpus.subset(torch.arange(2))
    assert torch.equal(alike.inputs(slice(0, 1)), corpus.inputs(slice(0, 1)))


def test_sinks_of_cross_attention_are_tokens_of_the_source(starting, table):
    """Oracle: cross-attentions of transformers, averaged over queries, key by key."""
    folder = starting("t5")
    hf = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, attn_implementation="eager").eval()
    for name, parameter in hf.named_parameters():
        parameter.data *= 6 if "EncDecAttention.q" in name else 1  # else attention is uniform
    hf.save_pretrained(folder)
    model = open_model(folder, attention="cross")
    start = model.source.target_start
    with pytest.raises(UsageError, match="alike=True"):
        survey(model, Corpus.from_pairs(table, model.tokenizer, 16, "en", start, text_column="de"))
    corpus = Corpus.from_pairs(table, model.tokenizer, 16, "en", start, text_column="de", alike=True)
    wanted: Counter[tuple[int, int, str, int]] = Counter()
    for ids, source in zip(corpus.contexts, corpus.sources, strict=True):
        ids, source = ids[ids != -1], source[source != -1]
        assert len(ids) == len(source)
        with torch.no_grad():
            own = hf(input_ids=source[None], decoder_input_ids=ids[None], output_attentions=True)
        sinks = {
            (layer, int(head), *(("later", int(source[key])) if key else ("first", -1)))
            for layer, weights in enumerate(own.cross_attentions)
            for head, key in (weights[0].mean(dim=1) > SINK_THRESHOLD).nonzero()
        }
        wanted.update(sinks)
    traces = trace_sinks(model, corpus).traces
    columns = traces[["layer", "head", "kind", "token_id", "contexts"]].itertuples(index=False)
    found = {tuple(row[:4]): row[4] for row in columns}
    assert len({token for *_, token in wanted}) > 3
    assert found == wanted
    table_of_sinks = survey(model, corpus).sinks
    assert set(table_of_sinks["token_id"]) <= {token for *_, token in wanted}
    assert len(table_of_sinks)


def test_surveys_of_pairs_by_the_command(starting, table, tmp_path):
    """Oracle: a survey in Python; of the encoder, that of the source column alone; shards that are merged."""
    t5 = starting("t5")
    options = ("--corpus", table, "--source-column", "en", "--text-column", "de", "--length", 16)
    status, _, stderr = call("survey", t5, *options, "--out", tmp_path / "run")
    assert status == 0, stderr
    run, model = Run.load(tmp_path / "run"), open_model(t5)
    start = model.source.target_start
    corpus = Corpus.from_pairs(table, model.tokenizer, 16, "en", start, contexts=256, text_column="de")
    assert run.provenance["corpus"]["source_column"] == "en"
    assert run.provenance["corpus"]["sha256"] == corpus.sha256
    assert run.heads.equals(survey(model, corpus).heads)
    same = survey(model, replace(corpus, sources=None))  # the encoder reads the target, too
    assert not np.allclose(same.heads["entropy"], run.heads["entropy"])
    for shard in ("1/2", "2/2"):
        status, _, stderr = call(
            "survey", t5, *options, "--shard", shard, "--out", tmp_path / "s", "--batch", 2
        )
        assert status == 0, stderr
    assert call("merge", tmp_path / "s")[0] == 0
    call("survey", t5, *options, "--batch", 2, "--out", tmp_path / "whole")
    same_bytes(tmp_path / "whole", tmp_path / "s")
    encoder = ("survey", t5, "--attention", "encoder", "--corpus", table, "--length", 8)
    assert call(*encoder, *options[2:6], "--out", tmp_path / "encoder")[0] == 0
    assert call(*encoder, "--text-column", "en", "--out", tmp_path / "alone")[0] == 0
    same_bytes(tmp_path / "encoder", tmp_path / "alone")


def test_what_has_no_source_is_refused(checkpoint, starting, opened, table):
    options = ("--corpus", table, "--source-column", "en", "--text-column", "de")
    status, _, stderr = call("survey", checkpoint("gpt2"), *options)
    assert status == 2
    assert "reads one text: a source beside the text is for the decoder" in " ".join(stderr.split())
    status, _, stderr = call("survey", starting("t5"), *options[:3], "fr", *options[4:])
    assert "no column 'fr'" in " ".join(stderr.split())
    corpus = Corpus.from_pairs(table, opened("t5").tokenizer, 16, "en", 0, text_column="de")
    with pytest.raises(UsageError, match="reads one text"):
        survey(opened("gpt2"), corpus)
