"""Other implementations that are measured beside ours; the only part of the benchmark that imports transformers."""
