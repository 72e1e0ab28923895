"""Recurrent mixers of our own: they use a Hugging Face module's weights and keep states as the engine does."""
