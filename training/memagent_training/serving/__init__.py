"""A vLLM server of one's own, and new weights into the one that reads."""
