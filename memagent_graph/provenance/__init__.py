"""Where the words of a memory come from, computed without a model."""
