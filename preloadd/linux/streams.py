"""The standard streams: there from the first line on, and never failing on what they are told.

Standard library only: the script `preloadd` begins with this.
"""

from __future__ import annotations

import io
import os
import sys

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def prepare() -> None:
    """See to the descriptors 0, 1 and 2 and what Python made of them; call it first thing.

    One that whoever started this process has closed would else be the number of the next socket,
    which would then get the words meant for people, here and in every child. It leads to nowhere
    from now on; errors to where the output goes, so that they are told if anything is.
    """
    for number, (name, mode) in enumerate(_STREAMS):
        _fill(number)
        stream = getattr(sys, name)
        if stream is None:
            stream = os.fdopen(number, mode, buffering=1, closefd=False)
            setattr(sys, name, stream)
        if mode == "w" and isinstance(stream, io.TextIOWrapper):
            # A file's name may have bytes that are no text, or text that this locale has not.
            stream.reconfigure(errors="backslashreplace")


def _fill(number: int) -> None:
    try:
        os.fstat(number)
    except OSError:
        # The lowest free number is taken, which is this one: those below are there by now.
        opened = os.dup(1) if number == 2 else os.open(os.devnull, os.O_RDWR)
        os.set_inheritable(opened, True)  # noqa: FBT003
