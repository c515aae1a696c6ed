"""One coordinator at a time, and one plan per generation: agreement among the nodes' monitors.

Pure but for `journal`, so that it runs in the simulator. `docs/design.md` says why it is safe.
"""
