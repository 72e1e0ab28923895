"""Acceptance: seeded token draws that do not depend on the drafter, and the longest matching path."""
