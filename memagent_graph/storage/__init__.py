"""Files: default paths, private files, bounded reading, locks, SQLite databases, and checkpoints."""
