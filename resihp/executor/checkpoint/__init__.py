"""The state on disk, with `torch.distributed.checkpoint`'s plans and metadata and our own files.

Its storage, which pickles, is not used: nothing that is read here can run. Import it where a
version is saved or loaded: torch's package takes half a second.
"""
