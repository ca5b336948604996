"""vLLM's model loader for the load format `ipc_cache`."""

from __future__ import annotations

import gc
import logging
import os
import time
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from preloadd.domain.ids import Role
from preloadd.domain.leases import Mode
from preloadd.domain.vllm import DRAFT_METHODS
from preloadd.engine.torch import Weights
from preloadd.engine.vllm import profiling
from preloadd.engine.vllm.binding import Bound, build
from preloadd.engine.vllm.registries import undone_on_error
from preloadd.engine.vllm.request import FORMAT, Attached, Route, placement_of, take_lease
from preloadd.engine.vllm.warmup import take_over
from preloadd.errors import AttachError, ConfigError, PreloadError

log = logging.getLogger("vllm.preloadd")


@dataclass(frozen=True, slots=True)
class _Early:
    """What came of asking before vLLM counts memory: a lease, or why there is none. It is given up
    with the configuration of its model, which vLLM keeps through all it makes of the rest."""

    model: weakref.ref[ModelConfig]
    outcome: Attached | PreloadError
    given_up: weakref.finalize | None = None  # type: ignore[type-arg]

    @classmethod
    def of(cls, model: ModelConfig, outcome: Attached | PreloadError) -> _Early:
        if isinstance(outcome, PreloadError):
            # Its frames would keep the configuration alive.
            return cls(weakref.ref(model), outcome.with_traceback(None))
        return cls(weakref.ref(model), outcome, weakref.finalize(model, outcome.attachment.abandon))

    def take(self) -> Attached | PreloadError:
        """The outcome, which is the caller's from now on."""
        if self.given_up is not None:
            self.given_up.detach()
        return self.outcome

    def give_up(self) -> None:
        """End the lease, if there is one."""
        if self.given_up is not None:
            self.given_up()


_early: dict[Role, _Early] = {}
"""Of this process, until the model of that role is loaded. vLLM counts memory with a loader of its
own and cannot take back what it has counted, so everything is settled there already."""


class PreloaddLoader(BaseModelLoader):  # type: ignore[misc]
    """Maps weights that a preloadd daemon holds; from disk, with the reason, if there are none.

    Options (`--model-loader-extra-config`) are those of `preloadd.engine.options.Options`. Raised,
    fallback or not: wrong options, UnsupportedPlatformForIPCError, UnsupportedQuantForIPCError.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        self._route = Route.of(load_config)
        self._options = self._route.options

    def get_external_weight_memory(self, vllm_config: VllmConfig) -> int:
        """Bytes of device memory that target and draft will use and the daemons hold already.

        What is counted here is used: the leases are taken now.
        """
        counted = self._count(vllm_config, vllm_config.model_config)
        speculative = vllm_config.speculative_config
        if speculative is not None and _has_daemon(vllm_config):
            # Not in 0.30, which does not count either.
            from vllm.model_executor.model_loader.utils import get_draft_load_config

            draft_config = get_draft_load_config(vllm_config)
            if str(draft_config.load_format) == FORMAT:
                draft = PreloaddLoader(draft_config)
                counted += draft._count(vllm_config, speculative.draft_model_config)
        return counted

    def _count(self, config: VllmConfig, model: ModelConfig) -> int:
        role = self._route.role(config, model)
        _forget(role)
        outcome = self._asked(config, model, role)
        _early[role] = _Early.of(model, outcome)
        return _charge(outcome)

    def load_model(
        self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = ""
    ) -> nn.Module:
        """The model over attached weights, or loaded from disk."""
        started = time.monotonic()
        charged = 0
        try:
            role = self._route.role(vllm_config, model_config)
            if role is Role.DRAFT and not _has_daemon(vllm_config):
                return self._from_disk(vllm_config, model_config, prefix)
            early = _taken(role, model_config)
            charged = _charge(early)
            outcome = early or self._asked(vllm_config, model_config, role)
            if isinstance(outcome, PreloadError):
                raise outcome
            asked = time.monotonic() - started
            model = self._attached(vllm_config, model_config, prefix, outcome)
        except PreloadError as error:
            if isinstance(error, ConfigError) or not self._options.fallback:
                raise
            log.warning(
                "preloadd: loading %s from disk: %s%s",
                model_config.model,
                error,
                _too_late(charged),
            )
        else:
            log.info(
                "preloadd: attached in %.3f s, of which the daemon and the key took %.3f s",
                time.monotonic() - started,
                asked,
            )
            return model
        return self._from_disk(vllm_config, model_config, prefix)

    def download_model(self, model_config: ModelConfig) -> None:
        """As for a load from disk, which may become necessary."""
        DefaultModelLoader(self._disk()).download_model(model_config)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """In place: allowed for a copy, whose tensors are the engine's own.

        ConfigError where the weights are shared.
        """
        self._require_own("loaded over")
        DefaultModelLoader(self._disk()).load_weights(model, model_config)

    def get_all_weights(
        self, model_config: ModelConfig, model: nn.Module
    ) -> Iterable[tuple[str, torch.Tensor]]:
        """The checkpoint's tensors, for a reload in place; ConfigError as of `load_weights`."""
        self._require_own("reloaded")
        weights: Iterable[tuple[str, torch.Tensor]] = DefaultModelLoader(
            self._disk()
        ).get_all_weights(model_config, model)
        return weights

    def _require_own(self, done: str) -> None:
        if self._options.mode is not Mode.COPY:
            raise ConfigError(
                f"weights that are shared cannot be {done} in place: restart the engine, or give "
                'it the loader option mode: "copy"'
            )

    def _asked(self, config: VllmConfig, model: ModelConfig, role: Role) -> Attached | PreloadError:
        """A lease, or why there is none. ConfigError is raised, and everything without fallback."""
        try:
            taken = take_lease(config, model, self._options, role, os.environ)
        except ConfigError:
            raise
        except PreloadError as error:
            if not self._options.fallback:
                raise
            return error
        profiling.begin(taken.attachment, taken.place.spot.memory)
        return taken

    def _attached(
        self, config: VllmConfig, model_config: ModelConfig, prefix: str, taken: Attached
    ) -> nn.Module:
        attachment = taken.attachment
        with ExitStack() as undo:
            undo.callback(attachment.abandon)
            weights = Weights(attachment, taken.mode, taken.place.spot.torch_device)
            undo.pop_all()
            undo.callback(weights.abandon)
            with undone_on_error(config):
                bound = _built(config, model_config, prefix, weights, taken)
            undo.pop_all()
        holder: Any = bound.model
        holder.preloadd = weights
        weakref.finalize(bound.model, weights.abandon)
        attachment.watch()
        profiling.hold(weights, taken.place.spot.memory)
        _tell(weights, bound)
        role = self._route.role(config, model_config)
        take_over(config, role, placement_of(config), attachment)
        return bound.model

    def _from_disk(self, config: VllmConfig, model_config: ModelConfig, prefix: str) -> nn.Module:
        # What a failed build left is given back before as much is needed again.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        loaded: nn.Module = DefaultModelLoader(self._disk()).load_model(
            vllm_config=config, model_config=model_config, prefix=prefix
        )
        return loaded

    def _disk(self) -> LoadConfig:
        return replace(self.load_config, load_format="auto", model_loader_extra_config={})


def _has_daemon(config: VllmConfig) -> bool:
    """Whether the draft is of a kind that daemons hold."""
    speculative = config.speculative_config
    return (
        speculative is not None
        and speculative.draft_model_config is not None
        and speculative.method in DRAFT_METHODS
    )


def _built(
    config: VllmConfig,
    model_config: ModelConfig,
    prefix: str,
    weights: Weights,
    taken: Attached,
) -> Bound:
    try:
        return build(config, model_config, prefix, weights, taken.layout)
    except PreloadError:
        raise
    except Exception as error:  # vLLM's models raise anything
        raise AttachError(
            f"vLLM cannot build the model over attached weights: {type(error).__name__}: {error}"
        ) from error


def _charge(outcome: Attached | PreloadError | None) -> int:
    """Bytes of the GPU that vLLM counts for what came of asking early: those that are mapped."""
    if not isinstance(outcome, Attached) or outcome.mode is Mode.COPY:
        return 0
    return outcome.nbytes


def _too_late(charged: int) -> str:
    """What it means that vLLM has counted so many bytes for weights that are not mapped after all.
    It asks for that once and takes nothing back."""
    if not charged:
        return ""
    return (
        f". vLLM has counted {charged:,} bytes for the daemon's weights already, which the KV "
        "cache will lack: restart the engine once this is mended, or with another --load-format"
    )


def _tell(weights: Weights, bound: Bound) -> None:
    own = sum(bound.private.values())
    log.info(
        "preloadd: %d tensors of generation %s (%s), %d of them copied because vLLM writes into "
        "such: %d bytes",
        len(weights.manifest),
        weights.manifest.generation[:8],
        weights.mode.value,
        len(bound.private),
        own,
    )


def _taken(role: Role, model: ModelConfig) -> Attached | PreloadError | None:
    """What came of asking early for this model, once."""
    early = _early.pop(role, None)
    if early is None:
        return None
    if early.model() is model:
        return early.take()
    early.give_up()  # of an engine in this process that never loaded
    return None


def _forget(role: Role) -> None:
    if (early := _early.pop(role, None)) is not None:
        early.give_up()
