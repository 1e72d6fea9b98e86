"""The policies of this package, and their parts."""
