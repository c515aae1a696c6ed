"""Who runs which micro-batch of which stage, and in which order."""
