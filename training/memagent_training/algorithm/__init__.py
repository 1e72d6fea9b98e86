"""Multi-Conv DAPO: from rewards to advantages, loss and optimizer steps. Nothing here knows of a model or a trainer."""
