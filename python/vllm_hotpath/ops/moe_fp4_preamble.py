"""What a mixture of experts in NVFP4 needs before its kernel: codes, router logits and routing bias.

The public function and its torch op. Checks and kernels live in ``src/ops/moe_fp4_preamble``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm_hotpath import _core
from vllm_hotpath.ops import allocate, limit, plain, register, through_dispatcher
from vllm_hotpath.ops.moe_router import LOGITS_DTYPES, MAX_TOKENS
from vllm_hotpath.ops.nvfp4_quant import make_outputs
from vllm_hotpath.routing_bias import DTYPES as BIAS_DTYPES
from vllm_hotpath.routing_bias import cast_once

if TYPE_CHECKING:
    from vllm_hotpath.ops.nvfp4_quant import ScaleLayout


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
    """Quantise activations to NVFP4 and, with a gate, compute the router logits, in one launch.

    With the routing bias in the dtype that the consumer takes, the result is what a MoE layer hands to
    FlashInfer's TRT-LLM kernels. Codes and scales are those of ``nvfp4_quantize``, bit for bit. With a gate
    the same launch computes ``hidden_states @ gate_weight.T``, with fp32 sums rounded once; these differ from
    cuBLAS in the order of summation only. Without one, logits are the caller's business and the call is
    lossless.

    ``M`` is the number of tokens, ``K`` the hidden size, ``E`` the number of experts.

    Args:
        hidden_states: ``[M, K]``, bf16 (without a gate fp16, too). Row stride and base free, element
            stride 1. ``K`` is a multiple of 16 up to 2^24. With a gate ``M`` is from 0 to 32.
        global_scale: fp32 tensor of one element, as for ``nvfp4_quantize``.
        gate_weight: bf16 ``[E, K]``, ``E`` from 1 to 1024. Row stride free, column stride 1. Must not be
            written by the kernel that runs before in the stream: it is read early.
        logits_dtype: ``torch.bfloat16`` or ``torch.float32``; None is bf16. Only with a gate.
        routing_bias: bf16, fp16 or fp32 ``[E]``, any stride; with ``bias_dtype`` a tensor of torch.
        bias_dtype: what the consumer takes, bf16, fp16 or fp32; None leaves the bias as it is, and without a
            bias there is none. A bias of another dtype is cast once and kept
            (:func:`vllm_hotpath.refresh_routing_bias` renews it after a reload that torch does not see).
            Under ``torch.compile``, modes and tensor subclasses it is cast in every call.
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
    dtypes = {"logits_dtype": (logits_dtype, LOGITS_DTYPES), "bias_dtype": (bias_dtype, BIAS_DTYPES)}
    for argument, (given, allowed) in dtypes.items():
        if given is not None and not (isinstance(given, torch.dtype) and given in allowed):
            expected = " or ".join(map(str, allowed))
            raise TypeError(f"moe_fp4_preamble: {argument}: expected {expected}, got {given}")
    # The cast is torch's, and would fail when all else is done.
    if bias_dtype is not None and not isinstance(routing_bias, torch.Tensor | None):
        raise TypeError(
            f"moe_fp4_preamble: routing_bias: expected a tensor of torch to cast to {bias_dtype}, "
            f"got {type(routing_bias).__name__}"
        )
    if through_dispatcher(hidden_states, global_scale, gate_weight, routing_bias, out, out_scale, out_logits):
        source = {"hidden_states": hidden_states}
        out, out_scale = make_outputs(
            "moe_fp4_preamble", source, hidden_states.shape[-1], {"layout": layout}, out, out_scale
        )
        if gate_weight is not None and out_logits is None:
            shape = (hidden_states.shape[0], gate_weight.shape[0])
            out_logits = hidden_states.new_empty(shape, dtype=logits_dtype or torch.bfloat16)
        torch.ops.vllm_hotpath.moe_fp4_preamble(
            hidden_states,
            global_scale,
            gate_weight,
            logits_dtype,
            routing_bias,
            layout,
            out,
            out_scale,
            out_logits,
        )
        if routing_bias is not None and bias_dtype not in (None, routing_bias.dtype):
            routing_bias = routing_bias.detach().to(bias_dtype)
        return MoePreamble(out, out_scale, out_logits, routing_bias)
    packed, scales, logits = _core.moe_fp4_preamble(
        hidden_states,
        global_scale,
        gate_weight,
        LOGITS_DTYPES.get(logits_dtype),
        routing_bias,
        layout,
        out,
        out_scale,
        out_logits,
        allocate,
    )
    if routing_bias is not None and bias_dtype is not None:
        routing_bias = cast_once(routing_bias, bias_dtype)
    return MoePreamble(packed, scales, logits, routing_bias)


def _moe_fp4_preamble(
    hidden_states: torch.Tensor,
    global_scale: torch.Tensor,
    gate_weight: torch.Tensor | None,
    logits_dtype: torch.dtype | None,
    routing_bias: torch.Tensor | None,
    layout: str,
    out: torch.Tensor,
    out_scale: torch.Tensor,
    out_logits: torch.Tensor | None,
) -> None:
    _core.moe_fp4_preamble(
        plain(hidden_states),
        plain(global_scale),
        plain(gate_weight),
        None if logits_dtype is None else LOGITS_DTYPES.get(logits_dtype, str(logits_dtype)),
        plain(routing_bias),
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
    "(Tensor hidden_states, Tensor global_scale, Tensor? gate_weight, ScalarType? logits_dtype, "
    "Tensor? routing_bias, str layout, Tensor(a!) out, Tensor(b!) out_scale, Tensor(c!)? out_logits) -> ()",
    _moe_fp4_preamble,
    _fake_moe_fp4_preamble,
)
