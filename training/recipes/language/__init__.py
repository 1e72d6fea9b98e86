"""A pretrained language model trained to be a MemAgent: questions in plain English, a scripted reader, adapters."""
