"""The embedded policy: its corpus, tokenizer, training rows, training, measurement and release."""
