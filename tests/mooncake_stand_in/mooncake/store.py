"""A library with Mooncake's calls and its manners, whose pool is a folder of files.

`script.json` there says of calls what they do instead: return a number, "hang", "hold" the
interpreter's lock, "crash", "raise"; `calls` lists those that were made. As with the real one, a
call before setup or after close is a crash.
"""

import contextlib
import ctypes
import json
import os
import time
from pathlib import Path

FOLDER = Path(os.environ["STAND_IN_POOL"])
FOREVER_S = 60


def script(call):
    with (FOLDER / "calls").open("a") as calls:
        calls.write(f"{call}\n")
    try:
        return json.loads((FOLDER / "script.json").read_text()).get(call)
    except FileNotFoundError:
        return None


def act(call):
    """What the script says of it; a number is its result."""
    said = script(call)
    match said:
        case "hang":
            time.sleep(FOREVER_S)
        case "hold":
            ctypes.PyDLL(None).sleep(FOREVER_S)
        case "crash":
            ctypes.string_at(0)
        case "raise":
            raise RuntimeError("something\nof C++")
    return said


if (why := script("import")) is not None:
    if why == "hang":
        time.sleep(FOREVER_S)
    raise ImportError(why)


class MooncakeDistributedStore:
    def __init__(self):
        self._open = False

    def setup(self, host, metadata, segment, buffer, protocol, devices, master, **more):
        told = [host, metadata, segment, buffer, protocol, devices, master, more]
        told.append({name: value for name, value in os.environ.items() if name[:3] == "MC_"})
        (FOLDER / "setup.json").write_text(json.dumps(told))
        code = act("setup") or 0
        self._open = code == 0
        return code

    def close(self):
        code = self._call("close")
        self._open = False
        return code or 0

    def get_size(self, key):
        if (code := self._call("get_size")) is not None:
            return code
        path = self._path(key)
        return path.stat().st_size if path.exists() else -704

    def get_buffer(self, key):
        said = self._call("get_buffer")
        return None if said else self._path(key).read_bytes()

    def is_exist(self, key):
        code = self._call("is_exist")
        return int(self._path(key).exists()) if code is None else code

    def put(self, key, value):
        code = self._call("put")
        if code is None:
            with contextlib.suppress(FileExistsError), self._path(key).open("xb") as file:
                file.write(value)
        return code or 0

    def upsert(self, key, value):
        code = self._call("upsert")
        if code is None:
            self._path(key).write_bytes(value)
            (FOLDER / "script.json").unlink(missing_ok=True)  # what was half-written is whole
        return code or 0

    def _call(self, name):
        if not self._open:
            ctypes.string_at(0)
        return act(name)

    def _path(self, key):
        return FOLDER / key.replace("/", "_")
