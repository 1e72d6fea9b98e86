"""Training of policies: from what the reader logged, in a closed loop with it, and of those that ship."""
