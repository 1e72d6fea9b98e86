"""Logged runs for training: read from a log or an export, refused or grouped, as token ids."""
