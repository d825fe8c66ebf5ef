"""Slipstream: asynchronous pre-training of language models in PyTorch."""

__version__ = "0.1.0"
