"""After the weights: whether FlashInfer has something to tune for them, and its tuning.

Whatever goes wrong here, the weights are good, and no longer mapped in this process.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from preloadd.domain.ids import Role
from preloadd.domain.lines import one_line
from preloadd.domain.manifest import Manifest
from preloadd.domain.settings import Builder, Memory, RankSettings
from preloadd.errors import PreloadError
from preloadd.frameworks.flashinfer import environment
from preloadd.frameworks.tables import config_hash, table_name, table_names, tables_root
from preloadd.loader.autotune import gemms, tuning
from preloadd.loader.autotune.problems import Problem, problems
from preloadd.loader.report import Reporter
from preloadd.protocol.messages import Tuned, Warmable

log = logging.getLogger(__name__)

TUNING = "tuning"
"""The phase in which FlashInfer is tuned; problems are counted."""

DEVICE = "cuda:0"
"""The rank's own GPU is the only one that its loader sees."""

_MAX_TOLD = 500
_UNSEEN = {
    Memory.HOST: "the weights are in host memory, and FlashInfer is for NVIDIA's GPUs",
    Memory.HIP: "FlashInfer is for NVIDIA's GPUs",
}


@dataclass(frozen=True, slots=True)
class _Work:
    """What is to tune, and what it is told as."""

    problems: tuple[Problem, ...]
    place: tuning.TableFile
    told: Warmable


def warm_up(
    settings: RankSettings, manifest: Manifest, reporter: Reporter, environ: Mapping[str, str]
) -> None:
    """Tell the rank which tables engines over these weights look for, and tune if it wants that.

    ConnectionError and ProtocolViolation mean that the rank is gone, or not to be understood.
    """
    if settings.model.builder is Builder.VLLM:
        # Its engines tune for themselves: see `rank.warmup.rehearsal`.
        reporter.warmable(_of_vllm(manifest), within=0)
        return
    if not settings.warmup.autotune:
        return
    found = problems(manifest.tensors, manifest.key["dtype"])
    work = _work(settings, manifest, found, environ)
    if isinstance(work, str):
        log.debug("nothing is tuned: %s", work)
        reporter.warmable(Warmable(why_not=work[:_MAX_TOLD]), within=0)
    elif _wanted(work, reporter, settings.warmup.deadline):
        reporter.tuned(_tuned(work, reporter))


def _of_vllm(manifest: Manifest) -> Warmable:
    try:
        from preloadd.loader.vllm.warmable import warmable

        return warmable(manifest)
    except Exception as error:
        log.warning("it is not known which tables engines look for", exc_info=True)
        return Warmable(why_not=f"it is not known which tables engines look for: {_told(error)}")


def _work(
    settings: RankSettings,
    manifest: Manifest,
    found: tuple[Problem, ...],
    environ: Mapping[str, str],
) -> _Work | str:
    """What there is to do, or why there is nothing: what needs no GPU is asked first."""
    if settings.parsed_instance.role is Role.DRAFT:
        return "drafts are not tuned here: the first engine does that"
    if settings.model.memory is not Memory.CUDA:
        return _UNSEEN[settings.model.memory]
    if not found:
        return "no layer of this model is of a kind that FlashInfer tunes"
    if find_spec("flashinfer") is None:
        return f"FlashInfer is not installed for {sys.executable}: install flashinfer-python there"
    try:
        why_not = gemms.why_not(DEVICE)
        return why_not or _described(settings, manifest, found, environ)
    except Exception as error:
        # Other people's code, which may raise anything.
        log.warning("FlashInfer cannot be used", exc_info=True)
        return f"FlashInfer cannot be used: {_told(error)}"


def _described(
    settings: RankSettings,
    manifest: Manifest,
    found: tuple[Problem, ...],
    environ: Mapping[str, str],
) -> _Work:
    key, own = manifest.key, table_name(manifest.key)
    # Ranks tune each for themselves. Those of other hosts have their tables there.
    ranks = table_names(key) if settings.rendezvous is None else (own,)
    place = tuning.TableFile(Path(tables_root(environ)), config_hash(key), own)
    told = Warmable(
        config_hash=place.config_hash,
        dp_rank=own.dp_rank,
        rank=own.rank,
        root=str(place.root),
        ranks=tuple((each.dp_rank, each.rank) for each in ranks),
        metadata=dict(environment()),
        tunes=True,
    )
    return _Work(found, place, told)


def _wanted(work: _Work, reporter: Reporter, within: float) -> bool:
    try:
        return reporter.warmable(work.told, within=within)
    except TimeoutError:
        log.warning("nothing is tuned: within %g s the rank has not said whether to", within)
        return False


def _tuned(work: _Work, reporter: Reporter) -> Tuned:
    started = time.monotonic()

    def tell(done: int, total: int) -> None:
        reporter.progress(TUNING, done, total)

    try:
        entries, hits = tuning.tune(work.problems, DEVICE, work.place, tell)
    except PreloadError as error:
        return Tuned(failure=_told(error))
    except Exception as error:
        log.warning("tuning failed", exc_info=True)
        return Tuned(failure=_told(error))
    return Tuned(entries=entries, hits=hits, seconds=time.monotonic() - started)


def _told(error: Exception) -> str:
    text = str(error) if isinstance(error, PreloadError) else f"{type(error).__name__}: {error}"
    return one_line(text.strip())[:_MAX_TOLD]
