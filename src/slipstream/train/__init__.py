"""The training loop and what surrounds it: run directory, checkpoints, metrics, evaluation."""
