"""Oracle: the columns of the heads table that `measure.heads` and a survey give."""

from tests.report.synthetic import make_survey
from theodolite.measure.head_roles import (
    ATTENTION_PATTERNS,
    COMMON_ROLES,
    END_TOKEN_SINK,
    LEARNED_SINK,
    PATTERN_ROLES,
    SINK_ROLES,
)

ROLES = (*PATTERN_ROLES, *SINK_ROLES)


def test_every_role_is_read_off_a_column_of_its_own():
    assert len({role.column for role in ROLES}) == len(ROLES)
    assert set(COMMON_ROLES) == set(ROLES) - {LEARNED_SINK, END_TOKEN_SINK}
    assert {role.column for role in COMMON_ROLES} <= set(make_survey().heads.columns)


def test_every_pattern_makes_a_role():
    assert {pattern.role for pattern in ATTENTION_PATTERNS.values()} == set(PATTERN_ROLES)
