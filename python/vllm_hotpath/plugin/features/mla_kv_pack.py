"""The key and value pack of MLA prefill: for every MLA model, and for Kimi-K3's context chunks under DCP.

The generic feature replaces the concat of key and rotary key that new tokens and context chunks share, hands
the DCP context loop a pack where prefill queries are FP8, and takes the place of Kimi-K3's two kernels. The
Kimi-K3 feature replaces the pack that this model hands to the same loop, or takes it away.

Keys and values are those of stock vLLM, bit by bit; only FP8 NaNs keep the sign that a GPU's cast drops. The
checks here decide, by shape and dtype, what our ops take; what these raise then is raised, with the layer's
name.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vllm_hotpath import envs
from vllm_hotpath.plugin.plan import STOCK, Feature, Need, Patch, Plan
from vllm_hotpath.plugin.targets import Target

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

_MLA = "vllm.model_executor.layers.attention.mla_attention"
_K3_MLA = "vllm.models.kimi_k3.nvidia.mla"
_K3_OPS = "vllm.models.kimi_k3.nvidia.ops.fused_mla_key_concat_kv_cache"

_HOOK = "fused_mla_kv_concat_fn"

CONCAT = Target(
    module=_MLA,
    names=("MLACommonBaseImpl._concat_k_nope_k_pe", "MLACommonImpl._concat_k_nope_k_pe"),
    signatures=("self, k_nope, k_pe",),
    hashes={"86ea29e2ebc93a3e": "0.33.0", "7b093fd552e23586": "0.22.1"},
)
_DCP_LOOP_NAME = "_context_parallel_compute_prefill_context"
# Without the hook (0.22.1) the loop is no target: all that there is in it is the concat.
DCP_LOOP = Target(
    module=_MLA,
    names=(f"MLACommonBaseImpl.{_DCP_LOOP_NAME}",),
    signatures=(f"self, q, kv_c_and_k_pe_cache, attn_metadata, k_scale, dcp_world_size, {_HOOK}=None",),
    hashes={"007aa7d44d9ea881": "0.33.0"},
)
K3_CONCAT = Target(
    module=_K3_MLA,
    names=("fused_mla_kv_concat",),
    signatures=("k_nope, k_pe",),
    hashes={"3037dcb6f2fbc755": "0.33.0"},
    defined_in=_K3_OPS,
)
K3_QUANT = Target(
    module=_K3_MLA,
    names=("fused_mla_kv_concat_quant_fp8",),
    signatures=("k_nope, k_pe, v",),
    hashes={"d8eea35ce688e44c": "0.33.0"},
    defined_in=_K3_OPS,
)
K3_DCP_PACK = Target(
    module=_K3_MLA,
    names=("MultiHeadLatentAttention._fused_mla_kv_concat",),
    signatures=("self, kv_nope, k_pe, use_fp8_prefill",),
    hashes={"af97460f3643c8e7": "0.33.0"},
)


# ---- What our ops take ----


@functools.cache
def _runs_on(op: str, device: torch.device) -> bool:
    from vllm_hotpath.ops import is_supported

    return is_supported(op, device).ok


def _takes_keys(op: str, k_nope: torch.Tensor, k_pe: torch.Tensor) -> bool:
    """Whether ``k_nope [T, H, P]`` and ``k_pe [T, R]`` or ``[T, 1, R]`` are inputs of ``op``, dtypes aside.

    Not under ``torch.compile``: on platforms where attention is traced, its graph stays vLLM's.
    """
    import torch

    if torch.compiler.is_compiling() or k_nope.dim() != 3 or k_pe.dim() not in {2, 3}:
        return False
    tokens, heads, nope = k_nope.shape
    rope = k_pe.shape[-1]
    return (
        k_pe.shape in {(tokens, rope), (tokens, 1, rope)}
        and heads > 0
        and nope > 0
        and rope > 0
        and nope % 8 == rope % 8 == 0
        and k_nope.stride(-1) == k_pe.stride(-1) == 1
        and k_nope.device == k_pe.device
        and _runs_on(op, k_nope.device)
    )


def takes_concat(k_nope: torch.Tensor, k_pe: torch.Tensor) -> bool:
    """Whether ``mla_kv_concat`` takes these: one dtype, which is bf16, fp16 or e4m3, and widths of 8 n."""
    import torch

    return (
        k_nope.dtype == k_pe.dtype
        and k_nope.dtype in {torch.bfloat16, torch.float16, torch.float8_e4m3fn}
        and _takes_keys("mla_kv_concat", k_nope, k_pe)
    )


def takes_quant(k_nope: torch.Tensor, k_pe: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether ``mla_kv_concat_quant_fp8`` takes these: bf16 or fp16, k_pe also e4m3, and widths of 8 n."""
    import torch

    half = (torch.bfloat16, torch.float16)
    return (
        k_nope.dtype in half
        and v.dtype == k_nope.dtype
        and k_pe.dtype in {k_nope.dtype, torch.float8_e4m3fn}
        and v.dim() == 3
        and v.shape[:2] == k_nope.shape[:2]
        and v.shape[2] > 0
        and v.shape[2] % 8 == 0
        and v.stride(-1) == 1
        and v.device == k_nope.device
        and _takes_keys("mla_kv_concat_quant_fp8", k_nope, k_pe)
    )


def _call(layer: Any, op: Callable[..., Any], *tensors: torch.Tensor) -> Any:
    """Run an op; its errors name the layer."""
    try:
        return op(*tensors)
    except (TypeError, ValueError, RuntimeError) as error:
        if type(error) not in {TypeError, ValueError, RuntimeError}:
            raise
        projection = getattr(layer, "kv_b_proj", None)
        name = getattr(layer, "layer_name", None) or getattr(projection, "prefix", None) or "an MLA layer"
        raise type(error)(f"{name}: {error}") from error


# ---- Every MLA model ----


def _concat_method(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm_hotpath.ops.mla_kv_pack import mla_kv_concat

    @functools.wraps(original)
    def _concat_k_nope_k_pe(self: Any, k_nope: torch.Tensor, k_pe: torch.Tensor) -> Any:
        # FlashInfer's kernel for 128 heads is one launch already. A k_pe of two dimensions is no [T, R] here.
        native = getattr(self, "_use_flashinfer_concat_mla_k", False)
        if native or k_pe.dim() != 3 or not takes_concat(k_nope, k_pe):
            return original(self, k_nope, k_pe)
        return _call(self, mla_kv_concat, k_nope, k_pe)

    return _concat_k_nope_k_pe


def _pack_fp8_chunk(impl: Any, kv_nope: torch.Tensor, k_pe: torch.Tensor, _use_fp8_prefill: bool) -> Any:
    """The DCP loop's hook where queries are FP8: ``kv_nope [T, H, P + V]`` and ``k_pe [T, 1, R]`` to k, v."""
    import torch

    from vllm_hotpath.ops.mla_kv_pack import mla_kv_concat_quant_fp8

    widths = [impl.qk_nope_head_dim, impl.v_head_dim]
    k_nope, v = kv_nope.split(widths, dim=-1)
    if takes_quant(k_nope, k_pe, v):
        return _call(impl, mla_kv_concat_quant_fp8, k_nope, k_pe, v)
    # A loop with a hook does not pack itself.
    k_nope, v = kv_nope.to(torch.float8_e4m3fn).split(widths, dim=-1)
    return impl._concat_k_nope_k_pe(k_nope, k_pe.to(torch.float8_e4m3fn)), v


_NOT_GIVEN: Any = object()


def _dcp_loop(original: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    @functools.wraps(original)
    def _context_parallel_compute_prefill_context(
        self: Any,
        q: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        k_scale: torch.Tensor,
        dcp_world_size: int,
        fused_mla_kv_concat_fn: Any = _NOT_GIVEN,
    ) -> Any:
        arguments = (self, q, kv_c_and_k_pe_cache, attn_metadata, k_scale, dcp_world_size)
        # A caller that gives a pack, or None, has decided: Kimi-K3, also with its kill switch.
        if fused_mla_kv_concat_fn is not _NOT_GIVEN:
            return original(*arguments, fused_mla_kv_concat_fn=fused_mla_kv_concat_fn)
        prefill = attn_metadata.prefill
        if prefill is None or prefill.q_data_type != torch.float8_e4m3fn:
            return original(*arguments)
        return original(*arguments, fused_mla_kv_concat_fn=functools.partial(_pack_fp8_chunk, self))

    return _context_parallel_compute_prefill_context


# ---- Kimi-K3 ----

_K3_CHUNK = "Kimi-K3 context chunk"


class _K3Chunk:
    layer_name = _K3_CHUNK


def _k3_concat(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm_hotpath.ops.mla_kv_pack import mla_kv_concat

    @functools.wraps(original)
    def fused_mla_kv_concat(k_nope: torch.Tensor, k_pe: torch.Tensor) -> Any:
        if takes_concat(k_nope, k_pe):
            return _call(_K3Chunk, mla_kv_concat, k_nope, k_pe)
        return original(k_nope, k_pe)

    return fused_mla_kv_concat


def _k3_quant(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm_hotpath.ops.mla_kv_pack import mla_kv_concat_quant_fp8

    @functools.wraps(original)
    def fused_mla_kv_concat_quant_fp8(k_nope: torch.Tensor, k_pe: torch.Tensor, v: torch.Tensor) -> Any:
        if takes_quant(k_nope, k_pe, v):
            return _call(_K3Chunk, mla_kv_concat_quant_fp8, k_nope, k_pe, v)
        return original(k_nope, k_pe, v)

    return fused_mla_kv_concat_quant_fp8


def _k3_dcp_pack(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm_hotpath.ops.mla_kv_pack import mla_kv_concat, mla_kv_concat_quant_fp8

    @functools.wraps(original)
    def _fused_mla_kv_concat(
        self: Any, kv_nope: torch.Tensor, k_pe: torch.Tensor, use_fp8_prefill: bool
    ) -> Any:
        k_nope, v = kv_nope.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        if use_fp8_prefill and takes_quant(k_nope, k_pe, v):
            return _call(self, mla_kv_concat_quant_fp8, k_nope, k_pe, v)
        if not use_fp8_prefill and takes_concat(k_nope, k_pe):
            return _call(self, mla_kv_concat, k_nope, k_pe), v
        return original(self, kv_nope, k_pe, use_fp8_prefill)

    return _fused_mla_kv_concat


def _no_pack(_original: Callable[..., Any]) -> None:
    """What the layer hands to the loop instead of its pack: given None, the loop packs in stock steps."""


# ---- What the flags ask for ----


def _plan_mla(environ: Mapping[str, str]) -> Plan | None:
    if not envs.read(envs.MLA_KV_PACK, environ):
        return None
    return Plan(
        (
            Patch(CONCAT, _concat_method),
            Patch(DCP_LOOP, _dcp_loop, optional=True),
            Patch(K3_CONCAT, _k3_concat, optional=True),
            Patch(K3_QUANT, _k3_quant, optional=True),
        )
    )


_K3_LINE = "Kimi-K3 DCP chunked-context KV pack: "


def _plan_k3(environ: Mapping[str, str]) -> Plan | None:
    wanted = envs.read(envs.K3_DCP_KV_PACK, environ)
    switch = f"{envs.K3_DCP_KV_PACK_DISABLE}=1" if envs.read(envs.K3_DCP_KV_PACK_DISABLE, environ) else ""
    if wanted is False:
        switch = switch or f"{envs.K3_DCP_KV_PACK}=0"
    if switch:
        return Plan((Patch(K3_DCP_PACK, _no_pack),), STOCK, f"{_K3_LINE}stock (kill switch {switch})")
    if wanted is None:
        return None
    return Plan(
        (Patch(K3_DCP_PACK, _k3_dcp_pack),),
        detail=f"{_K3_LINE}fused ({envs.K3_DCP_KV_PACK}=1)",
        needs=(Need(DCP_LOOP, _HOOK, f"{_K3_LINE}stock (impl accepts no kv_pack)"),),
    )


MLA_KV_PACK = Feature("mla_kv_pack", (envs.MLA_KV_PACK,), _plan_mla)
K3_DCP_KV_PACK = Feature("k3_dcp_kv_pack", (envs.K3_DCP_KV_PACK, envs.K3_DCP_KV_PACK_DISABLE), _plan_k3)
