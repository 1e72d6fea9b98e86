"""How the policy `english` was made: its texts and questions, the data that they become, and its training."""
