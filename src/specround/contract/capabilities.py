"""`SpecCapabilities`: what one rank's target layers can verify, with the reason for each limit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from specround.contract.errors import ConfigError
from specround.contract.plan import PLAN_KINDS, PlanKind, min_kind


@dataclass(frozen=True)
class SpecLimit:
    """The highest plan kind one layer kind or setting allows, and why not more.

    Attributes:
        kind: Highest plan kind.
        reason: Why it is not higher; empty when `kind` is `"mask"`.

    Raises:
        ConfigError: The kind is unknown, a kind below `"mask"` has no reason, or `"mask"` has one.
    """

    kind: PlanKind
    reason: str = ""

    def __post_init__(self) -> None:
        _check_kind(self.kind)
        if (self.kind == "mask") == bool(self.reason):
            allowed = "empty" if self.reason else "given"
            raise ConfigError("reason", self.reason, f"{allowed} for a limit of {self.kind!r}")


@dataclass(frozen=True)
class SpecCapabilities:
    """What a rank, or after `reduce` the whole target, verifies.

    Attributes:
        kind: Highest plan kind every layer verifies.
        reasons: One sentence per layer kind or setting that lowers the kind, in the order found, without repeats.

    Raises:
        ConfigError: The kind is unknown.

    Example:
        >>> SpecCapabilities.from_limits([SpecLimit("mask"), SpecLimit("tree", "a recurrent state cannot hide a row")])
        SpecCapabilities(kind='tree', reasons=('a recurrent state cannot hide a row',))
    """

    kind: PlanKind
    reasons: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_kind(self.kind)

    @classmethod
    def from_limits(cls, limits: Iterable[SpecLimit]) -> SpecCapabilities:
        """The minimum of some limits; reasons are kept for every limit below `"mask"`."""
        found = list(limits)
        kind = min_kind("mask", *(limit.kind for limit in found))
        return cls(kind, tuple(dict.fromkeys(limit.reason for limit in found if limit.reason)))

    @classmethod
    def reduce(cls, reports: Iterable[SpecCapabilities]) -> SpecCapabilities:
        """The minimum over the reports of several ranks, reasons merged."""
        found = list(reports)
        kind = min_kind("mask", *(report.kind for report in found))
        return cls(kind, tuple(dict.fromkeys(reason for report in found for reason in report.reasons)))


def _check_kind(kind: str) -> None:
    if kind not in PLAN_KINDS:
        raise ConfigError("kind", kind, f"one of {', '.join(PLAN_KINDS)}")
