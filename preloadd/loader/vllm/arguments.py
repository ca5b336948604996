"""vLLM's own configuration for one rank, made of the arguments an engine would be given."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from vllm.config import ModelConfig, VllmConfig
from vllm.config.utils import replace
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from preloadd.domain.ids import Role
from preloadd.domain.placement import Placement
from preloadd.domain.settings import ModelSettings, RankSettings
from preloadd.errors import CheckpointError, ConfigError
from preloadd.frameworks.vllm.drafts import with_backends
from preloadd.frameworks.vllm.unusual import unusual


class _Parser(FlexibleArgumentParser):  # type: ignore[misc]
    """vLLM's parser; what it would print and exit for is raised."""

    def error(self, message: str) -> NoReturn:
        """ConfigError, whatever the parser finds wrong."""
        raise ConfigError(f"engine_args: vLLM does not accept them: {message}")


def engine_config(settings: RankSettings) -> tuple[VllmConfig, ModelConfig]:
    """The configuration that `vllm serve` makes of the same arguments, and its part for the role.

    For a draft it is the one that the engine builds the draft with. ConfigError with vLLM's own
    words where it refuses the arguments.
    """
    model, role = settings.model, settings.parsed_instance.role
    parser = EngineArgs.add_cli_args(_Parser(add_help=False))
    try:
        given = parser.parse_args([*model.engine_args, *_ours(model, role)])
        _name_draft(given, model, role)
        config = EngineArgs.from_cli_args(given).create_engine_config()
        if role is Role.DRAFT:
            config = _drafting(config)
    except (ValueError, TypeError, NotImplementedError, AssertionError, RuntimeError) as error:
        raise ConfigError(f"vLLM refuses model or engine_args: {error}") from error
    except (OSError, ImportError) as error:
        raise CheckpointError(f"vLLM cannot read the model's configuration: {error}") from error
    refuse(config)
    return config, _part(config, role)


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


_FORMATS = frozenset(
    {
        *("auto", "hf", "safetensors", "fastsafetensors", "instanttensor"),
        *("runai_streamer", "runai_streamer_sharded", "sharded_state"),
    }
)
"""Load formats that read the safetensors files by which a checkpoint is identified."""


def refuse(config: VllmConfig) -> None:
    """ConfigError for what makes other weights than the checkpoint's, or moves them afterwards."""
    parallel, speculative = config.parallel_config, config.speculative_config
    if getattr(parallel, "enable_eplb", False):
        raise ConfigError(
            "enable-eplb moves experts' rows in place, which weights that are shared do not allow: "
            "leave it out, here and in the engine"
        )
    for each in (config.load_config, getattr(speculative, "draft_load_config", None)):
        if each is not None and str(each.load_format) not in _FORMATS:
            raise ConfigError(
                f"load-format {each.load_format} does not read the safetensors files by which a "
                f"checkpoint is identified: give one of {', '.join(sorted(_FORMATS))}"
            )
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
