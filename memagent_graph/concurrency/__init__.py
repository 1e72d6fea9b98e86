"""Event loops and threads: calls from synchronous code, and reads that stay at the same chunk."""
