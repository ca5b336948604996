"""What a rank daemon is told by the files of its host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from preloadd.config.files import GROUPS
from preloadd.config.group import Group, claims
from preloadd.config.host import GroupFile, HostSettings, Survey, require_host, survey
from preloadd.config.seeding import seeding
from preloadd.config.spread import rendezvous
from preloadd.domain.ids import Instance, Role
from preloadd.domain.placement import peers
from preloadd.domain.settings import (
    Builder,
    Digest,
    ModelSettings,
    RankSettings,
    Reader,
    Source,
    Sources,
    Warmup,
)
from preloadd.errors import ConfigError

Locate = Callable[[str, str], Path]
"""From a model and a revision to the folder of both; ModelNotFound."""


class Unclaimed(ConfigError):
    """All files tell their devices, and this instance is not among them."""


def settings_on_this_host(
    folder: Path, environ: Mapping[str, str], instance: Instance, locate: Locate
) -> RankSettings:
    """What `instance` is to serve according to the files below `folder`; ConfigError.

    Faults in files of other groups do not matter: they keep no healthy group from coming back.
    """
    found = survey(folder, environ)
    group = _group_of(found, instance, environ.get("PRELOADD_GROUP", ""))
    return rank_settings(require_host(found), group, instance, locate)


def rank_settings(
    host: HostSettings, group: Group, instance: Instance, locate: Locate
) -> RankSettings:
    """The settings of `instance`, which is one of `group`. Local rank n is the n-th device."""
    node = group.node
    sources = _sources(group, locate)
    own = sources.own(instance.role)
    return RankSettings(
        group=group.name,
        instance=str(instance),
        socket_dir=host.socket_dir,
        derived=False,
        model=ModelSettings(
            path=own.path,
            name=own.name,
            revision=own.revision,
            builder=Builder(group.builder),
            memory=group.backend,
            reader=Reader(group.reader),
            digest=Digest(group.digest),
            chunk_bytes=group.largest_chunk,
            placement=node.placement_on(instance.device),
            engine_args=group.arguments,
            layout=group.layout_mode,
            partner=sources.partner(instance.role),
        ),
        access=group.allowed,
        deadlines=host.deadlines.deadlines,
        peers=peers(instance, node.instances),
        rendezvous=rendezvous(node, instance),
        log_level=host.log_level,
        python=group.python,
        warmup=Warmup(
            autotune=group.warmup.flashinfer_autotune,
            stores=group.warmup.stores,
            trust_bundles=group.warmup.trust_bundles,
            deadline=group.warmup.deadline_s,
        ),
        seeding=seeding(group.seed, node, instance, tokens=host.state_dir),
    )


def _sources(group: Group, locate: Locate) -> Sources:
    """Where the models lie; ModelNotFound. A draft without a name is in the target's checkpoint."""
    target, drafted = _source(group.model, group.revision, locate), group.drafted
    if drafted is None:
        return Sources(target)
    if not drafted.model:
        return Sources(target, target)
    return Sources(target, _source(drafted.model, drafted.revision, locate))


def _source(name: str, revision: str, locate: Locate) -> Source:
    return Source(str(locate(name, revision)), name, revision)


def _group_of(found: Survey, instance: Instance, preferred: str) -> Group:
    """The group that lays claim to the instance; of several the one that systemd started it for."""
    claimants: list[tuple[str, GroupFile]] = []
    for file in found.groups:
        name, devices = claims(file.document)
        # One with faults may well be meant to have a draft there.
        if instance.device in devices and (file.group is None or _has(file.group, instance)):
            claimants.append((name, file))
    if len(claimants) > 1:
        claimants = [claimant for claimant in claimants if claimant[0] == preferred] or claimants
    if not claimants:
        raise _unclaimed(found, instance)
    origins = {origin for _, file in claimants for origin in file.origins}
    faults = [fault for fault in found.group_faults if fault.origin in origins]
    groups = [file.group for _, file in claimants if file.group is not None]
    if len(claimants) > 1 or not groups:
        raise ConfigError("\n".join(map(str, faults)))
    return groups[0]


def _has(group: Group, instance: Instance) -> bool:
    return instance.role is Role.TARGET or instance in group.instances


def _unclaimed(found: Survey, instance: Instance) -> ConfigError:
    """What to raise for an instance of no group; one in a file with faults may be its own."""
    names = sorted({claims(file.document)[0] for file in found.groups})
    lacks = f"no group has {instance} among its gpus"
    if instance.role is Role.DRAFT:
        lacks = f"no group has a draft that is held on {instance.device}"
    line = (
        f"{found.folder / GROUPS}: {lacks} (groups: {', '.join(names) or 'none'}; add it to one, "
        f"or stop preloadd@{instance}.service)"
    )
    readable = {origin for file in found.groups for origin in file.origins}
    unread = [
        str(fault)
        for fault in found.group_faults
        if fault.origin not in readable or fault.key.startswith("gpus")
    ]
    if unread or found.host_faults:
        return ConfigError("\n".join([*map(str, found.host_faults), *unread, line]))
    return Unclaimed(line)
