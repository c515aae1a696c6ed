"""Where something listens, and how it gets a socket there and nowhere else."""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import socket
import struct

import msgspec

from resihp.errors import UserError

__all__ = [
    "LOOPBACK",
    "Address",
    "address_of",
    "interface_of",
    "is_loopback",
    "is_wildcard",
    "listen_at",
]

LOOPBACK = "127.0.0.1"
"""Where everything of a job on one machine listens."""
BACKLOG = 1024
_ADDRESS_AND_MASK = (0x8915, 0x891B)
"""SIOCGIFADDR and SIOCGIFNETMASK."""


class Address(msgspec.Struct, frozen=True, array_like=True):
    """A TCP port of one interface."""

    host: str
    """Numeric where a process says of itself where it listens."""
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def is_loopback(host: str) -> bool:
    """Whether `host`, a number or a name, is of the loopback interface; False if unknown."""
    found = _numbers(host)
    return bool(found) and all(number.is_loopback for number in found)


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


def interface_of(host: str) -> str | None:
    """Name of the interface here that has the IPv4 address `host`; None where none has (Linux).

    For libraries that take the name of an interface only.
    """
    wanted = [number for number in _numbers(host) if number.version == 4]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                address, mask = (_of_interface(sock, name, what) for what in _ADDRESS_AND_MASK)
            except OSError:
                continue  # without an IPv4 address
            network = ipaddress.ip_interface(f"{address}/{mask}").network
            # All of 127.0.0.0/8 is the loopback interface; elsewhere a neighbour is not we.
            if any(
                str(each) == address or (each.is_loopback and each in network) for each in wanted
            ):
                return name
    return None


def _of_interface(sock: socket.socket, name: str, what: int) -> str:
    answer = fcntl.ioctl(sock, what, struct.pack("256s", name.encode()[:15]))
    return socket.inet_ntoa(answer[20:24])


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
        ) from None
    try:
        return socket.create_server(
            (str(place[0]), int(place[1])), family=socket.AddressFamily(family), backlog=BACKLOG
        )
    except OSError as error:
        raise UserError(_cannot_listen(host, port, error)) from None


def _cannot_listen(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is taken by another process; name a free one"
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"{host} is no address of this machine; name one of its interfaces, such as {LOOPBACK}"
        )
    return f"cannot listen at port {port} of {host}: {error.strerror}"
