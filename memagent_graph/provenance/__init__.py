"""Finds where the words of a memory come from, without a model."""
