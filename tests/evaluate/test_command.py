"""The command as its users meet it. Oracles: the functions that it calls, each tested beside this file."""

from __future__ import annotations

import io
import json
import math
import signal
import sys
from functools import partial

import numpy as np
import pytest
import transformers
from rich.console import Console

from tests.calls import call as called
from theodolite.cli.options import numbers_of
from theodolite.corpus.named import make_corpus, make_stream
from theodolite.corpus.sampling import Choice
from theodolite.errors import UsageError
from theodolite.evaluate import command
from theodolite.evaluate.command import tables
from theodolite.evaluate.few_shot import few_shot_answers, word_tasks
from theodolite.evaluate.perplexity import perplexity
from theodolite.evaluate.scores import Score, table
from theodolite.models import OpenModel
from theodolite.system.files import locked

call = partial(called, "evaluate")


def test_perplexity_and_few_shot_of_two_models(checkpoint, opened, text, tmp_path):
    """Oracle: the functions themselves; the second model has paired differences to the first."""
    first, second = checkpoint("gpt2"), checkpoint("llama3")
    of_text = ("--corpus", text, "--length", 32)
    options = (*of_text, "--task", "few-shot", "--shots", "0,2", "--prompts", 4, "--json")
    status, stdout, stderr = call(first, second, *options)
    assert status == 0, stderr
    said = json.loads(stdout)
    assert [model["id"] for model in said["models"]] == [str(first), str(second)]
    assert said["versions"]["torch"]
    rows = {(row["model"], row["metric"], row["shots"]): row for row in reversed(said["scores"])}
    tasks = 1 + len(word_tasks())
    assert len(said["scores"]) == 2 * (3 + 2 * tasks)
    model = opened("llama3")
    corpus = make_corpus(text, model.tokenizer, 32, Choice(256))
    loss = rows[str(second), "loss", 0]
    assert loss["value"] == pytest.approx(perplexity(model, corpus).loss)
    assert rows[str(second), "perplexity", 0]["value"] == pytest.approx(math.exp(loss["value"]))
    # A byte a token: 31 are predicted of 32.
    assert rows[str(second), "bits per byte", 0]["value"] == pytest.approx(loss["value"] / math.log(2))
    apart = perplexity(model, corpus).losses - perplexity(opened("gpt2"), corpus).losses
    assert loss["difference"] == pytest.approx(apart.mean())
    answers = [few_shot_answers(m, prompts=4, shots=2) for m in (opened("gpt2"), model)]
    each = [np.mean(list(of.values()), axis=0) for of in answers]
    for shots in (0, 2):
        row = rows[str(second), "accuracy", shots]
        assert row["task"] == "few-shot"
        assert row["value"] == each[1][:, shots].mean()
        assert row["difference"] == pytest.approx((each[1] - each[0])[:, shots].mean())
    assert rows[str(first), "accuracy", 2]["difference"] is None


def test_what_is_in_the_file_is_not_asked_again(checkpoint, tmp_path, monkeypatch):
    """Oracle: the bytes of the file, and a model that may not be asked; other prompts are other questions."""
    out = tmp_path / "scores.json"
    options = (checkpoint("gpt2"), "--task", "few-shot", "--shots", "0-2", "--prompts", 4, "--out", out)
    with locked(out):  # two would each write what they have measured over what the other has
        status, _, stderr = call(*options)
    assert (status, "another process is writing to" in stderr) == (2, True)
    assert not out.exists()
    assert call(*options)[0] == 0
    before = out.read_bytes()

    def refuse(*_, **__):
        raise AssertionError("asked again")

    monkeypatch.setattr(transformers.GPT2LMHeadModel, "forward", refuse)
    status, stdout, stderr = call(*options, "--shots", "0,2")
    assert status == 0, stderr
    assert "accuracy" in stdout
    assert out.read_bytes() == before
    status, _, stderr = call(*options[:5], "--prompts", 5, "--out", out)
    assert (status, "asked again" in stderr) == (1, True)
    assert out.read_bytes() == before


def test_one_number_of_shots_after_the_other_is_kept(checkpoint, tmp_path, monkeypatch):
    """Oracle: which calls lm-eval gets; an interruption loses the one that was under way, and no other."""
    asked: list[int] = []

    def measured(model, tasks, shots, **_):
        if shots == [2] and len(asked) < 3:
            asked.append(-1)
            signal.raise_signal(signal.SIGINT)
        asked.append(*shots)
        return [Score(model.id, "sums", shots[0], "acc", 0.5, 0.1, 4, 8, "q", np.array([0.0, 1, 0, 1]))]

    monkeypatch.setattr(command, "harness", measured)
    monkeypatch.setattr(command, "task_manager", lambda *_: None)
    options = (checkpoint("gpt2"), "--task", "sums", "--shots", "0-2", "--out", tmp_path / "s.json", "--json")
    assert call(*options)[0] == 130
    status, stdout, stderr = call(*options)
    assert status == 0, stderr
    assert asked == [0, 1, -1, 2]
    assert [row["shots"] for row in json.loads(stdout)["scores"]] == [0, 1, 2]


def test_scores_in_conversations_are_kept_apart(copied, tmp_path, monkeypatch):
    """Oracle: which calls lm-eval gets, by template and system text; without a template no model is opened."""
    asked: list[object] = []

    def measured(model, tasks, shots, *, chat_template=False, system=None, **_):
        asked.append((chat_template, system))
        how = {"chat_template": chat_template, "system": system or ""}
        return [Score(model.id, "sums", 0, "acc", 0.5, 0.1, 2, 8, "q", np.array([0.0, 1]), **how)]

    monkeypatch.setattr(command, "harness", measured)
    monkeypatch.setattr(command, "task_manager", lambda *_: None)
    folder = copied("gpt2")
    options = (folder, "--task", "sums", "--shots", 0, "--out", tmp_path / "s.json")
    with monkeypatch.context() as patched:
        patched.setattr("theodolite.models.open_model", lambda *_, **__: pytest.fail("opened"))
        status, _, stderr = call(*options, "--chat-template")
    assert status == 2
    assert "has no chat template: leave out --chat-template" in stderr
    for template in ("{{ messages[0].content }}?", "{{ messages[0].content }}!"):
        (folder / "chat_template.jinja").write_text(template)
        for more in ((), ("--chat-template",), ("--chat-template", "--system", "Add.")):
            status, stdout, stderr = call(*options, *more)
            assert status == 0, stderr
            assert ("by each model's chat template" in " ".join(stdout.split())) == bool(more)
    chats = [(True, None), (True, "Add.")]
    assert asked == [(False, None), *chats, *chats]  # the first is kept, whatever the template


def test_an_interrupted_text_goes_on_where_it_stopped(checkpoint, text, tmp_path, monkeypatch):
    """Oracle: the file of an evaluation in one go; how many contexts the model reads after the interrupt."""
    options = (checkpoint("gpt2"), "--corpus", text, "--length", 32, "--contexts", 6, "--batch", 2)
    assert call(*options, "--out", tmp_path / "whole.json")[0] == 0
    out, read = tmp_path / "scores.json", []
    logits = OpenModel.logits

    def counted(model, ids):
        read.append(len(ids))
        if len(read) == 2:
            signal.raise_signal(signal.SIGINT)
        return logits(model, ids)

    monkeypatch.setattr(OpenModel, "logits", counted)
    assert call(*options, "--out", out)[0] == 130
    assert not out.exists()
    assert call(*options, "--out", out)[0] == 0
    assert read == [2, 2, 2]
    assert out.read_bytes() == (tmp_path / "whole.json").read_bytes()
    assert not list(tmp_path.glob("*.partial"))


def test_without_a_task_it_is_the_loss_on_the_text_inside_every_python(checkpoint):
    status, stdout, stderr = call(checkpoint("gpt2"), "--contexts", 3, "--length", 16)
    assert status == 0, stderr
    assert "held-out: perplexity" in stdout
    assert "bits per byte" in stdout
    assert "few-shot" not in stdout


def test_the_table_shows_values_and_differences():
    """Oracle: the words and numbers, as text."""
    each = np.array([1.0] * 9 + [0.0] * 7)
    shared = {"task": "t", "shots": 3, "metric": "accuracy", "count": 16, "batch": 2, "questions": "q"}
    scores = [
        Score("a/dense", value=0.5625, error=0.128, each=each, **shared),
        Score("b/pruned", value=0.4375, error=0.128, each=1 - each, **shared),
    ]
    console = Console(width=80, record=True, file=io.StringIO())
    for shown in tables(table(scores)):
        console.print(shown)
    text = " ".join(console.export_text().split())
    for words in ("dense", "pruned", "0.56 ± 0.13", "−0.1 ± 0.3"):
        assert words in text


@pytest.mark.slow
def test_a_stride_reads_the_text_as_one_sequence(checkpoint, opened, text, tmp_path):
    """Oracle: the function on the tokens of the whole text; other windows are other questions."""
    model, out = opened("llama3"), tmp_path / "scores.json"
    stream = make_stream(text, model.tokenizer)
    beside = ("--task", "few-shot", "--prompts", 2, "--shots", 0)  # asks for accuracies as well
    for stride, length, more in ((16, 64, ()), (64, 64, beside)):
        options = ("--corpus", text, "--stride", stride, "--length", length, "--out", out, "--json")
        status, stdout, stderr = call(checkpoint("llama3"), *options, *more)
        assert status == 0, stderr
        rows = {row["metric"]: row for row in json.loads(stdout)["scores"]}
        assert ("accuracy" in rows) == bool(more)
        wanted = perplexity(model, stream, stride=stride, length=length)
        assert rows["loss"]["value"] == pytest.approx(wanted.loss)
        assert rows["loss"]["task"] == f"{text}, windows of 64 tokens by {stride}"
    assert len(json.loads(out.read_text())["measured"]) == 3
    options = ("--corpus", text, "--stride", 16, "--length", 64, "--contexts", 5, "--json")
    loss = json.loads(call(checkpoint("llama3"), *options)[1])["scores"][0]
    first = make_stream(text, model.tokenizer, tokens=64 + 4 * 16)
    wanted = perplexity(model, first, stride=16, length=64)
    assert (len(wanted.losses), loss["value"]) == (5, pytest.approx(wanted.loss))


def test_numbers_of_examples_are_read_or_refused():
    for given, found in (("3", [3]), ("0-2", [0, 1, 2]), ("0,2,5", [0, 2, 5]), ("4,0-1,1", [0, 1, 4])):
        assert numbers_of(given, "--shots") == found
    for given in ("", "x", "-1", "1-2-3", "5-0", "0,", "²"):
        with pytest.raises(UsageError, match="give numbers and spans"):
            numbers_of(given, "--shots")


NO_TEXT = "without --corpus or --stride: leave out "
NOTHING = "nothing has such an option: leave out "


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--corpus TEXT --task few-shot --shots 17", "few-shot takes up to 16 examples: use --shots 0-16"),
        ("--task few-shot --batch 0", "a batch of 0 prompts reads nothing"),
        ("--task few-shot --shots six", "--shots six: give numbers and spans"),
        ("--task few-shot --length 64", NO_TEXT + "--length"),
        ("--tasks FOLDER --text-column body", NO_TEXT + "--text-column"),
        ("--corpus TEXT --stride 16 --per-label 4", "leave out --per-label"),
        ("--corpus TEXT --as-published", "begin as it does: leave out --as-published"),
        ("--corpus TEXT --stride 16 --as-published --no-special-tokens", "give --as-published or"),
        ("--shots 0-5", "there are no examples: leave out --shots"),
        ("--prompts 8", "without --task few-shot nothing has such an option: leave out --prompts"),
        ("--limit 10", NOTHING + "--limit"),
        ("--task few-shot --download", NOTHING + "--download"),
    ],
)
def test_what_cannot_be_asked_is_one_line_before_anything_is_read(checkpoint, text, monkeypatch, words, says):
    monkeypatch.setattr("theodolite.evaluate.perplexity.loss_rows", None)
    given = [{"TEXT": text, "FOLDER": text.parent}.get(word, word) for word in words.split()]
    status, _, stderr = call(checkpoint("gpt2"), *given)
    assert status == 2, stderr
    assert says in stderr
    assert len(stderr.strip().splitlines()) == 1


def test_without_lm_eval_all_but_its_tasks_work_and_they_say_what_to_install(checkpoint, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    status, stdout, stderr = call(
        checkpoint("gpt2"), "--task", "few-shot", "--shots", 1, "--prompts", 2, "--json"
    )
    assert status == 0, stderr
    assert len(json.loads(stdout)["scores"]) == 1 + len(word_tasks())
    status, _, stderr = call(checkpoint("gpt2"), "--task", "arc_easy", "--shots", 0)
    assert status == 2
    assert "pip install '.[evaluate]'" in stderr
    assert len(stderr.strip().splitlines()) == 1
