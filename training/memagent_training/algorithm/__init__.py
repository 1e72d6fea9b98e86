"""Multi-Conv DAPO: from rewards to advantages, loss and optimizer steps. Nothing here depends on a model or a
trainer.
"""
