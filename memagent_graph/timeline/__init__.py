"""One run, looked at: how its memory came to be, chunk by chunk, and what supports its answer."""
