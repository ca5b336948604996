"""An engine that forks while another thread of it attaches; ends well if its child can attach."""

import gc
import os
import signal
import threading
from contextlib import suppress

from preloadd.domain.ids import device_id
from preloadd.engine.arenas import ARENAS, Identity
from preloadd.engine.undisturbed import undisturbed

IDENTITY = Identity("host", device_id("CPU-0"), "a" * 32, ())


class Mapper:
    """Maps nothing, and takes a moment."""

    private = False
    begun = threading.Event()

    def map(self, _chunks):
        self.begun.set()
        threading.Event().wait(0.2)
        raise TimeoutError


def attach():
    with suppress(TimeoutError), undisturbed():
        ARENAS.share(IDENTITY, [], Mapper())


def make_many():
    with undisturbed():
        making.set()
        made.wait()


def forked(child):
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        child()
        os._exit(0 if gc.isenabled() else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


attaching = threading.Thread(target=attach)
attaching.start()
Mapper.begun.wait()
forked(attach)
attaching.join()

making, made = threading.Event(), threading.Event()
maker = threading.Thread(target=make_many)
maker.start()
making.wait()
forked(lambda: None)
made.set()
maker.join()
assert gc.isenabled()
