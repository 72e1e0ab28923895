"""Writing keys and values to paged slots, and moving an accepted path into the chain's slots."""
