"""The roles that heads have and the attention patterns that they follow: columns, thresholds and names, known once.

A head has a role where its score reaches the role's threshold. Thresholds are conventions of ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from theodolite.attention.summary import SINK_THRESHOLD


@dataclass(frozen=True)
class HeadRole:
    """A role of a head, which has it where the score in `column` (or a share computed from it) reaches `threshold`.

    `name` is of what is scored, `title` of a head that has the role. From the score `explains_low_entropy` on the role
    alone accounts for a low attention entropy. `target` says where a query attends, of a pattern on a repeated
    sequence.
    """

    column: str
    name: str
    title: str
    threshold: float
    meaning: str
    explains_low_entropy: float = math.inf
    target: str = ""


PREVIOUS_TOKEN = HeadRole(
    "previous_token",
    "previous token",
    "previous-token head",
    0.4,
    "Mean attention from a token to the one just before it.",
    explains_low_entropy=0.6,
    target="to the previous token",
)
INDUCTION = HeadRole(
    "induction",
    "induction",
    "induction head",
    0.3,
    "On a repeated random sequence: mean attention to the token that followed the earlier copy.",
    explains_low_entropy=0.6,
    target="to the token that followed the earlier copy",
)
SAME_TOKEN = HeadRole(
    "same_token",
    "same token",
    "same-token head",
    0.3,
    "Mean attention from a token to its earlier copies.",
    explains_low_entropy=0.6,
    target="to the earlier copy of the same token",
)
FIRST_TOKEN_SINK = HeadRole(
    "sink_first",
    "first-token sink",
    "first-token sink head",
    0.5,
    "Share of contexts in which the first token is a sink: later queries pay it more than "
    f"{SINK_THRESHOLD} on average.",
    explains_low_entropy=0.9,
)
LATER_SINK = HeadRole(
    "sink_later",
    "later sink",
    "later sink head",
    0.1,
    "Share of contexts in which a token after the first is a sink.",
)
END_TOKEN_SINK = HeadRole(
    "sink_last",
    "end-token sink",
    "end-token sink head",
    0.5,
    "Share of contexts in which a special token that the tokenizer puts at the end ([SEP]) is a sink.",
    explains_low_entropy=0.9,
)
"""Only where a tokenizer puts one there: such attention often does nothing (Clark et al. 2019, section 3.2)."""

LEARNED_SINK = HeadRole(
    "sink_learned",
    "learned sink",
    "learned sink head",
    0.3,
    "Mean attention to a learned sink column of the model, which belongs to no token.",
)
UNIFORM_ATTENTION = HeadRole(
    "entropy_share",
    "uniform attention",
    "uniform-attention head",
    0.995,
    "Mean attention entropy as a share of the highest possible.",
)

PATTERN_ROLES = (PREVIOUS_TOKEN, INDUCTION, SAME_TOKEN)
SINK_ROLES = (FIRST_TOKEN_SINK, LATER_SINK, END_TOKEN_SINK, LEARNED_SINK)
ROLES = (*PATTERN_ROLES, *SINK_ROLES, UNIFORM_ATTENTION)
COMMON_ROLES = (FIRST_TOKEN_SINK, LATER_SINK, PREVIOUS_TOKEN, SAME_TOKEN, INDUCTION)
"""Those that heads of every model may have."""


ATTENTION_PATTERNS = {"induction": INDUCTION, "previous": PREVIOUS_TOKEN, "same": SAME_TOKEN}
"""Those that heads are scored on and attributed to, on a repeated sequence, by the name that tables have, in order."""

SLIGHT, STRONG = 0.1, 0.2
"""Mean attention along a pattern below which no head follows it, and from which on a head is always attributed."""
