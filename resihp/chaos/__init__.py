"""Faults on purpose, many of them, and a score: what `resihp chaos` does."""
