"""Asynchronous data parallelism: workers of any speed train one model, and nobody waits."""
