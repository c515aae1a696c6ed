"""Programs as MessagePack: what the coordinator sends to each rank."""

from __future__ import annotations

import msgspec

from resihp.errors import FrameError
from resihp.ir.model import FORMAT_VERSION
from resihp.ir.program import Program

__all__ = ["decode_program", "encode_program"]

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Program)


def encode_program(program: Program) -> bytes:
    """`program` as bytes; the same program gives the same bytes."""
    return _encoder.encode(program)


def decode_program(payload: bytes) -> Program:
    """The program in `payload`; FrameError where it is none, or of another version.

    Whoever runs it checks what it says (`resihp.executor.local_world`). Its size is bounded by
    that of the message that it comes in.
    """
    try:
        program = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"not a program: {error}") from error
    if program.version != FORMAT_VERSION:
        raise FrameError(f"a program of version {program.version}, not {FORMAT_VERSION}")
    return program
