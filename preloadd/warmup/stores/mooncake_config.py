"""The JSON of `MOONCAKE_CONFIG_PATH`, the same file that vLLM's MooncakeStoreConnector reads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from preloadd.domain.lines import one_line
from preloadd.domain.strict_json import Malformed, decode
from preloadd.errors import ConfigError, InsecurePath
from preloadd.linux.plain import read_file

VARIABLE = "MOONCAKE_CONFIG_PATH"
EMBEDDED = "embedded"
STANDALONE = "standalone-store"
HOST_VARIABLE = "MOONCAKE_REQUESTER_LOCAL_HOSTNAME"

MAX_BUFFER = 512 << 20
"""Of what the file gives to a client for transfers, more than this is not taken here: with RDMA all
of it would be pinned."""

_MAX_NBYTES = 1 << 20
_USUAL = 4 << 30
_UNITS = {"gb": 1 << 30, "mb": 1 << 20, "kb": 1 << 10, "b": 1}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(gb|mb|kb|b)?")
_ADDRESS = re.compile(r"[^\s:/]+:[0-9]{1,5}|\[[0-9A-Fa-f:.]+\]:[0-9]{1,5}|[a-z0-9+]+://\S+")


@dataclass(frozen=True, slots=True)
class Config:
    """What a client is set up with. Sizes are bytes; `host` is its own name, '' to find one."""

    metadata_server: str
    master_server_address: str
    protocol: str
    device_name: str
    mode: str
    global_segment_size: int
    local_buffer_size: int
    tenant_id: str
    host: str

    @property
    def embedded(self) -> bool:
        """Whether every client lends memory to the pool."""
        return self.mode == EMBEDDED

    def encode(self) -> bytes:
        """As `decoded` reads it."""
        return json.dumps(asdict(self)).encode()


def decoded(raw: bytes | bytearray) -> Config:
    """What `encode` wrote."""
    return Config(**json.loads(raw))


def read_config(environ: Mapping[str, str]) -> Config:
    """What the environment names; ConfigError, which names variable or file, and the key."""
    path = environ.get(VARIABLE, "")
    if not path:
        raise ConfigError(f"{VARIABLE} is not set: name the file that vLLM's connector reads")
    whose = f"{VARIABLE}: {one_line(path)}"
    try:
        raw = read_file(path, _MAX_NBYTES + 1, follow=True)
    except InsecurePath:
        raise ConfigError(f"{whose} is no regular file: name one") from None
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
        raise ConfigError(f"{whose} {why}: name a file that user may read") from None
    try:
        table = decode(raw, _MAX_NBYTES)
    except Malformed as error:
        raise ConfigError(f"{whose}: {error}: mend the file") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{whose}: it is no JSON object: mend the file")
    try:
        return _config(table, environ.get(HOST_VARIABLE, ""))
    except ConfigError as error:
        raise ConfigError(f"{whose}: {error}") from None


def _config(table: Mapping[str, Any], host: str) -> Config:
    mode = _text(table, "mode", EMBEDDED)
    if mode not in (EMBEDDED, STANDALONE):
        raise ConfigError(f'mode: {mode!r} is neither "{EMBEDDED}" nor "{STANDALONE}": write one')
    segment = _size(table, "global_segment_size")
    if mode == EMBEDDED and not segment:
        raise ConfigError(f'global_segment_size: is 0: give a size, or mode "{STANDALONE}"')
    if mode == STANDALONE and segment:
        raise ConfigError(
            f'global_segment_size: is {segment:,} bytes where mode is "{STANDALONE}": write 0'
        )
    buffer = _size(table, "local_buffer_size")
    if not buffer:
        raise ConfigError("local_buffer_size: is 0: give a size")
    master = _text(table, "master_server_address", "")
    if not _ADDRESS.fullmatch(master):
        raise ConfigError(f"master_server_address: {master!r} is no address: write host:port")
    metadata = _text(table, "metadata_server", "")
    if not metadata:
        raise ConfigError('metadata_server: is empty: write "P2PHANDSHAKE", which needs no server')
    return Config(
        metadata_server=metadata,
        master_server_address=master,
        protocol=_text(table, "protocol", "rdma"),
        device_name=_text(table, "device_name", ""),
        mode=mode,
        global_segment_size=segment,
        local_buffer_size=min(buffer, MAX_BUFFER),
        tenant_id=_text(table, "tenant_id", "default").strip() or "default",
        host=host,
    )


def _text(table: Mapping[str, Any], key: str, default: str) -> str:
    value = table.get(key, default)
    if value is None and key == "tenant_id":
        return default
    if not isinstance(value, str):
        raise ConfigError(f"{key}: is {_given(value)}: write text in quotes")
    return value


def _size(table: Mapping[str, Any], key: str) -> int:
    value = table.get(key, _USUAL)
    if type(value) is int and value >= 0:
        return value
    found = _SIZE.fullmatch(value.strip().lower()) if isinstance(value, str) else None
    if found is None:
        raise ConfigError(f'{key}: is {_given(value)}: write bytes, or text such as "64MB"')
    return int(float(found[1]) * _UNITS[found[2] or "b"])


def _given(value: object) -> str:
    return one_line(json.dumps(value))[:60]
