"""Multi-Conv DAPO: from rewards to advantages, loss and optimizer steps, without a model or a trainer."""
