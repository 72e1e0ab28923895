"""The round: plan, lay out, accept, commit, observe and propose, the same code in every host."""

from specround.round.batch import RoundBatch, StepShape
from specround.round.layout import PlanLayout
from specround.round.lowering import gather_capabilities, lower_resources
from specround.round.spec_round import SpecRound
from specround.round.start_up import create_speculator, declared_resources, effective_resources
from specround.round.state_layout import flush_rows

__all__ = [
    "PlanLayout",
    "RoundBatch",
    "SpecRound",
    "StepShape",
    "create_speculator",
    "declared_resources",
    "effective_resources",
    "flush_rows",
    "gather_capabilities",
    "lower_resources",
]
