"""Emulated devices: a chunk takes its planned time and computes nothing.

The interpreter is the real one; what differs is the device (`device`), whose streams keep time on
a clock (`clock`), and the work (`work`). In real time the clock follows the host, in virtual time
(`virtual`) nobody waits and times are exact. Nothing here imports torch.
"""
