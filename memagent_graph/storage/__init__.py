"""Where files are kept, and how SQLite files are opened."""
