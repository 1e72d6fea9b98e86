"""The policies that come with the package, and what they are made of."""
