"""The jobs: collect rollouts; plan, prepare and run a training; save its policy."""
