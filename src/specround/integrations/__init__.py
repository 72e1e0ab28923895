"""Hosts other than the embedded engine."""
