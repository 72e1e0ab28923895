"""Kernels of the round: the registry, the built-in provider, and one folder per op."""
