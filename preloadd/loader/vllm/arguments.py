"""vLLM's own configuration for one rank, made of the arguments an engine would be given."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn

from vllm.config import ModelConfig, VllmConfig
from vllm.config.utils import replace
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from preloadd.domain.ids import Role
from preloadd.domain.placement import Placement, as_reported
from preloadd.domain.settings import ModelSettings, RankSettings
from preloadd.domain.vllm import unidentified
from preloadd.errors import CheckpointError, ConfigError
from preloadd.frameworks.vllm.drafts import with_backends
from preloadd.frameworks.vllm.unusual import unusual
from preloadd.loader.vllm.refusals import TRUST, plain, quiet, told

log = logging.getLogger(__name__)

_REFUSALS = (
    *(ValueError, TypeError, NotImplementedError, AssertionError, RuntimeError, ImportError),
)
"""What vLLM raises of arguments that it refuses, and of packages that they would need."""


class _Parser(FlexibleArgumentParser):  # type: ignore[misc]
    """vLLM's parser; what it would print and exit for is raised."""

    def error(self, message: str) -> NoReturn:
        """ConfigError, whatever the parser finds wrong."""
        raise ConfigError(f"engine_args: vLLM does not accept them: {plain(message)}")


def engine_config(settings: RankSettings) -> tuple[VllmConfig, ModelConfig]:
    """The configuration that `vllm serve` makes of the same arguments, and its part for the role.

    For a draft it is the one that the engine builds the draft with. ConfigError where vLLM refuses
    the arguments or does not know the model; its own words in full are for those who debug.
    """
    role = settings.parsed_instance.role
    with _explained(settings):
        config = _made(settings, {})
        _take_place(config, settings.model.placement)
        if role is Role.DRAFT:
            config = _drafting(config)
    refuse(config)
    return config, _part(config, role)


def whole_config(settings: RankSettings, changes: Mapping[str, object]) -> VllmConfig:
    """The configuration of an engine for all ranks of the group, with `changes` to its arguments.

    ConfigError as of `engine_config`.
    """
    with _explained(settings):
        return _made(settings, changes)


def _made(settings: RankSettings, changes: Mapping[str, object]) -> VllmConfig:
    model, role = settings.model, settings.parsed_instance.role
    parser = EngineArgs.add_cli_args(_Parser(add_help=False))
    given = parser.parse_args([*model.engine_args, *_ours(model, role)])
    _name_draft(given, model, role)
    for name, value in changes.items():
        setattr(given, name, value)
    # Of defaults that depend on it, those of `vllm serve`.
    return EngineArgs.from_cli_args(given).create_engine_config(UsageContext.OPENAI_API_SERVER)


@contextmanager
def _explained(settings: RankSettings) -> Iterator[None]:
    """What vLLM has against arguments or model, raised in words of ours."""
    try:
        with quiet(unless=log.isEnabledFor(logging.DEBUG)):
            yield
    except OSError as error:
        raise CheckpointError(f"vLLM cannot read the model's configuration: {error}") from error
    except _REFUSALS as error:
        log.debug("vLLM refuses the model or its arguments", exc_info=True)
        trusted = TRUST in settings.model.engine_args
        raise ConfigError(told(error, settings, trusted=trusted)) from error


def reported(config: VllmConfig, model: ModelSettings) -> Placement:
    """The place of this rank as engines of this model tell of theirs."""
    placement = model.placement
    return as_reported(placement, moe=placement.parallel.data > 1 and config.model_config.is_moe)


def _take_place(config: VllmConfig, placement: Placement) -> None:
    """As the engine of each replica does (source: `run_engine_core` of vLLM). No other is asked."""
    parallel = config.parallel_config
    if placement.parallel.data == 1:
        return
    parallel.data_parallel_index = placement.data_rank
    if config.model_config.is_moe:
        parallel.data_parallel_rank = placement.data_rank
    else:
        parallel.reconfigure_for_independent_dp_rank()


def _ours(model: ModelSettings, role: Role) -> Sequence[str]:
    """What is said elsewhere than in `engine_args`, as vLLM's arguments. The last one counts."""
    path, revision = model.path, model.revision
    if role is Role.DRAFT and model.partner is not None:
        path, revision = model.partner.path, model.partner.revision
    arguments = [f"--model={path}", *_parallel(model.placement)]
    if revision:
        arguments.append(f"--revision={revision}")
    return arguments


def _name_draft(given: argparse.Namespace, model: ModelSettings, role: Role) -> None:
    """Have vLLM read a draft where it was found; one in the target's checkpoint stays unnamed."""
    told = getattr(given, "speculative_config", None)
    if model.partner is None or not told or not told.get("model"):
        return
    told["model"] = model.path if role is Role.DRAFT else model.partner.path


def _drafting(config: VllmConfig) -> VllmConfig:
    """With what a user chose for drafts, their way to be read among it."""
    load_config = getattr(config.speculative_config, "draft_load_config", None)
    if load_config is not None:
        config = replace(config, load_config=load_config)
    return with_backends(config, Role.DRAFT)


def _parallel(placement: Placement) -> Sequence[str]:
    parallel = placement.parallel
    arguments = [
        f"--tensor-parallel-size={parallel.tensor}",
        f"--pipeline-parallel-size={parallel.pipeline}",
        f"--data-parallel-size={parallel.data}",
    ]
    if parallel.expert:
        arguments += [
            "--enable-expert-parallel",
            f"--expert-placement-strategy={parallel.expert_placement.value}",
        ]
    if parallel.world > 1:
        # Without it vLLM looks for all GPUs of the group, of which a loader sees its own.
        arguments.append("--distributed-executor-backend=mp")
    return arguments


def refuse(config: VllmConfig) -> None:
    """ConfigError for what makes other weights than the checkpoint's, or moves them afterwards."""
    parallel, speculative = config.parallel_config, config.speculative_config
    if getattr(parallel, "enable_eplb", False):
        raise ConfigError(
            "enable-eplb moves experts' rows in place, which weights that are shared do not allow: "
            "leave it out, here and in the engine"
        )
    formats = {
        "--load-format": config.load_config,
        "--speculative-config.draft_load_config.load_format": getattr(
            speculative, "draft_load_config", None
        ),
    }
    for flag, chosen in formats.items():
        if chosen is not None and (why := unidentified(str(chosen.load_format))):
            raise ConfigError(f"{flag}: {why}")
    if found := unusual(config):
        raise ConfigError(f"{', '.join(found)}: not with weights that are shared: leave it out")


def _part(config: VllmConfig, role: Role) -> ModelConfig:
    if role is Role.TARGET:
        return config.model_config
    speculative = config.speculative_config
    draft = speculative.draft_model_config if speculative is not None else None
    if draft is None:
        raise ConfigError("there is no draft model in engine_args: give speculative-config")
    return draft
