"""The graph that reads: its nodes, how they ask the policy, and the state between them."""
