"""What a vLLM engine asks a daemon for: options, role, place in the group, and the key."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vllm.config import ModelConfig, ParallelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.distributed import (
    get_dp_group,
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.platforms import current_platform

from preloadd.domain.ids import Role, client_name
from preloadd.domain.leases import Mode
from preloadd.domain.placement import ExpertPlacement, Parallel, Placement
from preloadd.domain.settings import LAYOUTS, Layout, Memory
from preloadd.engine.checkpoint import EngineCheckpoint
from preloadd.engine.client import Attachment, Wanted, attach
from preloadd.engine.options import Options
from preloadd.engine.place import Place, open_place, spot
from preloadd.errors import AttachError, ConfigError, Mismatch
from preloadd.frameworks.vllm.identity import vllm_key
from preloadd.frameworks.vllm.unusual import unusual
from preloadd.weights.checkpoint import locate
from preloadd.weights.checkpoint.digest_cache import cache_folder_of

FORMAT = "ipc_cache"
"""The load format that this takes over: vLLM routes drafts by the name, so it must be this one."""

_IS_DRAFT = "is_draft"
"""Option that vLLM itself adds when it loads a draft through the target's loader."""

_WEIGHT_LAYOUT = "weight_layout"


@dataclass(frozen=True, slots=True)
class Route:
    """The options a user gave, and whether vLLM says that the load is a draft's."""

    options: Options
    said_draft: bool

    @classmethod
    def of(cls, load_config: LoadConfig) -> Route:
        """ConfigError for options that are none."""
        extra: dict[str, Any] = dict(load_config.model_loader_extra_config or {})
        said_draft = bool(extra.pop(_IS_DRAFT, False))
        options = Options.parse(extra)
        if said_draft and options.socket_path is not None:
            raise ConfigError(
                "socket_path names one daemon, but target and draft have two: give socket_dir"
            )
        return cls(options, said_draft)

    def role(self, config: VllmConfig, model: ModelConfig) -> Role:
        """The role of the model that is loaded; Mismatch if vLLM routed it to the other one's."""
        speculative = config.speculative_config
        is_draft = speculative is not None and model is speculative.draft_model_config
        if self.said_draft and not is_draft:
            raise Mismatch((("role", Role.DRAFT.value, Role.TARGET.value),))
        return Role.DRAFT if is_draft else Role.TARGET


@dataclass(frozen=True, slots=True)
class Attached:
    """A lease on weights in `layout`, which lie at `place`."""

    attachment: Attachment
    place: Place
    layout: Layout
    mode: Mode

    @property
    def nbytes(self) -> int:
        """Bytes of the arena."""
        return sum(self.attachment.manifest.chunks)


def require_unmoved(config: VllmConfig, model: ModelConfig, options: Options) -> None:
    """AttachError for what an engine would do to weights that are not its own.

    ConfigError, fallback or not, for what no engine does with this load format.
    """
    if getattr(config.parallel_config, "enable_eplb", False):
        raise ConfigError(
            "--enable-eplb moves experts' rows in place, which weights that are shared do not "
            "allow: leave it out, or load with another --load-format"
        )
    if config.lora_config is not None:
        raise AttachError("adapters (--enable-lora) cannot be combined with attached weights")
    if found := unusual(config):
        raise AttachError(f"{', '.join(found)} cannot be combined with attached weights")
    if options.mode is not Mode.ZERO_COPY:
        return
    writers = {
        "--enable-sleep-mode": getattr(model, "enable_sleep_mode", False),
        "--weight-transfer-config": getattr(config, "weight_transfer_config", None) is not None,
    }
    if found := [name for name, asked in writers.items() if asked]:
        raise AttachError(
            f"{', '.join(found)} would change weights that are shared and read-only: leave it "
            'out, or give the loader option mode: "copy"'
        )


def placement_of(config: VllmConfig) -> Placement:
    """Where this process stands in its groups, which must be there. Dense replicas stand alone."""
    parallel, pipeline, data = config.parallel_config, get_pp_group(), get_dp_group()
    strategy = getattr(parallel, "expert_placement_strategy", ExpertPlacement.LINEAR.value)
    return Placement(
        Parallel(
            tensor=get_tensor_model_parallel_world_size(),
            pipeline=pipeline.world_size,
            data=data.world_size,
            expert=bool(parallel.enable_expert_parallel),
            expert_placement=ExpertPlacement(strategy),
        ),
        tensor_rank=get_tensor_model_parallel_rank(),
        pipeline_rank=pipeline.rank_in_group,
        data_rank=data.rank_in_group,
    )


def local_rank(parallel: ParallelConfig, placement: Placement) -> int:
    """Which of its host's ranks this process is: so are devices of a node counted.

    A replica on several nodes is the only one on each. Of others, vLLM numbers those of one host.
    """
    within = placement.pipeline_rank * placement.parallel.tensor + placement.tensor_rank
    here: int = parallel.local_world_size
    if parallel.nnodes_within_dp > 1:
        return within % here
    replica: int | None = parallel.data_parallel_rank_local
    if replica is None:
        replica = parallel.data_parallel_index
    return (replica or 0) * here + within


def take_lease(
    config: VllmConfig, model: ModelConfig, options: Options, role: Role, environ: Mapping[str, str]
) -> Attached:
    """A lease on the weights that match; every check that can fail before a model is built.

    Errors as of `client.attach`; UnsupportedPlatformForIPCError, fallback or not, where the engine
    runs on neither CUDA nor ROCm and host memory was not asked for.
    """
    where = spot(options.memory)
    if where.memory is Memory.HOST and not current_platform.is_cpu():
        raise ConfigError(
            'the option memory: "host" is for engines that run on CPUs; this one runs on '
            f"{current_platform.device_name}: leave it out"
        )
    require_unmoved(config, model, options)
    placement = placement_of(config)
    rank = local_rank(config.parallel_config, placement)
    place = open_place(where, environ, rank, private=True)
    wish = _Wish(config, model, role, placement, place, environ)
    first, *others = LAYOUTS[where.memory]
    try:
        return wish.granted(first, options)
    except Mismatch as error:
        # Which of the layouts that this engine can use is the daemon's choice.
        for layout in others:
            if [(name, theirs) for name, theirs, _ in error.fields] == [
                (_WEIGHT_LAYOUT, layout.value)
            ]:
                return wish.granted(layout, options)
        raise


class _Wish:
    """The weights of one model at one place, whichever layout they are in."""

    def __init__(
        self,
        config: VllmConfig,
        model: ModelConfig,
        role: Role,
        placement: Placement,
        place: Place,
        environ: Mapping[str, str],
    ) -> None:
        self._place = place
        self._role = role
        self._environ = environ
        self._name = client_name(f"vllm-{Path(model.model).name}")
        folder = locate(model.model, model.revision or "", environ=environ)
        self._checkpoint = EngineCheckpoint(folder, cache_folder_of(environ))
        self._key = partial(
            vllm_key, config, model, placement=placement, role=role, environ=environ
        )

    def granted(self, layout: Layout, options: Options) -> Attached:
        """A lease on them in `layout`."""
        key, place = self._key, self._place
        wanted = Wanted(
            device=place.device,
            role=self._role,
            client=self._name,
            files=self._checkpoint.files,
            key=lambda content: key(checkpoint=content, layout=layout),
            digest=self._checkpoint.digest,
            memory=place.spot.memory,
        )
        mapper, environ = place.mapper, self._environ
        attachment = attach(wanted, options, mapper, environ=environ, uid=os.geteuid())
        return Attached(attachment, place, layout, options.mode)
