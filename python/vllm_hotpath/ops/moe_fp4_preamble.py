"""What a mixture of experts in NVFP4 needs before its kernel: codes, router logits and routing bias.

The public function and its torch op. Checks and kernels live in ``src/ops/moe_fp4_preamble``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm_hotpath import _core
from vllm_hotpath.ops import allocate, limit, plain, register, through_dispatcher
from vllm_hotpath.ops.nvfp4_quant import make_outputs
from vllm_hotpath.routing_bias import DTYPES as BIAS_DTYPES
from vllm_hotpath.routing_bias import routing_bias as bias_in

if TYPE_CHECKING:
    from vllm_hotpath.ops.nvfp4_quant import ScaleLayout

MAX_TOKENS = 32
"""Tokens of a call with a gate. Above, the gate is a matrix product that cuBLAS does well."""

_DTYPES = {None: None, torch.bfloat16: "bfloat16", torch.float32: "float32"}


class MoePreamble(NamedTuple):
    """What :func:`moe_fp4_preamble` returns.

    Attributes:
        packed: uint8 ``[M, K/2]``, the codes of the activations.
        scales: their scales, of the layout's padded shape.
        router_logits: ``[M, E]``; None without a gate.
        routing_bias: in the dtype that was asked for; None without one.
    """

    packed: torch.Tensor
    scales: torch.Tensor
    router_logits: torch.Tensor | None
    routing_bias: torch.Tensor | None


def moe_fp4_preamble(
    hidden_states: torch.Tensor,
    global_scale: torch.Tensor,
    *,
    gate_weight: torch.Tensor | None = None,
    logits_dtype: torch.dtype | None = None,
    routing_bias: torch.Tensor | None = None,
    bias_dtype: torch.dtype | None = None,
    layout: ScaleLayout = "linear",
    out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    out_logits: torch.Tensor | None = None,
) -> MoePreamble:
    """Make everything that a MoE layer hands to FlashInfer's TRT-LLM kernel, in one launch.

    Codes and scales are those of ``nvfp4_quantize``, bit for bit. With a gate the same launch computes
    ``hidden_states @ gate_weight.T``, with fp32 sums rounded once; these differ from cuBLAS in the order of
    summation only. Without one, logits are the caller's business and the call is lossless.

    ``M`` is the number of tokens, ``K`` the hidden size, ``E`` the number of experts.

    Args:
        hidden_states: ``[M, K]``, bf16 (without a gate fp16, too). Row stride and base free, element
            stride 1. ``K`` is a multiple of 16. With a gate ``M`` is from 0 to 32.
        global_scale: fp32 tensor of one element, as for ``nvfp4_quantize``.
        gate_weight: bf16 ``[E, K]``, ``E`` from 1 to 1024. Row stride free, column stride 1. Must not be
            written by the kernel that runs before in the stream: it is read early.
        logits_dtype: ``torch.bfloat16`` or ``torch.float32``; None is bf16. Only with a gate.
        routing_bias: bf16, fp16 or fp32 ``[E]``.
        bias_dtype: what the consumer takes, bf16, fp16 or fp32; None leaves the bias as it is. A bias of
            another dtype is cast once and kept (:func:`vllm_hotpath.refresh_routing_bias` renews it after a
            reload that torch does not see).
        layout: of the scales, as for ``nvfp4_quantize``.
        out: contiguous uint8 ``[M, K/2]``, base aligned to 8 bytes. None allocates it.
        out_scale: as for ``nvfp4_quantize``. None allocates uint8.
        out_logits: ``[M, E]`` of ``logits_dtype``, row stride free, column stride 1. Only with a gate. None
            allocates it.

    Returns:
        ``MoePreamble(packed, scales, router_logits, routing_bias)``. Without tokens nothing is launched.

    Raises:
        TypeError: a dtype that is not supported.
        ValueError: a shape, stride, alignment, device, layout or overlap that is not supported; a gate with
            more than 32 tokens (``is_supported("moe_fp4_preamble", device, tokens=M)`` says so beforehand).
        RuntimeError: CUDA refused the launch, or this build has no kernel for the GPU.
    """
    if logits_dtype not in _DTYPES:
        raise TypeError(
            f"moe_fp4_preamble: logits_dtype: expected torch.bfloat16 or torch.float32, got {logits_dtype}"
        )
    if routing_bias is not None:
        _check_bias(routing_bias, bias_dtype, hidden_states, gate_weight)
    if through_dispatcher(hidden_states, global_scale, gate_weight, routing_bias, out, out_scale, out_logits):
        out, out_scale = make_outputs(hidden_states, hidden_states.shape[-1], layout, out, out_scale)
        if gate_weight is not None and out_logits is None:
            shape = (hidden_states.shape[0], gate_weight.shape[0])
            out_logits = hidden_states.new_empty(shape, dtype=logits_dtype or torch.bfloat16)
        torch.ops.vllm_hotpath.moe_fp4_preamble(
            hidden_states, global_scale, gate_weight, logits_dtype, layout, out, out_scale, out_logits
        )
        if routing_bias is not None and bias_dtype is not None:
            routing_bias = routing_bias.to(bias_dtype)
        return MoePreamble(out, out_scale, out_logits, routing_bias)
    if routing_bias is not None and bias_dtype is not None:
        routing_bias = bias_in(routing_bias, bias_dtype)
    packed, scales, logits = _core.moe_fp4_preamble(
        hidden_states,
        global_scale,
        gate_weight,
        _DTYPES[logits_dtype],
        layout,
        out,
        out_scale,
        out_logits,
        allocate,
    )
    return MoePreamble(packed, scales, logits, routing_bias)


def _check_bias(
    bias: torch.Tensor,
    dtype: torch.dtype | None,
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor | None,
) -> None:
    op = "moe_fp4_preamble"
    for name, given in (("routing_bias", bias.dtype), ("bias_dtype", dtype or bias.dtype)):
        if given not in BIAS_DTYPES:
            raise TypeError(f"{op}: {name}: expected dtype bfloat16 or float16 or float32, got {given}")
    experts = bias.numel() if gate_weight is None else gate_weight.shape[0]
    if tuple(bias.shape) != (experts,):
        raise ValueError(f"{op}: routing_bias: expected shape [{experts}] (experts), got {list(bias.shape)}")
    if bias.device != hidden_states.device:
        raise ValueError(
            f"{op}: routing_bias: expected device {hidden_states.device} (that of hidden_states), "
            f"got {bias.device}"
        )


def _moe_fp4_preamble(
    hidden_states: torch.Tensor,
    global_scale: torch.Tensor,
    gate_weight: torch.Tensor | None,
    logits_dtype: torch.dtype | None,
    layout: str,
    out: torch.Tensor,
    out_scale: torch.Tensor,
    out_logits: torch.Tensor | None,
) -> None:
    _core.moe_fp4_preamble(
        plain(hidden_states),
        plain(global_scale),
        plain(gate_weight),
        _DTYPES[logits_dtype],
        layout,
        plain(out),
        plain(out_scale),
        plain(out_logits),
        allocate,
    )


def _fake_moe_fp4_preamble(*arguments: object) -> None:
    pass


limit("moe_fp4_preamble", tokens=(0, MAX_TOKENS), experts=(1, 1024))

register(
    "moe_fp4_preamble",
    "(Tensor hidden_states, Tensor global_scale, Tensor? gate_weight, ScalarType? logits_dtype, str layout, "
    "Tensor(a!) out, Tensor(b!) out_scale, Tensor(c!)? out_logits) -> ()",
    _moe_fp4_preamble,
    _fake_moe_fp4_preamble,
)
