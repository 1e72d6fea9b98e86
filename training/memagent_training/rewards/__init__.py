"""Rewards of runs and single conversations: functions, their names, and the gold answers they compare with."""
