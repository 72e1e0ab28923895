"""Showing what rounds did: drawings of verified trees and their accepted paths."""

from specround.inspector.rounds import DrawnRound, draw_round

__all__ = ["DrawnRound", "draw_round"]
