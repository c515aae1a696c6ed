"""Where something listens, and how it gets a socket there and nowhere else."""

from __future__ import annotations

import errno
import ipaddress
import socket

import msgspec

from resihp.errors import UserError

__all__ = ["LOOPBACK", "Address", "address_of", "is_loopback", "is_wildcard", "listen_at"]

LOOPBACK = "127.0.0.1"
"""Where everything of a job on one machine listens."""
BACKLOG = 1024


class Address(msgspec.Struct, frozen=True, array_like=True):
    """A TCP port of one interface."""

    host: str
    """Numeric where a process says of itself where it listens."""
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def is_loopback(host: str) -> bool:
    """Whether `host`, a number or a name, is of the loopback interface; False if unknown."""
    return all(found.is_loopback for found in _numbers(host)) if _numbers(host) else False


def is_wildcard(host: str) -> bool:
    """Whether `host` stands for all interfaces, which nothing of ours ever listens on."""
    return not host or any(found.is_unspecified for found in _numbers(host))


def _numbers(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """What `host` stands for; nothing where nobody knows."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [ipaddress.ip_address(str(each[4][0]).partition("%")[0]) for each in found]


def address_of(sock: socket.socket) -> Address:
    """Where a socket is bound, as a number."""
    host, port = sock.getsockname()[:2]
    return Address(host, port)


def listen_at(host: str, port: int = 0) -> socket.socket:
    """A listening socket on `port` (0: a free one) of the interface with the address `host`.

    UserError where there is no such interface here, the port is taken, or `host` stands for all
    interfaces.
    """
    if is_wildcard(host):
        raise UserError(
            f'"{host}" stands for every interface of this machine; name the address of one, '
            f"such as {LOOPBACK}"
        )
    try:
        (family, _, _, _, place), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f'the address "{host}" cannot be found: {why}; name one that this machine knows, '
            f"such as {LOOPBACK}"
        ) from error
    try:
        return socket.create_server(
            (str(place[0]), int(place[1])), family=socket.AddressFamily(family), backlog=BACKLOG
        )
    except OSError as error:
        raise UserError(_cannot_listen(host, port, error)) from error


def _cannot_listen(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is taken by another process; name a free one"
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"{host} is no address of this machine; name one of its interfaces, such as {LOOPBACK}"
        )
    return f"cannot listen at port {port} of {host}: {error.strerror}"
