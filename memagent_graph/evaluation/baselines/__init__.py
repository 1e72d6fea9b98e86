"""What a user would do without the reader: one call with as much of the document as fits. Each is a strategy."""
