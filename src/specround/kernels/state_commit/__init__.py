"""Which state block is each request's committed state, and which rows its state still lacks."""

from specround.kernels.state_commit.naive import commit_states
from specround.kernels.state_commit.tables import StateTables

__all__ = ["StateTables", "commit_states"]
