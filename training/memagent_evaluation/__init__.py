"""Documents with known answers: tasks, the systems that are measured on them, scores, statistics, report."""
