"""Messages survive the wire unchanged; everything else is refused with FrameError."""

from __future__ import annotations

import contextlib
import typing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resihp.errors import FrameError
from resihp.wire.address import Address
from resihp.wire.auth import Answer, Challenge, Identity, Proof
from resihp.wire.messages import (
    Beat,
    Commit,
    Deploy,
    Go,
    Message,
    StepDone,
    StepRecord,
    decode,
    decode_as,
    encode,
)

KINDS: list[type[msgspec.Struct]] = list(typing.get_args(Message))

integers = st.integers(-(2**63), 2**63 - 1)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
LEAVES: dict[object, st.SearchStrategy[object]] = {
    int: integers,
    str: texts,
    bool: st.booleans(),
    bytes: st.binary(max_size=40),
    float: st.floats(allow_nan=False),
    type(None): st.none(),
}


def values_of(kind: object) -> st.SearchStrategy[object]:
    """Any value of a field's type."""
    if kind in LEAVES:
        return LEAVES[kind]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return structs_of(kind)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return st.lists(values_of(args[0]), max_size=4).map(tuple)
    if origin is dict:
        return st.dictionaries(values_of(args[0]), values_of(args[1]), max_size=4)
    return st.one_of([values_of(arg) for arg in args])  # a union


def structs_of(kind: type[msgspec.Struct]) -> st.SearchStrategy[object]:
    """Any message of one kind."""
    hints = typing.get_type_hints(kind)
    fields = {name: values_of(hints[name]) for name in kind.__struct_fields__}
    return st.builds(kind, **fields)


@given(st.one_of([structs_of(kind) for kind in KINDS]))
def test_every_message_comes_back_as_it_was(message: object):
    """All kinds, with all values that their fields may have."""
    assert decode(encode(message)) == message


@given(structs_of(Challenge) | structs_of(Answer) | structs_of(Proof))
def test_handshake_frames_come_back_as_they_were(message: msgspec.Struct):
    """They are read by kind, not by tag."""
    assert decode_as(encode(message), type(message)) == message


def test_a_record_without_finite_numbers_comes_back():
    """The loss of a skipped step may be NaN."""
    record = StepRecord(
        step=1,
        loss=float("nan"),
        grad_norm=float("inf"),
        learning_rate=0.1,
        skipped=True,
        num_tokens=8,
        samples=(4,),
        duration_s=0.5,
    )
    back = decode(encode(StepDone(generation=1, record=record)))
    assert isinstance(back, StepDone)
    assert repr(back.record) == repr(record)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_or_are_a_message(payload: bytes):
    """[S8] Nothing but FrameError leaves the decoder."""
    for read in (decode, lambda p: decode_as(p, Challenge), lambda p: decode_as(p, Proof)):
        try:
            message = read(payload)
        except FrameError:
            continue
        assert isinstance(message, msgspec.Struct)


@given(st.one_of([structs_of(kind) for kind in KINDS]), st.data())
def test_a_damaged_message_is_refused_or_is_a_message(message: object, data: st.DataObject):
    """[S8] Flipped bits and cuts of real messages reach deeper into the decoder than noise does."""
    payload = bytearray(encode(message))
    place = data.draw(st.integers(0, len(payload) - 1))
    if data.draw(st.booleans()):
        payload[place] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del payload[place:]
    with contextlib.suppress(FrameError):
        decode(bytes(payload))


@pytest.mark.parametrize(
    ("what", "fields"),
    [
        ("unknown field", {"type": "Go", "generation": 1, "extra": 0}),
        ("missing field", {"type": "Go"}),
        ("wrong type", {"type": "Go", "generation": "1"}),
        ("unknown kind", {"type": "Gone", "generation": 1}),
        ("no kind", {"generation": 1}),
        ("no fields", 7),
    ],
)
def test_a_message_that_is_not_of_the_schema_is_refused(what: str, fields: object):
    """Whatever another version, or a confused peer, may send."""
    with pytest.raises(FrameError, match="not a message of the side channel"):
        decode(msgspec.msgpack.encode(fields))
    assert decode(msgspec.msgpack.encode({"type": "Go", "generation": 1})) == Go(generation=1), what


def test_trailing_bytes_are_refused():
    """One frame holds one message."""
    with pytest.raises(FrameError):
        decode(encode(Go(generation=1)) + b"\0")


def test_deep_nesting_is_refused():
    """[S2] A bomb of nested lists inside a field that is skipped."""
    record = dict.fromkeys(StepRecord.__struct_fields__, 0)
    record |= {"skipped": False, "samples": [], "emulated": False, "snapshot": False}
    done = {"type": "StepDone", "generation": 1, "record": record}
    plain = msgspec.msgpack.encode(done)
    assert isinstance(decode(plain), StepDone)
    bomb = b"\x91" * 100_000 + b"\xc0"
    key = msgspec.msgpack.encode("more")
    small_map = 0x80 + len(record)  # of so many entries; it becomes one of one more
    head = plain.index(bytes([small_map]))
    with pytest.raises(FrameError):
        decode(plain[:head] + bytes([small_map + 1]) + plain[head + 1 :] + key + bomb)


def test_a_deployment_does_not_show_its_key():
    """A message may be printed; the key of a generation must not."""
    deploy = Deploy(
        generation=2,
        plan="plan 1",
        previous_plan=None,
        base=1,
        commit=Commit(version=0, updates=0, record=None),
        peers={0: Address("127.0.0.1", 1)},
        key=b"k" * 32,
        store_rank=0,
    )
    assert "kkkk" not in repr(deploy)
    assert deploy.key.hex() not in repr(deploy)
    assert "generation=2" in repr(deploy)


def test_a_beat_is_small():
    """It is sent several times a second by every rank."""
    assert len(encode(Beat(step=100_000, instruction=500))) < 64


def test_an_identity_with_a_long_name_still_fits_the_hello():
    """The longest legal job name is 64 characters."""
    identity = Identity("j" * 64, "supervisor", 1023, 2**31)
    assert len(encode(Challenge(identity, b"n" * 16))) <= 256
