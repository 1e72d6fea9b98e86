"""The jobs: collect rollouts; plan, prepare and execute a training run; save its policy."""
