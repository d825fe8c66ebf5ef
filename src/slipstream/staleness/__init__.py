"""Stale gradients: versions of the weights, the one update path, and what is published to readers."""
