"""Mutual challenge-response over a shared secret, and per-frame authentication codes.

Both sides prove that they know the secret for one (job, role, rank, generation); the nonces of
both are inside every code, so nothing can be replayed or reflected. Pure: no sockets here.

    client -> server   Challenge(identity, client nonce)
    server -> client   Answer(server nonce, proof of the server)
    client -> server   Proof(proof of the client)
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

import msgspec

from resihp.errors import AuthError, FrameError

__all__ = [
    "SECRET_BYTES",
    "Answer",
    "Challenge",
    "ClientHandshake",
    "Identity",
    "Proof",
    "Seal",
    "ServerHandshake",
    "derive_key",
    "masked_repr",
    "new_secret",
]

SECRET_BYTES = 32
_NONCE_BYTES = 16
_MAC_BYTES = 16


class Identity(msgspec.Struct, frozen=True, array_like=True):
    """Who a client says it is."""

    job: str
    role: str
    rank: int
    generation: int


class Challenge(msgspec.Struct, frozen=True, array_like=True):
    """The first frame of a connection."""

    identity: Identity
    nonce: bytes


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """The server's nonce and its proof."""

    nonce: bytes
    proof: bytes


class Proof(msgspec.Struct, frozen=True, array_like=True):
    """The client's proof."""

    proof: bytes


def new_secret() -> bytes:
    """A fresh random secret."""
    return secrets.token_bytes(SECRET_BYTES)


def derive_key(secret: bytes, purpose: str) -> bytes:
    """A key for one purpose (such as one generation) that does not reveal `secret`."""
    return hmac.digest(secret, b"resihp-key\0" + purpose.encode(), hashlib.sha256)


def masked_repr(struct: msgspec.Struct, *secret_fields: str) -> str:
    """The usual repr of `struct`, which may reach a log, without the values of its secrets."""
    shown = (
        f"{name}={'<secret>' if name in secret_fields else repr(getattr(struct, name))}"
        for name in struct.__struct_fields__
    )
    return f"{type(struct).__name__}({', '.join(shown)})"


def _proof(secret: bytes, side: bytes, challenge: Challenge, server_nonce: bytes) -> bytes:
    body = side + b"\0" + msgspec.msgpack.encode(challenge) + server_nonce
    return hmac.digest(secret, body, hashlib.sha256)


class Seal:
    """Authentication codes for one direction of one connection, with a sequence number."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._sequence = 0

    def _mac(self, payload: bytes) -> bytes:
        body = self._sequence.to_bytes(8, "big") + payload
        self._sequence += 1
        return hmac.digest(self._key, body, hashlib.sha256)[:_MAC_BYTES]

    def close(self, payload: bytes) -> bytes:
        """`payload` with its code in front."""
        return self._mac(payload) + payload

    def open(self, sealed: bytes) -> bytes:
        """The payload of `sealed`; AuthError where the code is wrong (replay, forgery)."""
        if len(sealed) < _MAC_BYTES:
            raise FrameError("frame too short to hold its authentication code")
        mac, payload = sealed[:_MAC_BYTES], sealed[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(payload)):
            raise AuthError("frame with a wrong authentication code")
        return payload


def _seals(secret: bytes, challenge: Challenge, server_nonce: bytes) -> tuple[Seal, Seal]:
    session = _proof(secret, b"session", challenge, server_nonce)
    to_server, to_client = (
        Seal(hmac.digest(session, side, hashlib.sha256)) for side in (b"to-server", b"to-client")
    )
    return to_server, to_client


class ClientHandshake:
    """The connecting side: send `challenge`, feed the answer to `prove`, send its result."""

    def __init__(self, secret: bytes, identity: Identity, *, nonce: bytes | None = None) -> None:
        self._secret = secret
        self.challenge = Challenge(identity, nonce or secrets.token_bytes(_NONCE_BYTES))

    def prove(self, answer: Answer) -> tuple[Proof, Seal, Seal]:
        """Our proof and the (sending, receiving) seals; AuthError where the server is not ours."""
        if len(answer.nonce) != _NONCE_BYTES:
            raise AuthError("server nonce of a wrong length")
        expected = _proof(self._secret, b"server", self.challenge, answer.nonce)
        if not hmac.compare_digest(expected, answer.proof):
            raise AuthError("the server does not know this job's secret")
        proof = Proof(_proof(self._secret, b"client", self.challenge, answer.nonce))
        to_server, to_client = _seals(self._secret, self.challenge, answer.nonce)
        return proof, to_server, to_client


class ServerHandshake:
    """The accepting side: make an `answer` to a challenge, then `check` the client's proof."""

    def __init__(self, secret: bytes, challenge: Challenge, *, nonce: bytes | None = None) -> None:
        if len(challenge.nonce) != _NONCE_BYTES:
            raise AuthError("client nonce of a wrong length")
        self._secret = secret
        self._challenge = challenge
        self._nonce = nonce or secrets.token_bytes(_NONCE_BYTES)
        self.answer = Answer(self._nonce, _proof(secret, b"server", challenge, self._nonce))

    def check(self, proof: Proof) -> tuple[Seal, Seal]:
        """The (sending, receiving) seals; AuthError where the client's proof is wrong."""
        expected = _proof(self._secret, b"client", self._challenge, self._nonce)
        if not hmac.compare_digest(expected, proof.proof):
            identity = self._challenge.identity
            raise AuthError(f"{identity.role} {identity.rank} does not know this job's secret")
        to_server, to_client = _seals(self._secret, self._challenge, self._nonce)
        return to_client, to_server
