"""Sockets are bound to one interface, and what cannot be bound is told in words."""

from __future__ import annotations

import socket

import pytest

from resihp.errors import UserError
from resihp.wire.address import (
    LOOPBACK,
    Address,
    address_of,
    interface_of,
    is_loopback,
    is_wildcard,
    listen_at,
)


def test_a_free_port_of_the_address_that_was_asked_for():
    """Two addresses of the loopback interface are two nodes."""
    with listen_at("127.0.0.2") as first, listen_at("127.0.0.1") as second:
        assert address_of(first).host == "127.0.0.2"
        assert address_of(second).host == "127.0.0.1"
        assert address_of(first).port > 0
        with socket.create_connection(("127.0.0.2", address_of(first).port)):
            pass
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.3", address_of(first).port))


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "0"])
def test_no_socket_on_every_interface(host: str):
    """[S4] Whoever asks for all of them is told to name one."""
    assert is_wildcard(host)
    with pytest.raises(UserError, match="every interface of this machine; name the address of one"):
        listen_at(host)


def test_a_port_that_is_taken_is_named():
    """[T30] Also where its last owner has gone and the kernel keeps its connections a while."""
    with listen_at(LOOPBACK) as first:
        port = address_of(first).port
        with pytest.raises(
            UserError, match=f"port {port} of 127.0.0.1 is taken by another process"
        ):
            listen_at(LOOPBACK, port)
        with socket.create_connection((LOOPBACK, port)), first.accept()[0] as accepted:
            accepted.shutdown(socket.SHUT_RDWR)  # the side that closes first waits (TIME_WAIT)
    with listen_at(LOOPBACK, port) as again:
        assert address_of(again) == Address(LOOPBACK, port)


def test_an_address_of_another_machine_is_refused():
    """[T30] The message says that it is none of ours (a documentation address, RFC 5737)."""
    with pytest.raises(UserError, match=r"198\.51\.100\.7 is no address of this machine; name one"):
        listen_at("198.51.100.7")


@pytest.mark.parametrize("host", ["nowhere.invalid", "x" * 300, "a..b", "256.1.1.1"])
def test_a_name_that_nobody_knows_is_refused(host: str):
    """[T30] It is in the message, and so is what would do."""
    with pytest.raises(UserError, match=r"cannot be found: .*; name one that this machine knows"):
        listen_at(host)


def test_ipv6_only():
    """[T30] An interface without IPv4 serves as well, and its address is written with brackets."""
    if not socket.has_ipv6:
        pytest.skip("this Python has no IPv6")
    try:
        sock = listen_at("::1")
    except UserError:
        pytest.skip("this machine has no IPv6")
    with sock:
        address = address_of(sock)
        assert str(address) == f"[::1]:{address.port}"
        with socket.create_connection(("::1", address.port)):
            pass


def test_what_is_loopback():
    """Names too; what nobody knows is not taken for it."""
    assert is_loopback("127.0.0.1")
    assert is_loopback("127.8.0.1")
    assert is_loopback("localhost")
    assert not is_loopback("198.51.100.7")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("nowhere.invalid")


def test_the_interface_of_an_address():
    """All of the loopback network is `lo`; an address of another machine has none."""
    assert interface_of("127.0.0.1") == interface_of("127.0.0.2") == "lo"
    assert interface_of("198.51.100.7") is None
    assert interface_of("nowhere.invalid") is None
