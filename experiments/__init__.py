"""Training, evaluation and the synthetic long-context tasks of the project."""
