"""Where the secret lies: private files, inherited memory, and nothing that others could plant."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from resihp.errors import AuthError, UserError
from resihp.monitor.rendezvous import (
    PORT,
    RESTARTED,
    SECRET_FD,
    Place,
    forget_restarts,
    inherited,
    read_place,
    rendezvous_path,
    secret_file,
    write_place,
)
from resihp.wire.address import LOOPBACK, listen_at
from resihp.wire.auth import new_secret


def publish(path: Path, port: int) -> Place:
    """A place with a new secret, written."""
    place = Place(port, new_secret())
    write_place(path, place)
    return place


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "place"


def test_what_is_published_can_be_read(path: Path):
    """Port and secret, the same for all workers."""
    place = publish(path, 4242)
    assert place.port == 4242
    assert len(place.secret) == 32
    assert read_place(path) == place


def test_the_file_is_for_this_user_only(path: Path):
    """Whatever the umask says, also in the moment before it has its name."""
    old = os.umask(0)
    try:
        publish(path, 1)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_uid == os.getuid()


def test_nothing_there_yet_is_none(path: Path):
    """Rank 0 may start last."""
    assert read_place(path) is None


def test_a_stale_file_is_replaced(path: Path):
    """A job that was killed leaves its file; the next one has a new secret."""
    stale = publish(path, 1)
    fresh = publish(path, 2)
    assert read_place(path) == fresh
    assert fresh.secret != stale.secret
    assert [child.name for child in path.parent.iterdir()] == [path.name]


def test_a_place_that_is_taken_is_refused_without_a_trace(path: Path):
    """Such as by a directory; no file with a secret is left behind."""
    (path / "full").mkdir(parents=True)
    with pytest.raises(AuthError, match="cannot be written"):
        publish(path, 1)
    assert [child.name for child in path.parent.iterdir()] == [path.name]


def test_a_folder_that_is_not_there_is_an_error_with_its_name(tmp_path: Path):
    """Such as a wrong XDG_RUNTIME_DIR."""
    with pytest.raises(AuthError, match=f"{tmp_path}/none/place cannot be written: No such file"):
        publish(tmp_path / "none" / "place", 1)


def test_a_symbolic_link_is_not_followed(path: Path, tmp_path: Path):
    """It could lead to a file that somebody else chose; publishing replaces the link itself."""
    target = tmp_path / "target"
    publish(target, 1)
    path.symlink_to(target)
    with pytest.raises(AuthError, match="not a plain file"):
        read_place(path)
    before = target.read_bytes()
    publish(path, 2)
    assert target.read_bytes() == before
    assert not path.is_symlink()


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o400, 0o606])
def test_a_file_that_others_can_touch_is_refused(path: Path, mode: int):
    """Its secret may be known, or not be ours."""
    publish(path, 1)
    path.chmod(mode)
    with pytest.raises(AuthError, match="not a private file"):
        read_place(path)


@pytest.mark.parametrize("plant", [Path.mkdir, os.mkfifo], ids=["directory", "named pipe"])
def test_what_is_no_plain_file_is_refused_at_once(path: Path, plant: Callable[[Path, int], None]):
    """A named pipe would hold whoever opens it."""
    plant(path, 0o600)
    with pytest.raises(AuthError, match="not a plain file"):
        read_place(path)


@pytest.mark.parametrize("content", [b"", b"\xc1", b"\x82\xa4port", b"\x81\xa4port\xa3abc"])
def test_a_file_of_something_else_is_refused(path: Path, content: bytes):
    """Empty, no MessagePack, cut off, or of other types."""
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(UserError, match="no rendezvous file"):
        read_place(path)


def test_the_secret_is_in_no_repr():
    """A place may end up in a traceback."""
    place = Place(4242, b"s" * 32)
    assert repr(place) == "Place(port=4242, secret=<secret>, host='127.0.0.1')"


def test_agents_share_no_file(tmp_path: Path):
    """Not between parents, runs or restarts; odd characters of a run id do no harm."""
    env = {"XDG_RUNTIME_DIR": str(tmp_path), "TORCHELASTIC_RUN_ID": "a/../b c"}
    paths = {
        rendezvous_path(env, 10),
        rendezvous_path(env, 11),
        rendezvous_path({**env, "TORCHELASTIC_RESTART_COUNT": "1"}, 10),
        rendezvous_path({**env, "TORCHELASTIC_RUN_ID": "other"}, 10),
    }
    assert len(paths) == 4
    assert all(path.parent == tmp_path for path in paths)


def test_a_killed_start_leaves_nothing_to_the_next_one(tmp_path: Path):
    """torchrun starts all workers again under another name; those of other agents stay."""
    env = {"XDG_RUNTIME_DIR": str(tmp_path), "TORCHELASTIC_RUN_ID": "none"}
    for count in ("0", "1"):
        path = rendezvous_path(env | {"TORCHELASTIC_RESTART_COUNT": count}, 7)
        publish(path, 1)
    other = rendezvous_path(env | {"TORCHELASTIC_RESTART_COUNT": "0"}, 8)
    publish(other, 1)
    again = env | {"TORCHELASTIC_RESTART_COUNT": "2"}
    forget_restarts(rendezvous_path(again, 7), again)
    assert list(tmp_path.iterdir()) == [other]


def test_the_coordinator_listens_on_loopback_only():
    """No other machine reaches it."""
    with listen_at(LOOPBACK) as listener:
        assert listener.getsockname()[0] == LOOPBACK


def test_a_child_inherits_the_secret_by_descriptor_only():
    """It is in neither its arguments nor its environment, and the descriptor is closed after."""
    secret = new_secret()
    fd = secret_file(secret)
    code = (
        "import os\n"
        "from resihp.monitor.rendezvous import inherited\n"
        "found = inherited(os.environ)\n"
        "assert not found.was_restarted\n"
        "assert found.place.port == 77\n"
        "try:\n"
        "    os.fstat(int(os.environ['RESIHP_SECRET_FD']))\n"
        "except OSError:\n"
        "    print(found.place.secret.hex())\n"
    )
    env = {**os.environ, SECRET_FD: str(fd), PORT: "77"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=env,
            pass_fds=[fd],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[2],
        )
    finally:
        os.close(fd)
    assert done.stdout.strip() == secret.hex()
    assert all(secret.hex() not in value for value in env.values())


def test_a_supervisor_that_replaces_a_dead_one_is_told_so():
    """It starts no executor of its own accord."""
    fd = secret_file(b"s" * 32)
    found = inherited({SECRET_FD: str(fd), PORT: "77", RESTARTED: "1"})
    assert found is not None
    assert found.place == Place(77, b"s" * 32)
    assert found.was_restarted


def test_another_launcher_hands_nothing_down():
    """torchrun sets none of our variables."""
    assert inherited({"RANK": "0"}) is None


def test_writing_a_place_leaves_no_scratch_file(path: Path):
    """One file, in one move."""
    write_place(path, Place(1, b"s" * 32))
    assert [child.name for child in path.parent.iterdir()] == [path.name]
