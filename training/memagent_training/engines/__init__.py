"""The reader as a rollout of other trainers; each module needs that trainer's package."""
