"""The exhibits of the logits' constituents: shares by head, and the attribution of attention patterns."""

from __future__ import annotations

from theodolite.measure.head_roles import ATTENTION_PATTERNS, AttentionPattern
from theodolite.report.data import blocks
from theodolite.report.drawing import constituents as drawing
from theodolite.report.drawing import geometry
from theodolite.report.exhibit import Choice, Option, SurveyExhibit, by_layer_of
from theodolite.report.measures import SONG

_LOOK_FOR = {
    "previous": "a long bar for position alone and a short one with it ablated: a positional head. With rotary or "
    "additive positions, relative position is in every group, the constant one included.",
    "induction": "a long bar for context alone and a short one with it ablated: the head matches tokens, whatever "
    "their positions.",
    "same": "a long bar for context alone and a score near uniform attention with it ablated: the head matches tokens.",
}
_RECOMPUTED = "from the logits of one group of constituents alone, and with that group ablated"
_GROUPS = (
    "Position: position on one side or both, with mean and bias but nothing of the context; context: the reverse; "
    "cross: position on one side, context on the other; constant: mean and bias only. pos-pos and cvec-cvec are the "
    "parts of the first two without mean and bias. Solid line: the head as measured; dotted: uniform attention."
)


def _attribution(name: str, pattern: AttentionPattern) -> SurveyExhibit:
    return SurveyExhibit(
        f"attribution-{name}",
        "constituents",
        f"What makes {pattern.role.plural}",
        ("attribution.score",),
        lambda run: drawing.attribution(run, name),
        f"Mean attention {pattern.target}, on repeated random sequences (not those of the scores under Heads, so the "
        f"numbers differ a little), for the heads with the highest scores, where these are at least "
        f"{drawing.STANDS_OUT:g} times those of uniform attention: recomputed {_RECOMPUTED}."
        + (f" {_GROUPS}" if name == next(iter(ATTENTION_PATTERNS)) else ""),
        _LOOK_FOR[name],
        f"{SONG}, section 5.2 and Fig. 6; the recomputation is ours",
        when=lambda run: bool(drawing.standing_out(run, name)),
    )


CONSTITUENT_EXHIBITS = [
    SurveyExhibit(
        "head-shares",
        "constituents",
        "Constituents of the logits, by head",
        ("heads.share_position",),
        drawing.head_shares,
        "One bar per head: the share of its logits' variance across keys in each pair of constituents of query and "
        "key. Position: position on one side or both, the other side mean or bias; context: what is neither "
        "mean nor position in the same way; position and context: one on each side; constant: mean and bias on both "
        "sides; additive: a bias such as ALiBi. The shares of a head sum to 1; a negative share is "
        "drawn below 0, where a constituent cancels others, which then exceed the dotted line.",
        "heads of one colour: blue ones read position only, red ones tokens. Grey varies only with the norm's scale of "
        "each token, or with rotary positions with the distance.",
        f"{SONG}, section 5.2, with constituents that sum to the logits",
        choice=by_layer_of(blocks, drawing.head_shares, grid=True),
        wide=True,
    ),
    *(_attribution(name, pattern) for name, pattern in ATTENTION_PATTERNS.items()),
    SurveyExhibit(
        "inherited-smoothness",
        "constituents",
        "Smoothness inherited by the logits",
        ("heads.pwp_low_frequency_10",),
        geometry.inherited_smoothness,
        "Share of energy in the K × K lowest frequencies: of the positional basis with itself (PPᵀ, not "
        "normalised), of the same through the heads' weights (PWPᵀ), and of the logits on this text (QK); medians "
        "over the heads of a layer; hover for their range.",
        "PWPᵀ as high as PPᵀ: heads inherit the smoothness, so a query that attends to a position also attends to its "
        "neighbours.",
        f"{SONG}, section 4.2 and Table 3",
        choice=lambda run: Choice(
            "K",
            [Option(str(cutoff), str(cutoff)) for cutoff in geometry.CUTOFFS],
            lambda key: geometry.inherited_smoothness.sketch(run, int(key)),
        ),
    ),
]
