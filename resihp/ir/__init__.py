"""The plan language: model, parser, printer, verifier, expansion, pictures. No torch, no numpy.

Import from the modules (`from resihp.ir.verify import verify`); importing this package alone
loads nothing, so that the model can be had without the grammar.
"""
