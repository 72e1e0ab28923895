"""Models: where they come from, how they are read, and the hook through which their layers attend."""
