"""Rows of token ids through a model: how micro-batches are laid out, attended and scored."""
