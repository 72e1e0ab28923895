"""Draw one round: the verified tree, the path that was kept, and the bonus token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.text import Text
from rich.tree import Tree

from specround.contract import PlanError

Mark = Literal["root", "accepted", "rejected", "bonus"]

_STYLES: dict[Mark, str] = {"root": "bold", "accepted": "green", "rejected": "dim", "bonus": "bold yellow"}


@dataclass(frozen=True, kw_only=True)
class DrawnRound:
    """One request's round in words that can be shown.

    Attributes:
        tokens: Text of each used column, root first.
        parents: Parent column of each column, smaller than its own; -1 for the root.
        path: Columns kept, in order, root first.
        bonus: Text of the token that the last kept column's logits decided.

    Raises:
        PlanError: Lengths differ, a parent is not an earlier column, or the path is not one.

    Example:
        >>> DrawnRound(tokens=["a", "b", "c"], parents=[-1, 0, 0], path=[0, 2], bonus="d").num_accepted
        1
    """

    tokens: Sequence[str]
    parents: Sequence[int]
    path: Sequence[int]
    bonus: str

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.parents):
            raise PlanError(f"{len(self.tokens)} tokens with {len(self.parents)} parents: must be as many, at least 1")
        for column, parent in enumerate(self.parents):
            if not (parent == -1 if column == 0 else 0 <= parent < column):
                raise PlanError(
                    f"column {column}: parent={parent}: must be {'-1' if column == 0 else 'an earlier one'}"
                )
        inside = all(0 <= column < len(self.tokens) for column in self.path)
        if not inside or [self.parents[column] for column in self.path] != [-1, *self.path[:-1]]:
            raise PlanError(f"path={list(self.path)}: must start at column 0 and go from parent to child")

    @property
    def num_drafts(self) -> int:
        """Drafts verified."""
        return len(self.tokens) - 1

    @property
    def num_accepted(self) -> int:
        """Drafts kept."""
        return len(self.path) - 1


def draw_round(drawn: DrawnRound, title: str) -> Tree:
    """The round as a tree for a rich console: accepted drafts green, rejected ones dim, the bonus marked.

    Drafts that follow one another without a branch and share their fate stand on one line. The marks are words, so the
    drawing says the same without colour.

    Args:
        drawn: The round.
        title: Goes before the counts on the first line.

    Example:
        >>> rich.print(draw_round(DrawnRound(tokens=["a", "b", "c"], parents=[-1, 0, 0], path=[0, 2], bonus="d"), "r"))
        r: drafts 2, accepted 1, committed 2
        └── a root
            ├── b
            └── c accepted
                └── d bonus
    """
    counts = f"drafts {drawn.num_drafts}, accepted {drawn.num_accepted}, committed {len(drawn.path)}"
    tree = Tree(Text(f"{title}: {counts}"), guide_style="dim")
    children: list[list[int]] = [[] for _ in drawn.tokens]
    for column, parent in enumerate(drawn.parents):
        if parent >= 0:
            children[parent].append(column)
    waiting = [(tree, 0)]
    while waiting:
        above, column = waiting.pop()
        run, mark = _run(column, children, drawn.path)
        branch = above.add(_label([drawn.tokens[each] for each in run], mark))
        waiting += [(branch, child) for child in reversed(children[run[-1]])]
        if run[-1] == drawn.path[-1]:
            branch.add(_label([drawn.bonus], "bonus"))
    return tree


def _run(column: int, children: Sequence[Sequence[int]], path: Sequence[int]) -> tuple[list[int], Mark]:
    """The columns from one on that stand on one line, and their mark."""
    kept = set(path)
    mark: Mark = "root" if column == 0 else "accepted" if column in kept else "rejected"
    run = [column]
    while mark != "root" and len(children[run[-1]]) == 1:
        following = children[run[-1]][0]
        if (following in kept) != (mark == "accepted"):
            break
        run.append(following)
    return run, mark


def _label(tokens: Sequence[str], mark: Mark) -> Text:
    text = " ".join(tokens)
    return Text(text if mark == "rejected" else f"{text} {mark}", style=_STYLES[mark])
