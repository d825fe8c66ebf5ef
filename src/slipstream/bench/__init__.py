"""Measurements that a user can repeat: each is a ratio against a peer in the same run, with its spread."""
