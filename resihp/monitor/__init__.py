"""Watching a job and deciding: supervisors, coordinator, run directory, fault injection."""
