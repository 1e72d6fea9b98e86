"""The graph that reads: its nodes, how they call the policy, and the state between them."""
