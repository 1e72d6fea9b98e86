"""Event loops and threads: synchronous callers, and reads that take turns."""
