"""Handshake and seals: who does not know the secret, or repeats what was said, is refused."""

from __future__ import annotations

import msgspec
import pytest

from resihp.errors import AuthError, FrameError
from resihp.wire.auth import (
    Answer,
    Challenge,
    ClientHandshake,
    Identity,
    Proof,
    Seal,
    ServerHandshake,
    derive_key,
    new_secret,
)

SECRET = b"s" * 32
ALICE = Identity("job", "executor", 3, 7)


def handshake(
    client_secret: bytes = SECRET, server_secret: bytes = SECRET
) -> tuple[tuple[Seal, Seal], tuple[Seal, Seal]]:
    """(sending, receiving) of the client and of the server."""
    client = ClientHandshake(client_secret, ALICE)
    server = ServerHandshake(server_secret, client.challenge)
    proof, *client_seals = client.prove(server.answer)
    return (client_seals[0], client_seals[1]), server.check(proof)


def test_both_sides_agree_on_the_seals():
    """What either side closes, the other opens, in order."""
    (to_server, from_server), (to_client, from_client) = handshake()
    for text in (b"", b"one", b"two"):
        assert from_client.open(to_server.close(text)) == text
        assert from_server.open(to_client.close(text)) == text


def test_a_server_without_the_secret_is_refused():
    """[S1] The client finds out before it proves anything."""
    with pytest.raises(AuthError, match="server does not know this job's secret"):
        handshake(client_secret=SECRET, server_secret=b"t" * 32)


def test_a_client_without_the_secret_is_refused():
    """Here it skips the check of the server and sends a proof from its wrong secret."""
    client = ClientHandshake(b"t" * 32, ALICE)
    wrong = ServerHandshake(b"t" * 32, client.challenge, nonce=b"n" * 16)
    proof, *_ = client.prove(wrong.answer)
    right = ServerHandshake(SECRET, client.challenge, nonce=b"n" * 16)
    with pytest.raises(AuthError, match="executor 3 does not know this job's secret"):
        right.check(proof)


@pytest.mark.parametrize(
    "claim",
    [
        Identity("other", "executor", 3, 7),
        Identity("job", "supervisor", 3, 7),
        Identity("job", "executor", 4, 7),
        Identity("job", "executor", 3, 8),
    ],
)
def test_a_proof_holds_for_one_identity_only(claim: Identity):
    """Job, role, rank and generation are inside the proof: a changed claim breaks it."""
    client = ClientHandshake(SECRET, ALICE)
    server = ServerHandshake(SECRET, client.challenge)
    proof, *_ = client.prove(server.answer)
    other = ServerHandshake(
        SECRET, Challenge(claim, client.challenge.nonce), nonce=server.answer.nonce
    )
    with pytest.raises(AuthError):
        other.check(proof)


def test_a_replayed_proof_is_refused():
    """[S1] Whoever recorded a handshake and repeats it meets another nonce of the server."""
    client = ClientHandshake(SECRET, ALICE)
    proof, *_ = client.prove(ServerHandshake(SECRET, client.challenge).answer)
    with pytest.raises(AuthError):
        ServerHandshake(SECRET, client.challenge).check(proof)


def test_a_reflected_answer_proves_nothing():
    """[S1] A server's proof of the same nonces is not a client's, so echoing it back fails."""
    client = ClientHandshake(SECRET, ALICE)
    server = ServerHandshake(SECRET, client.challenge)
    with pytest.raises(AuthError):
        server.check(Proof(server.answer.proof))


def test_a_reflected_challenge_yields_no_server():
    """[S1] A peer without the secret that has a client's kind answer its challenge gets nothing."""
    client = ClientHandshake(SECRET, ALICE)
    mirror = ClientHandshake(SECRET, ALICE, nonce=client.challenge.nonce)
    with pytest.raises(AuthError):
        client.prove(Answer(mirror.challenge.nonce, b"\0" * 32))


@pytest.mark.parametrize("length", [0, 15, 17])
def test_a_nonce_of_another_length_is_refused(length: int):
    """Both sides insist on 16 bytes, so that no two messages can read the same."""
    with pytest.raises(AuthError, match="client nonce"):
        ServerHandshake(SECRET, Challenge(ALICE, b"n" * length))
    with pytest.raises(AuthError, match="server nonce"):
        ClientHandshake(SECRET, ALICE).prove(Answer(b"n" * length, b"p" * 32))


@pytest.mark.parametrize("position", [0, 15, 16, 20])
def test_a_tampered_frame_is_refused(position: int):
    """One flipped bit, in the code or in the payload."""
    (to_server, _), (_, from_client) = handshake()
    sealed = bytearray(to_server.close(b"hello"))
    sealed[position] ^= 1
    with pytest.raises(AuthError):
        from_client.open(bytes(sealed))


def test_a_replayed_frame_is_refused():
    """[S1] The second copy has the sequence number of the first."""
    (to_server, _), (_, from_client) = handshake()
    sealed = to_server.close(b"stop")
    assert from_client.open(sealed) == b"stop"
    with pytest.raises(AuthError):
        from_client.open(sealed)


def test_reordered_and_dropped_frames_are_refused():
    """The second frame cannot come first, whether or not the first one follows."""
    (to_server, _), (_, from_client) = handshake()
    to_server.close(b"first")
    with pytest.raises(AuthError):
        from_client.open(to_server.close(b"second"))


def test_a_frame_cannot_be_sent_back():
    """Each direction has its own key."""
    (to_server, from_server), _ = handshake()
    with pytest.raises(AuthError):
        from_server.open(to_server.close(b"hello"))


def test_a_frame_of_another_connection_is_refused():
    """Two connections of one client share no key."""
    (to_server, _), _ = handshake()
    _, (_, from_client) = handshake()
    with pytest.raises(AuthError):
        from_client.open(to_server.close(b"hello"))


def test_a_frame_without_room_for_its_code_is_refused():
    """Shorter than the code itself."""
    _, (_, from_client) = handshake()
    with pytest.raises(FrameError, match="too short"):
        from_client.open(b"x" * 15)


def test_keys_are_different_for_each_purpose():
    """Generations share no key, and the key is not the secret."""
    keys = {derive_key(SECRET, f"generation {n}") for n in range(5)}
    assert len(keys | {SECRET}) == 6
    assert new_secret() != new_secret()


def test_no_secret_is_in_a_repr():
    """What may end up in a log or traceback."""
    client = ClientHandshake(SECRET, ALICE)
    server = ServerHandshake(SECRET, client.challenge)
    _, *seals = client.prove(server.answer)
    for thing in (client, server, *seals):
        assert repr(SECRET)[2:-1] not in repr(thing)
        assert SECRET.hex() not in repr(thing)


def test_identities_have_one_spelling():
    """What is authenticated is what was read: another encoding is another challenge."""
    challenge = Challenge(ALICE, b"n" * 16)
    raw = msgspec.msgpack.encode(challenge)
    assert msgspec.msgpack.encode(msgspec.msgpack.decode(raw, type=Challenge)) == raw
