"""The exhibits of the logits' constituents: shares by head, and the attribution of attention patterns."""

from __future__ import annotations

from theodolite.measure.head_roles import ATTENTION_PATTERNS, AttentionPattern
from theodolite.measure.publications import SONG
from theodolite.report.data import blocks
from theodolite.report.drawing import constituents as drawing
from theodolite.report.drawing import geometry
from theodolite.report.exhibit import Choice, Option, SurveyExhibit, by_layer_of

_LOOK_FOR = {
    "previous": "position: long alone, short when ablated. RoPE and ALiBi put relative position in every group.",
    "induction": "context: long alone, short when ablated: the head matches tokens, wherever they are.",
    "same": "context: long alone, near uniform attention when ablated: the head matches tokens.",
}
_GROUPS = (
    "Position: query or key supplies position, neither supplies context. Context: the reverse. Cross: one each. "
    "Constant: mean and bias only. pos-pos, cvec-cvec: without mean and bias."
)


def _attribution(name: str, pattern: AttentionPattern) -> SurveyExhibit:
    return SurveyExhibit(
        f"attribution-{name}",
        "constituents",
        f"What makes {pattern.role.plural}",
        ("attribution.score",),
        lambda run: drawing.attribution(run, name),
        f"Mean attention {pattern.target} on repeated random sequences. Black: using only this group of the logits' "
        "constituents. Blue: without it. Solid line: the head itself; dotted: uniform attention."
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
        "One bar per head: what varies its logits across keys. Position: query or key supplies position, neither "
        "supplies context. Context: the reverse. Constant: mean and bias only. Shares sum to 1; negative ones cancel "
        "others.",
        "heads of one colour: blue reads position, red tokens. Grey depends on no token; with RoPE, on distance.",
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
        "Share of energy in the K × K lowest frequencies: of the positional basis (PPᵀ), of the same through the "
        "heads' weights (PWPᵀ), and of the logits (QK); medians over a layer's heads; hover for their range.",
        "PWPᵀ as high as PPᵀ: heads inherit the smoothness and attend to neighbouring positions alike.",
        f"{SONG}, section 4.2 and Table 3",
        choice=lambda run: Choice(
            "K",
            [Option(str(cutoff), str(cutoff)) for cutoff in geometry.CUTOFFS],
            lambda key: geometry.inherited_smoothness.sketch(run, int(key)),
        ),
    ),
]
