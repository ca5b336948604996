"""Over real sockets: what is told of a daemon that nobody hears."""

import os

from preloadd.linux import seqpacket
from preloadd.transport.unheard import Unheard, unheard


def test_one_that_does_not_listen_yet_starts(socket_dir):
    path = socket_dir / "rank.sock"
    with seqpacket.Reservation(path, 0o600):
        found, told = unheard(path, os.getpid())
    assert found is Unheard.STARTING
    assert (
        told == f"process {os.getpid()} runs and does not listen yet: see its log for how far it is"
    )


def test_one_whose_socket_was_removed_is_hidden(socket_dir):
    path = socket_dir / "rank.sock"
    with seqpacket.Reservation(path, 0o600) as reserved, reserved.listen(1):
        path.unlink()
        found, told = unheard(path, 7)
    assert found is Unheard.HIDDEN
    assert told.startswith(f"process 7 serves, but its socket {path} was removed")


def test_one_that_left_its_socket_to_another_starts(socket_dir):
    path = socket_dir / "rank.sock"
    with seqpacket.Reservation(path, 0o600) as reserved:
        reserved.listen(1).close()
        assert path.exists()
        assert unheard(path, 7)[0] is Unheard.STARTING
