"""Drawings of rounds: golden texts without colour, marks in colour, and refused input."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from specround.contract import PlanError
from specround.inspector import DrawnRound, draw_round

ROUND = DrawnRound(
    tokens=["' the'", "' cat'", "' dog'", "' sat'", "' ran'", "' on'", "' [b]'", "' off'"],
    parents=[-1, 0, 0, 1, 1, 3, 2, 4],
    path=[0, 1, 3],
    bonus="' down'",
)
GOLDEN = """\
round 3: drafts 7, accepted 2, committed 3
└── ' the' root
    ├── ' cat' accepted
    │   ├── ' sat' accepted
    │   │   ├── ' down' bonus
    │   │   └── ' on'
    │   └── ' ran' ' off'
    └── ' dog' ' [b]'
"""


def drawing(drawn: DrawnRound, **settings) -> str:
    stream = io.StringIO()
    Console(file=stream, width=100, **settings).print(draw_round(drawn, "round 3"))
    return stream.getvalue()


def test_golden_tree():
    """Branches, runs on one line, marks and the bonus are where the round had them; markup in tokens is just text."""
    assert drawing(ROUND, color_system=None) == GOLDEN


def test_golden_chain():
    """A chain that is accepted whole is one line, a root without drafts shows its bonus alone."""
    chain = DrawnRound(tokens=["r", "a", "b"], parents=[-1, 0, 1], path=[0, 1, 2], bonus="c")
    alone = DrawnRound(tokens=["r"], parents=[-1], path=[0], bonus="c")
    assert drawing(chain, color_system=None) == (
        "round 3: drafts 2, accepted 2, committed 3\n└── r root\n    └── a b accepted\n        └── c bonus\n"
    )
    assert drawing(alone, color_system=None) == (
        "round 3: drafts 0, accepted 0, committed 1\n└── r root\n    └── c bonus\n"
    )


def test_colours():
    """Accepted drafts are green, rejected ones dim, the bonus yellow."""
    text = drawing(ROUND, force_terminal=True, color_system="standard")
    assert "\x1b[32m' cat' accepted\x1b[0m" in text
    assert "\x1b[2m' ran' ' off'\x1b[0m" in text
    assert "\x1b[1;33m' down' bonus\x1b[0m" in text


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"tokens": []}, "0 tokens with 3 parents"),
        ({"parents": [-1, 0]}, "3 tokens with 2 parents"),
        ({"parents": [0, 0, 0]}, "column 0: parent=0"),
        ({"parents": [-1, 0, 2]}, "column 2: parent=2"),
        ({"path": []}, r"path=\[\]"),
        ({"path": [1]}, r"path=\[1\]"),
        ({"path": [0, 1, 2]}, r"path=\[0, 1, 2\]"),
        ({"path": [0, 7]}, r"path=\[0, 7\]"),
    ],
)
def test_rounds_that_are_none(changes, names):
    """A round that cannot have happened is refused with the values that contradict each other."""
    values = {"tokens": ["r", "a", "b"], "parents": [-1, 0, 0], "path": [0, 2], "bonus": "c"} | changes
    with pytest.raises(PlanError, match=names):
        DrawnRound(**values)
