"""The gated delta rule over trees: Gated DeltaNet (one decay per head) and KDA (one per key channel)."""

from __future__ import annotations

from specround.kernels.gated_delta_rule.naive import DeltaRuleCache, fold_delta_rule, gated_delta_rule

__all__ = ["DeltaRuleCache", "fold_delta_rule", "gated_delta_rule"]
