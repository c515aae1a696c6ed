"""Saved versions of the state on disk: their format, and how files are written and read safely.

Nothing here knows torch: the coordinator completes and prunes versions, executors write the parts.
"""
