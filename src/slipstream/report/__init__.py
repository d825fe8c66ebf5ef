"""Grids of runs: what to train, what came out, and the tables and pictures of it."""
