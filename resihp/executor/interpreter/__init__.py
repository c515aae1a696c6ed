"""Runs one rank's program: `resihp.executor.interpreter.run`."""
