"""What tests change in processes of preloadd, by their environment: limits, and the version."""

import os

_LIMITS = os.environ.get("TESTS_DEADLINES", "")
_VERSION = os.environ.get("TESTS_VERSION", "")

if _LIMITS:
    from dataclasses import fields

    from preloadd.domain.settings import Deadlines

    _given = {name: float(value) for name, _, value in (w.partition("=") for w in _LIMITS.split())}
    Deadlines.__init__.__defaults__ = tuple(
        _given.get(field.name, field.default) for field in fields(Deadlines)
    )

if _VERSION:
    import preloadd

    preloadd.__version__ = _VERSION
