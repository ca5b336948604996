"""What tests change in processes of preloadd, by their environment: how long they may take to end,
and the version."""

import os

_STOP_S = os.environ.get("TESTS_STOP_S", "")
_VERSION = os.environ.get("TESTS_VERSION", "")

if _STOP_S:
    from dataclasses import fields

    from preloadd.domain.settings import Deadlines

    Deadlines.__init__.__defaults__ = tuple(
        float(_STOP_S) if field.name == "stop" else field.default for field in fields(Deadlines)
    )

if _VERSION:
    import preloadd

    preloadd.__version__ = _VERSION
