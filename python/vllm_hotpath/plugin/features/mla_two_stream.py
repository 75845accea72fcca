"""MLA decode on two streams: the cache write beside the query's absorption; attention waits for both.

Stock vLLM writes the new tokens' latents into the cache, then absorbs W_UK into the query, then attends. The
first two do not touch each other. Here the write is held back until attention's own op begins, starts there
on the auxiliary stream, and is joined before the cache is read. The same kernels run with the same arguments,
so every bit is that of stock.

Only while a full CUDA graph is captured: outside of one the host, which the events cost time, sets the pace.
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import TYPE_CHECKING, Any

from vllm_hotpath import envs
from vllm_hotpath.plugin.plan import Feature, Patch, Plan
from vllm_hotpath.plugin.targets import Target

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from vllm_hotpath.overlap import ForkJoin

_MLA = "vllm.model_executor.layers.attention.mla_attention"
_BACKEND = "vllm.v1.attention.backend"

_FORWARD_0_22 = (
    "self, q, k_c_normed, k_pe, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None,"
    " quant_group_size=None, quant_scale_ue8m0=None, quant_col_major=None, quant_tma_aligned=None"
)
FORWARD = Target(
    module=_MLA,
    names=("MLAAttention.forward_impl",),
    signatures=(f"{_FORWARD_0_22}, q_dcp_replicated=None", _FORWARD_0_22),
    hashes={"32647e2cb06ab9ef": "0.33.0", "6a09462a5301218d": "0.22.1"},
)
# What the deferral relies on: who calls the write, and that attention's op follows with the same tensors.
WRITE_OP = Target(
    module=_MLA,
    names=("unified_mla_kv_cache_update",),
    signatures=("kv_c_normed, k_pe, layer_name, kv_cache_dtype, k_scale",),
    hashes={"201217f1e1da89ae": "0.33.0", "ff5ac497bfb36c58": "0.22.1"},
)
_ATTENTION_0_22 = (
    "q, kv_c_normed, k_pe, output, layer_name, output_scale=None, output_block_scale=None,"
    " kv_cache_dummy_dep=None, quant_group_size=None, quant_scale_ue8m0=None, quant_col_major=None,"
    " quant_tma_aligned=None"
)
ATTENTION_OP = Target(
    module=_MLA,
    names=("unified_mla_attention_with_output",),
    signatures=(f"{_ATTENTION_0_22}, q_dcp_replicated=None", _ATTENTION_0_22),
    hashes={"6bd177aa0d97d32c": "0.33.0", "73c321b219bcc361": "0.22.1"},
)
UPDATE = Target(
    module=_MLA,
    names=("MLAAttention.update_kv_cache",),
    signatures=("self, kv_c_normed, k_pe, kv_cache, slot_mapping, attn_metadata, kv_cache_dtype, k_scale",),
    hashes={"da2918b16615b3ec": "0.33.0"},
)
_WRITE_0_22 = "self, kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale"
WRITE = Target(
    module=_BACKEND,
    names=("MLAAttentionImpl.do_kv_cache_update",),
    signatures=(f"{_WRITE_0_22}, skip_scale=False", _WRITE_0_22),
    hashes={"cd1660bbc6a7f30a": "0.33.0", "11058684b9c2f676": "0.22.1"},
)

# As vLLM's own second stream in Kimi-K3's attention. More tokens are not measured.
MAX_TOKENS = 512

# Whether the graph's node of the write is made before the products' nodes ("first") or after them ("last");
# it starts from the same point in both.
LAUNCH = "first"

# In an implementation's attributes: its methods are ours, or the reason why they are not.
_MARK = "_vllm_hotpath_two_stream"


class _Thread(threading.local):
    """What the calling thread has held back, and how it waits for it."""

    def __init__(self) -> None:
        # The implementation whose write is held back, and the write.
        self.pending: tuple[Any, Callable[[], None]] | None = None
        # Launches the write of the attention that runs, if it has not been, and joins it.
        self.join: Callable[[], None] | None = None


_thread = _Thread()


# ---- When ----


def excluded(layer: Any) -> str:
    """Why a layer stays stock, whatever the batch; empty if it does not."""
    module = sys.modules.get(_MLA)
    if type(layer) is not getattr(module, "MLAAttention", None):
        return f"{type(layer).__name__} has a decode path of its own"
    if getattr(layer, "use_direct_call", True):
        return "attention is not an opaque op on this platform"
    if getattr(layer, "use_sparse", False) or getattr(layer.impl, "is_sparse", False):
        return "sparse attention"
    if getattr(layer, "hisparse_cache", None) is not None:
        return "the cache is tiered"
    if getattr(layer, "use_pcp", False):
        return "the cache write gathers from other ranks (prefill context parallelism)"
    if getattr(layer.impl, "dcp_world_size", 1) > 1:
        return "the query is gathered from other ranks beside the cache write (decode context parallelism)"
    for flag in ("is_aiter_triton_fp4_bmm_enabled", "is_aiter_triton_fp8_bmm_enabled", "is_amx_bmm_enabled"):
        if getattr(layer, flag, False):
            return f"{flag}: the query is absorbed by another kernel"
    if type(layer.impl).do_kv_cache_update.__module__ != _BACKEND:
        return f"{type(layer.impl).__name__} has a cache write of its own"
    return ""


def _captures(kv_cache: torch.Tensor) -> bool:
    """Whether this call becomes part of a full CUDA graph, and attention's op after it too."""
    import torch

    from vllm_hotpath.overlap import is_breakable_capture

    if not kv_cache.is_cuda or not torch.cuda.is_current_stream_capturing() or is_breakable_capture():
        return False
    # Both ops split a piecewise graph; were one of them part of a piece, the other might not be.
    context = sys.modules["vllm.forward_context"]
    mode = getattr(context.get_forward_context(), "cudagraph_runtime_mode", None)
    return getattr(mode, "name", "") != "PIECEWISE"


def is_decode(metadata: Any) -> bool:
    """Whether a batch only decodes, and is one that gains."""
    tokens = getattr(metadata, "num_decode_tokens", None)
    return tokens is not None and 0 < tokens <= MAX_TOKENS and tokens == metadata.num_actual_tokens


# ---- What ----


def _prepare(layer: Any) -> None:
    """Put our methods into a layer's implementation, once."""
    impl = layer.impl
    # vLLM 0.22.1 asks for the number of ranks in the first forward that has a batch, and has -1 until then.
    if _MARK in vars(impl) or getattr(impl, "dcp_world_size", 1) < 1:
        return
    reason = excluded(layer)
    setattr(impl, _MARK, reason)
    if reason:
        _say_once(getattr(layer, "layer_name", "an MLA layer"), reason)
        return
    impl.do_kv_cache_update = _holding_back(impl, _method(impl, "do_kv_cache_update"))
    for name in ("forward_mqa", "forward_mha"):
        if hasattr(impl, name):
            setattr(impl, name, _joining(_method(impl, name)))


_said: set[str] = set()


def _say_once(layer: str, reason: str) -> None:
    if reason not in _said:
        _said.add(reason)
        from vllm_hotpath.plugin import report

        report.LOGGER.info("%s: %s stays stock: %s", MLA_TWO_STREAM.name, layer, reason)


def _method(impl: Any, name: str) -> Callable[..., Any]:
    """The method of an instance, or of its class as it is when called."""
    own = vars(impl).get(name)
    if own is not None:
        found: Callable[..., Any] = own
        return found
    return lambda *arguments, **options: getattr(type(impl), name)(impl, *arguments, **options)


def _holding_back(impl: Any, write: Callable[..., None]) -> Callable[..., None]:
    def do_kv_cache_update(
        kv_c_normed: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, *rest: Any, **options: Any
    ) -> None:
        _write_what_is_pending()
        call = functools.partial(write, kv_c_normed, k_pe, kv_cache, *rest, **options)
        if _captures(kv_cache):
            _thread.pending = impl, call
        else:
            call()

    return do_kv_cache_update


def _write_what_is_pending() -> None:
    """A write whose attention has not come: late, but before any other of ours."""
    if _thread.pending is not None:
        (_, write), _thread.pending = _thread.pending, None
        write()


def _joining(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        join, _thread.join = _thread.join, None
        if join is not None:
            join()
        return method(*arguments, **options)

    return call


@functools.cache
def _fork_join(device: torch.device) -> ForkJoin:
    from vllm_hotpath.overlap import ForkJoin

    return ForkJoin(device)


def _micro_batch() -> int:
    """Which of vLLM's overlapped micro-batches this thread runs."""
    module = sys.modules.get("vllm.v1.worker.ubatching")
    if module is None or not module.dbo_enabled():
        return 0
    slot: int = module.dbo_current_ubatch_id()
    return slot


def _forward_impl(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward_impl(
        self: Any,
        q: torch.Tensor,
        k_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        *rest: Any,
        **options: Any,
    ) -> Any:
        arguments = (self, q, k_c_normed, k_pe, kv_cache, attn_metadata, *rest)
        pending = _thread.pending
        if pending is None:
            result = original(*arguments, **options)
            _prepare(self)
            return result
        if pending[0] is not self.impl or not is_decode(attn_metadata):
            _write_what_is_pending()
            return original(*arguments, **options)
        _thread.pending = None
        fork, slot = _fork_join(kv_cache.device), _micro_batch()

        def write_and_join() -> None:
            with fork.side(slot):
                pending[1]()
            fork.join(slot)

        with fork:
            fork.fork(slot)
            if LAUNCH == "first":
                with fork.side(slot):
                    pending[1]()
                _thread.join = functools.partial(fork.join, slot)
            else:
                _thread.join = write_and_join
            try:
                return original(*arguments, **options)
            finally:
                join, _thread.join = _thread.join, None
                if join is not None:
                    join()

    return forward_impl


# ---- What the flag asks for ----


def _plan(environ: Mapping[str, str]) -> Plan | None:
    if not envs.read(envs.MLA_TWO_STREAM, environ):
        return None
    return Plan(
        (Patch(FORWARD, _forward_impl),),
        detail="cache write beside the absorbed query, in captured decode (MLAAttention.forward_impl)",
        known=(WRITE_OP, ATTENTION_OP, UPDATE, WRITE),
    )


MLA_TWO_STREAM = Feature("mla_two_stream", (envs.MLA_TWO_STREAM,), _plan)
