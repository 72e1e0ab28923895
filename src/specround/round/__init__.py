"""The round: plan, lay out, accept, commit, observe and propose, the same code in every host."""

from specround.round.batch import RoundBatch, StepShape
from specround.round.layout import PlanLayout
from specround.round.lowering import lower_resources
from specround.round.spec_round import SpecRound

__all__ = ["PlanLayout", "RoundBatch", "SpecRound", "StepShape", "lower_resources"]
