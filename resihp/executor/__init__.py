"""What one rank does with its program: model, data, optimizer, streams, transport.

This package is the only one that imports torch, and only its modules do: importing the package
itself stays light.
"""
