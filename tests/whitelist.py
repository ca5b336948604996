"""Names that vulture cannot see being used: the standard library calls them, or hands them out;
whole objects that have them are compared or encoded; tests or users ask for them; or the manifest
format has them for builders to come.
"""

from preloadd.cli.exits import MEANINGS
from preloadd.cli.views import Versions
from preloadd.config.group import Group, Restart, Warmup
from preloadd.domain.files import FileIdentity
from preloadd.domain.manifest import Kind, Manifest
from preloadd.domain.settings import Versions as Installed
from preloadd.engine.torch import Weights
from preloadd.launcher.options import Options
from preloadd.launcher.progress import Terminal
from preloadd.launcher.sections import Sectioned
from preloadd.linux.logs import PriorityFormatter
from preloadd.memory import api
from preloadd.supervisor.metrics import ViewCollector
from preloadd.supervisor.models import Alive, RankTold
from preloadd.warmup.bundles.identity import CompileIdentity
from preloadd.weights.plan.slices import Slice

USED = (
    MEANINGS,
    Versions.matches,
    FileIdentity.mtime_ns,
    FileIdentity.ctime_ns,
    Installed.deep_gemm,
    Installed.triton_kernels,
    Options.seed_token,
    Sectioned.format_options,
    Kind.BUFFER,
    Kind.NON_PERSISTENT_BUFFER,
    Manifest.attributes,
    PriorityFormatter.format,
    CompileIdentity.site_packages,
    CompileIdentity.triton,
    Slice.whole_shape,
    Alive.alive,
    RankTold.age_seconds,
    RankTold.ask_seconds,
    RankTold.ready_seconds,
    RankTold.uptime_seconds,
    ViewCollector.collect,
    Terminal.on_broken_pipe,
    api.Mapping.writable,
    Group.draft,
    Group.engine_args,
    Group.restart,
    Group.warmup,
    Restart.burst,
    Restart.pause_s,
    Warmup.flashinfer_autotune,
    Weights.autotune_table,
    Warmup.stores,
    Warmup.trust_bundles,
)
