"""A client that runs as somebody else: asks each request in turn and prints what comes of it.

    python guest.py UID GID[,GID...] SOCKET REQUEST...

A request is `status`, `attach`, `copy`, `release` or `load`; a lease is kept until the end.
"""

import json
import os
import sys
from pathlib import Path

from preloadd.domain.leases import Mode
from preloadd.errors import PreloadError
from preloadd.protocol import codec
from preloadd.protocol import messages as m
from preloadd.transport.blocking import connect

MODES = {"attach": Mode.ZERO_COPY, "copy": Mode.COPY}
REQUESTS = {"status": m.Status(), "release": m.Release(), "load": m.Load()}


def main() -> None:
    uid, groups, path, *asked = sys.argv[1:]
    gid, *more = map(int, groups.split(","))
    os.setgroups(more)
    os.setresgid(gid, gid, gid)
    os.setresuid(int(uid), int(uid), int(uid))
    try:
        print(json.dumps(list(answers(Path(path), asked))))
    except PreloadError as error:
        print(json.dumps([[error.code, str(error)]]))


def answers(path: Path, asked: list[str]):
    key = {}
    with connect(path, timeout=10) as client:
        for name in asked:
            request = REQUESTS.get(name) or m.Attach(key=key, device="CPU-0", mode=MODES[name])
            reply, fds = client.call(request, timeout=10)
            for fd in fds:
                fd.close()
            if isinstance(reply, m.StatusTold):
                key = reply.key
            yield [codec.tag(reply), getattr(reply, "detail", "")]


if __name__ == "__main__":
    main()
