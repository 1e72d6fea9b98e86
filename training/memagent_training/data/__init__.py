"""Logged runs as training sees them: read from a log or an export, refused or grouped, as token ids."""
