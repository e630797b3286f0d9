"""The bigram-backcopy task, models of it, and what is said of their first token."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from scipy.stats import chisquare

from tests.papers.training.test_embedded_training import quiet
from tests.report.drawn import drawn, finite
from theodolite.errors import UsageError
from theodolite.models import open_model
from theodolite.papers import training_folders as folders
from theodolite.papers.catalogue import made_by
from theodolite.papers.catch_tag_release import backcopy as page
from theodolite.papers.catch_tag_release.backcopy import (
    MEASURES,
    backcopy,
    backcopy_provenance,
    backcopy_table,
    first_token,
    growth_of,
    models_in,
    show_growth,
)
from theodolite.papers.catch_tag_release.backcopy_training import DEFAULT, Backcopy, series_of
from theodolite.papers.experiment import Study
from theodolite.papers.training.models import task_model
from theodolite.papers.training.task_models import train_task_model
from theodolite.report.outcome import Outcome

TASK = Backcopy()
LETTER = 3
"""Id of the first letter; below are the first token and two triggers."""


def test_texts_are_chains_of_bigrams_and_copies():
    """Oracle: the rule, token by token; and χ² of what follows the most frequent letter against its bigrams."""
    texts = TASK.draw(400, np.random.default_rng(0))
    assert (texts[:, 0] == 0).all()
    assert (texts[:, 1:] > 0).all()
    for text in texts[:50].tolist():
        for before, here, after in zip(text, text[1:], text[2:], strict=False):
            assert here >= LETTER or (after == before and before >= LETTER)
    commonest = int(np.bincount(texts.ravel())[LETTER:].argmax())
    here, after = texts[:, 1:-1].ravel(), texts[:, 2:].ravel()
    counts = np.bincount(after[here == commonest + LETTER], minlength=len(TASK.characters))
    expected = TASK.bigrams[commonest] * counts.sum()
    often = expected > 5
    assert counts[0] == 0
    seen, wanted = counts[often], expected[often]
    assert chisquare(seen, wanted * seen.sum() / wanted.sum()).pvalue > 1e-3
    np.testing.assert_allclose(TASK.bigrams.sum(axis=1), 1)
    np.testing.assert_allclose(TASK.bigrams[:, 1:LETTER].sum(axis=1), TASK.triggers)


def test_losses_are_beyond_the_best_possible():
    """Oracle: a reader that knows the rule loses nothing, one that guesses ln 19 at triggers."""

    def knows(input_ids, use_cache):
        logits = torch.full((*input_ids.shape, len(TASK.characters)), -1e9, dtype=torch.float64)
        for row, text in enumerate(input_ids.tolist()):
            for place, token in enumerate(text):
                if token >= LETTER:
                    logits[row, place] = torch.from_numpy(TASK.bigrams[token - LETTER]).log().clamp_min(-1e9)
                elif place:
                    logits[row, place, text[place - 1]] = 0.0
        return SimpleNamespace(logits=logits)

    def guesses(input_ids, use_cache):
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, len(TASK.characters)))

    assert TASK.losses(knows, 8) == pytest.approx({"copy_loss": 0.0, "bigram_loss": 0.0}, abs=1e-9)
    assert TASK.losses(guesses, 8)["copy_loss"] == pytest.approx(np.log(19))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    out = tmp_path_factory.mktemp("trained")
    for optimizer, seed in (("adamw", 0), ("sgd", 0), ("adamw", 1)):
        config = replace(DEFAULT, batch=4, steps=8, optimizer=optimizer, seed=seed, width=8, warm_up=1)
        train_task_model(
            out / f"{optimizer}-{seed}", TASK, config, threads=1, console=quiet(), series=series_of(8)
        )
    return out


def test_an_update_of_sgd_is_the_gradient_times_the_rate(folder):
    """Oracle: the first update by hand, of the same first batch, clipped at 1."""
    config = replace(DEFAULT, width=8)
    torch.manual_seed(0)
    model = task_model(config, len(TASK.characters), TASK.length)
    torch.manual_seed(0 << 32)
    inputs, targets = TASK.batch(0, 4, 0)
    logits = model(input_ids=inputs, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    trained = transformers.GPT2LMHeadModel.from_pretrained(folder / "sgd-0" / "series" / "000001")
    for (name, before), after in zip(model.named_parameters(), trained.parameters(), strict=True):
        torch.testing.assert_close(
            after, before - config.learning_rate * before.grad, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_the_first_token_is_measured_as_transformers_has_it(folder):
    """Oracle: eager attention and hidden states of transformers."""
    reference = transformers.GPT2LMHeadModel.from_pretrained(folder / "adamw-0", attn_implementation="eager")
    ids = TASK.texts(16)[:, :-1]
    measures = first_token(open_model(folder / "adamw-0", device="cpu"), TASK, 16)
    with torch.no_grad():
        out = reference(ids, output_attentions=True, output_hidden_states=True)
        block = reference.transformer.h[0]
        value = block.attn.c_attn(block.ln_1(out.hidden_states[0]))[..., 16:].norm(dim=-1)
    for text, tokens in enumerate(ids.tolist()):
        to_first = out.attentions[0][text, 0, :, 0]
        letters = [place for place, token in enumerate(tokens) if token >= LETTER]
        triggers = [place for place, token in enumerate(tokens) if 0 < token < LETTER]
        assert float(measures.to_first[text, 0, 0]) == pytest.approx(
            float(to_first[letters].mean()), rel=1e-4
        )
        if triggers:
            paid = float(measures.to_first_trigger[text, 0, 0])
            assert paid == pytest.approx(float(to_first[triggers].mean()), rel=1e-4)
    ratio = value[:, 0] / value[:, 1:].mean(1)
    torch.testing.assert_close(measures.value_ratio[:, 0, 0].float(), ratio, rtol=1e-4, atol=1e-5)
    norms = out.hidden_states[0].norm(dim=-1)
    torch.testing.assert_close(measures.first_norm[:, 0].float(), norms[:, 0], rtol=1e-4, atol=1e-5)


def test_a_folder_is_read_by_step(folder, monkeypatch):
    monkeypatch.setattr(page, "CHECKED", 16)
    assert [place.name for place in models_in(folder)] == ["adamw-0", "adamw-1", "sgd-0"]
    table = backcopy_table(folder)
    assert table.groupby("folder")["step"].apply(list).tolist() == [list(range(9))] * 3
    outcome = Outcome()
    show_growth(outcome, table)
    (exhibit,) = outcome.exhibits
    np.testing.assert_allclose(drawn(exhibit.figure), finite(*(table[name] for name in MEASURES)), rtol=1e-6)
    assert folders.provenance_reader(folder) is backcopy_provenance
    assert made_by([backcopy]) == "theodolite train backcopy"
    study = Study(backcopy_provenance(folder))
    del study.provenance["backcopy"]
    with pytest.raises(UsageError, match="pass the folder that `theodolite train backcopy` wrote"):
        study.outcome(backcopy)


def made_up(grows: dict[str, list[float]], noise: float = 0.01, **last: float) -> pd.DataFrame:
    """Three seeds by optimizer, whose first token's norm goes as told over steps 0, 1, …, all else as in `last`."""
    random = np.random.default_rng(0)
    levels = {"to_first": 0.6, "to_first_trigger": 0.1, "value_ratio": 0.2, "norm_ratio": 6.0} | last
    return pd.DataFrame(
        [
            {"folder": f"{optimizer}-{seed}", "optimizer": optimizer, "layers": 3, "seed": seed, "step": step}
            | {name: value + noise * random.normal() for name, value in levels.items()}
            | {"first_norm": norm + noise * random.normal(), "copy_loss": 0.0, "bigram_loss": 0.0}
            for optimizer, norms in grows.items()
            for seed in range(3)
            for step, norm in enumerate(norms)
        ]
    )


def answers(table: pd.DataFrame) -> dict[str, str]:
    outcome = Outcome()
    show_growth(outcome, table)
    return {verdict.claim: verdict.answer for verdict in outcome.verdicts}


def test_growth_is_linear_where_half_of_it_is_in_the_second_half():
    """Oracle: by hand: of 0, 1, …, 8 one half; of √step 1 − √½ = 0.29."""
    table = made_up({"adamw": [*map(float, range(9))]}, noise=0.0)
    assert growth_of(table[table["seed"] == 0]) == pytest.approx((8.0, 0.5))
    slower = made_up({"adamw": [8 * (step / 8) ** 0.5 for step in range(9)]}, noise=0.0)
    assert growth_of(slower[slower["seed"] == 0])[1] == pytest.approx(1 - 0.5**0.5)


def test_verdicts_follow_the_numbers():
    linear, flat, early = [*map(float, range(9))], [0.0] * 9, [0.0] + [8.0] * 8
    right = answers(made_up({"adamw": linear, "sgd": flat}))
    assert {answer for claim, answer in right.items() if "Adam" in claim or "SGD the" in claim} == {"holds"}
    wrong = answers(made_up({"adamw": early, "sgd": early}, to_first=0.1, value_ratio=0.9, norm_ratio=1.2))
    assert wrong["With Adam the first token's norm grows linearly; 3 layers (Guo et al. 2024)"] == "fails"
    assert wrong["With SGD the first token's norm does not grow; 3 layers (Guo et al. 2024)"] == "fails"
    assert (
        wrong["The first token is a sink where heads have nothing to do; 3 layers, AdamW (Guo et al. 2024)"]
        == "fails"
    )
    assert wrong["The first token's value is drained; 3 layers, AdamW (Guo et al. 2024)"] == "fails"
    assert wrong["The first token has a residual-state peak; 3 layers, AdamW (Guo et al. 2024)"] == "fails"


@pytest.mark.parametrize(
    ("letters", "triggers", "answer"), [(0.6, 0.1, "holds"), (0.1, 0.02, "fails"), (0.6, 0.9, "fails")]
)
def test_a_head_that_hardly_attends_to_the_first_token_is_not_dormant(letters, triggers, answer):
    """0.1 from letters is about what uniform attention pays, however little the triggers pay."""
    found = answers(made_up({"sgd": [0.0, 1.0]}, to_first=letters, to_first_trigger=triggers))
    claim = "The head is dormant at letters and active at triggers; 3 layers, SGD (Guo et al. 2024)"
    assert found[claim] == answer
