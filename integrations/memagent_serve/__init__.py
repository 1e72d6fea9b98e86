"""`memagent serve`: the reader behind the OpenAI API, in front of any policy server."""
