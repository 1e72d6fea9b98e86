"""Documents with known answers. Tasks, scorers and baselines will join them here."""
