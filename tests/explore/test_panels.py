"""What the page is given: figures with their switches, words with their numbers, refusals in one line."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tests import checkpoints
from tests.explore.conftest import PROMPT, SINKS_PROMPT, subject_of
from theodolite.errors import UsageError
from theodolite.explore import panels
from theodolite.explore.panels import (
    Selection,
    attention_map,
    evidence,
)
from theodolite.explore.subject import (
    MOST_CHARACTERS,
    Subject,
    check_pair,
    offered_prompts,
    prompt_ids,
)
from theodolite.models import open_model
from theodolite.models.texts import shipped_prompt
from theodolite.sinks.prompt import Sink


def shown(subjects, prompt: str = PROMPT, layer: int = 0, head: int = 0) -> Selection:
    return Selection(subjects, prompt_ids(subjects, prompt), layer, head)


def test_the_attention_map_and_its_switches(sharp):
    at = next(
        at for at in (shown([sharp], SINKS_PROMPT, *place) for place in np.ndindex(2, 2)) if at.views[0].sinks
    )
    view = at.views[0]
    trace = panels.attention(at)[0].data[0]
    np.testing.assert_allclose(trace.z, view.attention, atol=1e-7)
    assert (trace.zmin, trace.zmax) == (0, pytest.approx(np.nanmax(view.attention), rel=1e-5))

    axis = panels.attention(at)[0].layout.xaxis
    marked = [tick for tick, text in zip(axis.tickvals, axis.ticktext, strict=True) if "▼" in text]
    assert marked == [sink.position for sink in view.sinks]

    trace = panels.attention(at._replace(log=True))[0].data[0]
    np.testing.assert_allclose(trace.z, np.log10(np.maximum(view.attention, 1e-5)), atol=1e-5)
    assert trace.zmin == -5

    # Where no key is seen, the map is empty, and there is one.
    drawn = attention_map(replace(view, attention=np.full((4, 4), np.nan), tokens=tuple("abcd"), sinks=()))
    assert np.isnan(drawn.data[0].z).all()


def test_labels_of_the_attention_map_do_not_touch(sharp):
    """Oracle: a line of 9 pixels is 12 high; the map of a column of 380 pixels is 380 − 92 wide and high."""
    view = sharp.view(prompt_ids([sharp], PROMPT), 0, 0)
    local = tuple(Sink(place, 0.5, 3, True) for place in range(100, 140))
    for count, sinks in ((30, ()), (240, ()), (240, local)):
        long = replace(
            view, tokens=("word",) * count, attention=np.tril(np.full((count, count), 0.1)), sinks=sinks
        )
        axis = attention_map(long).layout.xaxis
        ticks = axis.tickvals
        assert min(np.diff(ticks)) * (380 - 92) / count >= 12
        marked = [tick for tick, text in zip(ticks, axis.ticktext, strict=True) if "▼" in text]
        assert marked == ([100, 110, 120, 130] if sinks else [])


def test_the_map_frames_the_head_and_names_what_can_be_shown(subject, sharp):
    at = shown([sharp], PROMPT, 1, 0)
    frame = panels.head_map(at._replace(measure="prompt:entropy"))[0].layout.shapes[0]
    assert (frame.x0, frame.x1, frame.y0, frame.y1) == (-0.5, 0.5, 0.5, 1.5)
    offered = dict(panels.measures_of([sharp]))
    assert offered["this prompt · entropy"] == "prompt:entropy"
    assert offered["the text · induction"] == "text:induction"
    assert "this prompt · learned sink" not in offered
    assert all(panels.head_map(at._replace(measure=value))[0] for value in offered.values())
    assert "this prompt · learned sink" in dict(panels.measures_of([subject("gpt_oss")]))
    # No token comes twice: there is nothing to draw.
    assert panels.head_map(shown([sharp], "abcdefgh")._replace(measure="prompt:same_token")) == [None]
    expected = sharp.run.heads["entropy"].to_numpy().reshape(2, 2)
    np.testing.assert_allclose(
        panels.head_map(at._replace(measure="text:entropy"))[0].data[0].z, expected, atol=1e-6
    )
    assert np.abs(panels.head_map(at._replace(measure="prompt:entropy"))[0].data[0].z - expected).max() > 1e-3


def test_evidence_has_the_numbers_and_the_thresholds(sharp):
    ids = prompt_ids([sharp], PROMPT)
    run, measured = sharp.run, sharp.measured(ids)
    heads = run.heads.copy()
    heads.loc[(heads["layer"] == 1) & (heads["head"] == 1), ["previous_token", "induction"]] = [0.49, 0.12]
    planted = replace(run, heads=heads)
    found = evidence(planted, measured, 1, 1)
    by_name = {role.title: told for role, *told in found}
    on_text, on_prompt, has_it = by_name["previous-token head"]
    assert on_text == 0.49
    assert has_it
    assert not by_name["induction head"][2]
    assert math.isnan(by_name["induction head"][1])
    row = measured.heads[(measured.heads["layer"] == 1) & (measured.heads["head"] == 1)].iloc[0]
    assert on_prompt == row["previous_token"]
    assert [one[3] for one in found] == sorted((one[3] for one in found), reverse=True)
    said = panels.head_html(planted, measured, 1, 1)
    assert "<h4>L1H1 previous-token head" in said
    assert "✓ previous-token head" in said
    assert "<td>0.49</td>" in said
    assert "<td>0.4</td>" in said


def test_tokens_are_marked_without_colour_and_nothing_in_them_is_markup(sharp, subject):
    ids = prompt_ids([sharp], SINKS_PROMPT)
    views = [sharp.view(ids, layer, head) for layer in range(2) for head in range(2)]
    view = next(view for view in views if any(sink.caught for sink in view.sinks))
    tokens = tuple("<script>alert(1)</script>" if at == 2 else text for at, text in enumerate(view.tokens))
    said = panels.sinks_html(replace(view, tokens=tokens), 1.0)
    assert "<script>" not in said
    assert "&lt;script&gt;" in said
    assert f"<b>▼1</b>{view.tokens[view.sinks[0].position]}" in said
    assert said.count("<sub>") == sum(sink.caught for sink in view.sinks)
    assert f"catches {view.sinks[0].caught} token" in said
    tags = sharp.tags(ids, view.layer, view.head)
    tagged = panels.tags_html(replace(view, tokens=tokens), tags)
    assert "<script>" not in tagged
    assert tagged.count("background:rgb(") == len(ids)
    assert panels.html("line", "why <not>") == "<p>why &lt;not&gt;</p>"
    assert panels.html("refusal", "a <b>") == "<p><b>a &lt;b&gt;</b></p>"
    no_sink = replace(view, sinks=(), group=np.full(len(ids), -1))
    assert "No sink" in panels.sinks_html(no_sink, 1.0)
    own = subject("gpt_oss")
    view = own.view(prompt_ids([own], PROMPT), 0, 0)
    learned = f"{view.learned.mean():.2f} of the attention goes to a learned sink column"
    assert learned in panels.sinks_html(view, 1.0)


def test_constituents_are_drawn_or_refused_with_the_reason(subject):
    own = subject("gpt2")
    (figure,) = panels.constituents(shown([own]))
    assert panels.not_split(shown([own])) == [""]
    assert len(figure.data) == 7  # position, context, two of both, constant, QK, attention
    long = shown([own], "a" * 60)  # longer than the survey's contexts
    assert panels.constituents(long) == [None]
    (refused,) = panels.not_split(long)
    assert "the decomposition has 32 positions and the prompt 60" in refused


def test_heads_and_prompts_that_cannot_be_shown(subject, sharp):
    assert panels.parse_head(" l3h12 ") == (3, 12)
    for wrong in ("", "3,5", "L3", "LxHy", "L-1H0", "L1H²"):
        with pytest.raises(UsageError, match="write L3H5"):
            panels.parse_head(wrong)
    with pytest.raises(UsageError, match="layer 9 does not exist"):
        sharp.view(prompt_ids([sharp], PROMPT), 9, 0)
    gpt2, bloom = subject("gpt2"), subject("bloom")
    for prompt, said in (
        ("", "the prompt is empty"),
        (" \n ", "the prompt is empty"),
        ("abc", "the prompt is 3 tokens long: type at least 4"),
        ("a" * 129, "129 tokens long: at most 128 can be shown, the number of positions of the model"),
    ):
        with pytest.raises(UsageError, match=said):
            prompt_ids([gpt2], prompt)
    with pytest.raises(UsageError, match=r"513 tokens long: at most 512 can be shown$"):
        prompt_ids([bloom], "a" * 513)
    with pytest.raises(UsageError, match=rf"2,000,000 characters long: at most {MOST_CHARACTERS:,}"):
        prompt_ids([bloom], "ab cd" * 400_000)  # before it is tokenized, which would take minutes
    assert len(prompt_ids([bloom], "a" * 512)) == 512
    assert prompt_ids([gpt2], "half \ud83d a pair") == prompt_ids([gpt2], "half ? a pair")
    untold = Subject(gpt2.name, replace(gpt2.model, tokenizer=None), gpt2.run)
    with pytest.raises(UsageError, match="no tokenizer beside its weights"):
        prompt_ids([untold], PROMPT)
    for name, prompt in offered_prompts([sharp]).items():  # of 64 bytes at most
        assert shipped_prompt(name).endswith(prompt)
        assert 48 < len(prompt_ids([sharp], prompt)) <= 64
    for prompt in offered_prompts([gpt2]).values():  # 32 were surveyed
        assert len(prompt_ids([gpt2], prompt)) <= 32


def test_models_that_cannot_stand_side_by_side(opened, tmp_path):
    gpt2 = opened("gpt2")
    check_pair({"a": gpt2, "b": opened("llama3")})
    fewer = {name: getattr(gpt2.structure, name)[:2] for name in ("attention", "blocks")}
    with pytest.raises(UsageError, match="small has 2 layers, a 3: only models of one shape"):
        check_pair({"a": gpt2, "small": replace(gpt2, structure=replace(gpt2.structure, **fewer))})
    folder = checkpoints.write("gpt2", tmp_path / "other")
    tokenizer = checkpoints.byte_tokenizer()
    tokenizer.add_tokens(["the"])
    tokenizer.save_pretrained(folder)
    other = open_model(folder)
    with pytest.raises(UsageError, match="a and b read text as different tokens"):
        check_pair({"a": gpt2, "b": other})
    both = [subject_of("a", gpt2), subject_of("b", other)]
    assert prompt_ids(both, "abcdef")
    with pytest.raises(UsageError, match="a and b read text as different tokens"):
        prompt_ids(both, PROMPT)


def test_two_models_share_their_scales(subject):
    both = [subject("gpt2"), subject("llama3")]
    at = shown(both, PROMPT, 1, 0)
    views = at.views
    # Entropies, since the first row of attention has a 1 in any model.
    drawn = [figure.data[0] for figure in panels.head_map(at)]
    most = [own.measured(at.ids).heads["entropy"].max() for own in both]
    assert [trace.zmax for trace in drawn] == pytest.approx([drawn[0].zmax] * 2)
    assert drawn[0].zmax >= max(most) - 1e-6

    parts = [figure.layout for figure in panels.constituents(at)]
    for axis in ("coloraxis", "coloraxis2"):
        assert parts[0][axis].cmax == parts[1][axis].cmax

    received = [np.nan_to_num(view.received) for view in views]
    for said, own in zip(panels.sinks(at), received, strict=True):
        red = np.array([int(part.split(",")[0]) for part in said.split("background:rgb(")[1:]])
        np.testing.assert_allclose(
            (255 - red) / (255 - 197), own / np.concatenate(received).max(), atol=0.011
        )
