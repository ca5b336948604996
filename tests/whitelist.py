"""Names that vulture cannot see being used: the standard library calls them, or hands them out;
whole objects that have them are compared or encoded; tests or users ask for them; or the manifest
format has them for builders to come.
"""

from preloadd.domain.files import FileIdentity
from preloadd.domain.manifest import Kind, Manifest
from preloadd.launcher.progress import Terminal
from preloadd.linux.logs import PriorityFormatter
from preloadd.memory import api
from preloadd.protocol.messages import StatusTold
from preloadd.supervisor.verdict import Snapshot
from preloadd.weights.plan.slices import Slice

USED = (
    FileIdentity.mtime_ns,
    FileIdentity.ctime_ns,
    Kind.BUFFER,
    Kind.NON_PERSISTENT_BUFFER,
    Manifest.attributes,
    PriorityFormatter.format,
    Slice.whole_shape,
    Snapshot.engines,
    StatusTold.tensor_bytes,
    StatusTold.uptime_s,
    Terminal.on_broken_pipe,
    api.Mapping.writable,
)
