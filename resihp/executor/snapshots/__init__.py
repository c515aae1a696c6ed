"""Copies of a rank's state in shared memory, which outlive its executor (DESIGN §6)."""
