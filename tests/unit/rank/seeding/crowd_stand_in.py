"""A thousand connections of one address, until its input ends: arguments port, address, hex."""

import socket
import sys
from contextlib import ExitStack, suppress


def main(port: str, host: str, sent: str) -> None:
    with ExitStack() as undo:
        for _ in range(1000):
            sock = undo.enter_context(socket.socket())
            sock.bind((host, 0))
            with suppress(OSError):
                sock.connect(("127.0.0.1", int(port)))
                sock.sendall(bytes.fromhex(sent))
        print("here", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
