"""Runs rows of token ids through a model: layout, attention and scores of micro-batches."""
