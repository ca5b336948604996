"""How far vLLM has prepared the weights that are shared, and what an engine has left to do.

``processed``
    On GPUs. All of vLLM's post-processing is done; the engine only rebuilds what is no tensor.
``plain``
    On CPUs. The same, but the weights of linear layers stay ordinary tensors: vLLM would pack them
    into an object of oneDNN that cannot be shared. Products are computed by torch from them.
``raw``
    On CPUs. Before post-processing, all of which is the engine's: what it repacks becomes its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from torch import nn
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.utils import weights_already_processed

from preloadd.domain.settings import Layout
from preloadd.errors import UnsupportedQuantForIPCError
from preloadd.frameworks.vllm.patching import replaced
from preloadd.frameworks.vllm.walk import quant_method

_PACK = "dispatch_cpu_unquantized_gemm"


def require_shareable(modules: Mapping[str, nn.Module], layout: Layout) -> None:
    """UnsupportedQuantForIPCError names a layer whose method cannot start from prepared weights.

    vLLM's own methods say whether they can. `modules` are those of a model under all their names;
    weights may not be loaded yet.
    """
    if layout is Layout.RAW:
        return
    for name, module in modules.items():
        method = quant_method(module)
        if isinstance(method, QuantizeMethodBase) and (why := _obstacle(method)):
            remedy = ': use layout = "raw"' if layout is Layout.PLAIN else ""
            raise UnsupportedQuantForIPCError(
                f"layer {name or 'of the whole model'}: {type(method).__name__} {why}, so its "
                f"weights cannot be shared{remedy or ': load this model without preloadd'}"
            )


def _obstacle(method: QuantizeMethodBase) -> str:
    if not getattr(method, "supports_pre_processed_weights", False):
        return "cannot start from weights that are already processed"
    return _wrong_backend(method)


_ONLY_BACKENDS = {
    "ModelOptNvFp4FusedMoE": ("nvfp4_backend", "FLASHINFER_TRTLLM"),
    "Mxfp4MoEMethod": ("mxfp4_backend", "FLASHINFER_TRTLLM_MXFP4_MXFP8"),
}
"""Methods that vLLM (0.30 to 0.33) says can start from prepared weights but which then raise unless
the backend it chose for them, an attribute, is this one."""


def _wrong_backend(method: QuantizeMethodBase) -> str:
    attribute, only = _ONLY_BACKENDS.get(type(method).__name__, ("", ""))
    backend = getattr(method, attribute, None) if attribute else None
    chosen = getattr(backend, "name", "")
    if backend is None or chosen.startswith(only):
        return ""
    return f"with the backend {chosen} cannot start from weights that are already processed"


@contextmanager
def loaders_processing(layout: Layout) -> Iterator[None]:
    """A block in which vLLM post-processes freshly loaded weights into `layout`."""
    with _left_plain(getattr(layer_utils, _PACK)) if layout is Layout.PLAIN else nullcontext():
        yield


@contextmanager
def engines_processing(layout: Layout) -> Iterator[None]:
    """A block in which vLLM's post-processing does what is left to do for weights in `layout`."""
    with ExitStack() as patches:
        if layout is Layout.PLAIN:
            # What is not of two dimensions the loader has packed.
            patches.enter_context(_left_plain(lambda *_: None))
        if layout is not Layout.RAW:
            patches.enter_context(weights_already_processed())
        yield


def _left_plain(otherwise: Callable[[Any, bool], None]) -> AbstractContextManager[None]:
    """A block in which weights of linear layers stay as they are; others are done `otherwise`."""

    def dispatch(layer: Any, remove_weight: bool) -> None:  # noqa: ANN401, FBT001
        if layer.weight.is_meta or layer.weight.ndim == 2:
            layer.cpu_linear = nn.functional.linear
        else:
            otherwise(layer, remove_weight)

    # Its callers import it when they call it, so that replacing it in its module is enough.
    return replaced(layer_utils, _PACK, dispatch)
