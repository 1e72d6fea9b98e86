"""The embedded policy: its corpus, tokenizer, training rows, training and release."""
