"""Names that vulture cannot see being used: the standard library calls them, or hands them out;
whole objects that have them are compared or encoded; or contract tests ask for them.
"""

from preloadd.domain.files import FileIdentity
from preloadd.launcher.progress import Terminal
from preloadd.linux.logs import PriorityFormatter
from preloadd.memory import api
from preloadd.protocol.messages import StatusTold
from preloadd.supervisor.verdict import Snapshot

USED = (
    FileIdentity.mtime_ns,
    FileIdentity.ctime_ns,
    PriorityFormatter.format,
    Snapshot.engines,
    StatusTold.tensor_bytes,
    StatusTold.uptime_s,
    Terminal.on_broken_pipe,
    api.Mapping.writable,
)
