"""A vLLM model over attached weights: built without memory, bound, and completed by vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec
import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.model_loader import utils
from vllm.model_executor.model_loader.utils import (
    initialize_model,
    process_weights_after_loading,
)
from vllm.model_executor.models.interfaces import SupportsEagleBase
from vllm.utils.torch_utils import set_default_torch_dtype

from preloadd.domain.leases import Mode
from preloadd.domain.manifest import Kind, Manifest
from preloadd.domain.settings import Layout
from preloadd.engine.torch import Weights
from preloadd.engine.undisturbed import undisturbed
from preloadd.engine.vllm.guard import WriteGuard
from preloadd.engine.vllm.region import Region
from preloadd.errors import AttachError, DamagedManifest
from preloadd.frameworks.vllm import walk
from preloadd.frameworks.vllm.layouts import engines_processing, require_shareable
from preloadd.frameworks.vllm.patching import replaced

_ATTENTION = (Attention, MLAAttention)
"""Layers that vLLM processes after all others, from the weights of those."""


class _Beside(msgspec.Struct, frozen=True):
    """What the builder tells beside the tensors. See `loader.vllm.export.artifact`."""

    on_host: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    blank: tuple[str, ...] = ()
    state: dict[str, walk.Plain] = msgspec.field(default_factory=dict)
    outline: str = ""


@dataclass(slots=True)
class Bound:
    """A model, and how many bytes of it are the engine's own although they came from the arena."""

    model: nn.Module
    private: dict[str, int] = field(default_factory=dict)


def build(
    config: VllmConfig,
    model_config: ModelConfig,
    prefix: str,
    weights: Weights,
    layout: Layout,
) -> Bound:
    """The model over `weights`, in evaluation mode.

    AttachError names a tensor that would be left without content.
    UnsupportedQuantForIPCError as of `require_shareable`. Whatever else vLLM's own code raises.
    """
    device = torch.device(weights.device)
    with set_default_torch_dtype(model_config.dtype), torch.no_grad(), undisturbed():
        with torch.device("meta"), _without_record(weights):
            model = initialize_model(vllm_config=config, model_config=model_config, prefix=prefix)
        binding = _Binding(model, weights, layout)
        binding.require_alike()
        for name, value in weights.manifest.attributes.items():
            if name not in SupportsEagleBase.__annotations__:
                raise DamagedManifest(f"the manifest sets {name} of the model")
            setattr(model, name, bool(value))
        binding.bind_early()
        with engines_processing(layout), _guarding(weights, layout):
            process_weights_after_loading(model, model_config, device)
        binding.bind_late()
        binding.complete()
    return Bound(model, binding.private)


def _without_record(weights: Weights) -> AbstractContextManager[None]:
    """Without vLLM's notes on every tensor for a reload in place, which shared weights refuse."""
    if weights.mode is Mode.COPY or not hasattr(utils, _RECORD):
        return nullcontext()
    return replaced(utils, _RECORD, lambda _: None)


_RECORD = "record_metadata_for_reloading"

_FEW = 5
"""Names that are told."""


class _Binding:
    """Puts attached tensors into a model, before and after vLLM's own processing."""

    def __init__(self, model: nn.Module, weights: Weights, layout: Layout) -> None:
        self._model = model
        self._weights = weights
        self._layout = layout
        self._beside = _beside(weights.manifest)
        self._modules = walk.modules_of(model)
        self._found = {found.name: found for found in walk.registered(self._modules)}
        self._kinds = dict(_kinds(weights.manifest))
        self._made: dict[str, torch.Tensor] = {}
        self._region: Region | None = None
        self._state: dict[str, object] = {}
        self.private: dict[str, int] = {}

    def require_alike(self) -> None:
        """AttachError unless the model, without weights, is what the builder's was.

        UnsupportedQuantForIPCError as of `require_shareable`.
        """
        require_shareable(self._modules, self._layout)
        if walk.outline(self._modules, self._found.values()) != self._beside.outline:
            raise AttachError(
                "the daemon's model is made of other tensors, or quantised by other means, than "
                "this engine's, although their keys are equal: give both the same arguments"
            )

    def bind_early(self) -> None:
        """All that processing may need: what the model has names for, and what methods of
        quantisation made. What attention makes of it would be written over in place."""
        if self._weights.mode is Mode.ZERO_COPY:
            self._region = Region(self._weights)
        for name in self._kinds:
            if name in self._found or not self._of_attention(name):
                self._put(name)
        self._put_hidden(replacing=True)
        self._state = {name: walk.value_at(*place) for name, place in self._state_places()}

    def bind_late(self) -> None:
        """What attention layers make while they process, and what processing made a copy of."""
        if self._layout is Layout.RAW:
            return
        now = {found.name: found.tensor for found in walk.registered(self._modules)}
        for name, kind in self._kinds.items():
            if kind is Kind.HIDDEN:
                continue
            there = now.get(name)
            ours = self._tensor(name)
            if there is not ours and (there is None or _alike(there, ours)):
                self._put(name)

    def complete(self) -> None:
        """Leave no tensor of a module without content: what processing took away from the builder's
        model goes from this one too, so that to use it is an error and not a wrong answer.

        AttachError names what should have content and has none.
        """
        self._modules = walk.modules_of(self._model)  # processing may have added some
        self._put_hidden(replacing=False)
        self._restore_state()
        empty, gone = set(self._beside.empty), set(self._beside.gone)
        for module in self._modules.values():
            # As `eval` does, which goes by way of all that is checked when attributes are set.
            vars(module)["training"] = False
        for found in list(walk.registered(self._modules)):
            if found.tensor.is_meta:
                if found.name not in gone:
                    raise AttachError(f"{found.name} was left without content")
                self._take_away(found, leave_none=found.name in empty)
        # An operation may take a tensor without content for nothing to do.
        if left := list(islice(walk.empty_beside(self._modules), _FEW)):
            raise AttachError(
                f"left without content, as the daemon has none for it: {', '.join(left)}"
            )

    def _take_away(self, found: walk.Found, *, leave_none: bool) -> None:
        module, leaf = self._home(found.name)
        walk.remove(module, leaf)
        if leave_none and found.kind is Kind.PARAMETER:
            module.register_parameter(leaf, None)
        elif leave_none:
            module.register_buffer(leaf, None)

    def _state_places(self) -> Iterator[tuple[str, tuple[Any, str | int]]]:
        """Where processing set something in the builder's model, as `walk.look_up` tells."""
        for name in self._beside.state:
            with suppress(LookupError):
                yield name, walk.look_up(self._modules, name)

    def _restore_state(self) -> None:
        """Set what processing set in the builder's model, and in this one did not: of weights that
        are prepared already, some methods leave their own kernels unprepared (vLLM 0.33: FP8 with
        CUTLASS)."""
        for name, place in self._state_places():
            if walk.value_at(*place) == self._state.get(name):
                with suppress(LookupError):
                    walk.put_plain(*place, self._beside.state[name])

    def _put(self, name: str) -> None:
        if self._kinds[name] is Kind.HIDDEN:
            return
        module, leaf = self._home(name)
        found = self._found.get(name)
        kind = self._kinds[name] if found is None else found.kind
        persistent = kind is not Kind.NON_PERSISTENT_BUFFER
        walk.put(module, leaf, self._tensor(name), persistent=persistent)

    def _put_hidden(self, *, replacing: bool) -> None:
        """Tensors in plain objects that have none, or one without content.

        Before processing (`replacing`) only the latter: objects may not be complete yet.
        """
        for name, kind in self._kinds.items():
            if kind is not Kind.HIDDEN:
                continue
            try:
                holder, step = walk.look_up(self._modules, name)
            except LookupError:
                continue  # an object that this engine has no use for
            there = walk.value_at(holder, step)
            if isinstance(there, torch.Tensor):
                if there.is_meta:
                    walk.put_hidden(holder, step, self._hidden(name, there))
            elif there is None and not replacing:
                walk.put_hidden(holder, step, self._tensor(name))

    def _hidden(self, name: str, there: torch.Tensor) -> torch.Tensor:
        """What takes the place of `there`, which has no content. Room to work in is as large as
        this engine wants it, which may be configured otherwise than the builder was."""
        first = self._weights.manifest.aliases.get(name, name)
        if first in self._beside.blank and first not in self._made:
            attached = self._weights.tensors[first]
            if (attached.shape, attached.dtype) != (there.shape, there.dtype):
                device = "cpu" if first in self._beside.on_host else self._weights.device
                self._made[first] = torch.zeros_like(there, device=device)
        return self._tensor(name)

    def _tensor(self, name: str) -> torch.Tensor:
        """The one object for a tensor under any of its names.

        Parameters lie in the arena. Buffers and what is hidden are this engine's own: vLLM writes
        into such (scales of attention, workspaces), and they are small.
        """
        first = self._weights.manifest.aliases.get(name, name)
        made = self._made.get(first)
        if made is None:
            tensor = self._weights.tensors[first]
            if self._kinds[first] is Kind.PARAMETER:
                made = nn.Parameter(tensor, requires_grad=False)
            else:
                made = self._own(first, tensor)
            self._made[first] = made
        return made

    def _own(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if self._weights.mode is Mode.ZERO_COPY:
            self.private[name] = tensor.nbytes
        if name in self._beside.on_host:
            return tensor.cpu()
        return tensor if self._region is None else self._region.copy_of(name, tensor)

    def _home(self, name: str) -> tuple[nn.Module, str]:
        prefix, _, leaf = name.rpartition(".")
        module = self._modules.get(prefix)
        if module is None:
            raise AttachError(f"the daemon has {name}, but this model has no {prefix}")
        return module, leaf

    def _of_attention(self, name: str) -> bool:
        return isinstance(self._modules.get(name.rpartition(".")[0]), _ATTENTION)


def _guarding(weights: Weights, layout: Layout) -> AbstractContextManager[object]:
    """Raw weights are written into: what is touched the mapping copies."""
    if layout is Layout.RAW or weights.mode is Mode.COPY:
        return nullcontext()
    return WriteGuard(weights)


def _kinds(manifest: Manifest) -> Iterator[tuple[str, Kind]]:
    for name, kind in zip(manifest.tensors.name, manifest.tensors.kind, strict=True):
        yield name, Kind(kind)
    kinds = dict(zip(manifest.tensors.name, manifest.tensors.kind, strict=True))
    for alias, name in manifest.aliases.items():
        yield alias, Kind.HIDDEN if walk.HIDDEN in alias else Kind(kinds[name])


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


def _beside(manifest: Manifest) -> _Beside:
    for artifact in manifest.artifacts:
        if artifact.kind == "vllm":
            try:
                return msgspec.json.decode(artifact.data, type=_Beside)
            except msgspec.MsgspecError as error:
                raise DamagedManifest(f"{artifact.name} cannot be read: {error}") from error
    raise DamagedManifest("the manifest does not say that vLLM made these weights")
