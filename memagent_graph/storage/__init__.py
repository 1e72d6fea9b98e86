"""Files: default paths, private files, bounded reading, SQLite databases, checkpoints."""
