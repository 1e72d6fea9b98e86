"""What is run: rollouts are collected, a training is planned, prepared and carried out, and its policy saved."""
