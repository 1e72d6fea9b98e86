"""Training of policies from what the reader logged; so far, the training of the embedded one."""
