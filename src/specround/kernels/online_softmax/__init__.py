"""Softmax over keys that are read block by block."""
