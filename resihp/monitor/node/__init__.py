"""The monitor of a node: its sockets, its ranks, and the process that keeps it alive."""
