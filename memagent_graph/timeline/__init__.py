"""Views of one run: how its memory was built, chunk by chunk, and what supports its answer."""
