"""MLA key and value pack: ``[k_nope | k_pe]`` per head, optionally in FP8 e4m3 together with V.

The public functions and their torch ops. Checks and kernels live in ``src/ops/mla_kv_pack``.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_hotpath import _core
from vllm_hotpath.ops import allocate, plain, register, through_dispatcher


def mla_kv_concat(
    k_nope: torch.Tensor, k_pe: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Concatenate the no-position part of every head's key with the rotary part that all heads share.

    ``out[t, h] = [k_nope[t, h] | k_pe[t]]``, bytes unchanged. The multi-head form of the MLA key
    (DeepSeek-V2, arXiv:2405.04434, section 2.1.3).

    Args:
        k_nope: ``[T, H, P]``, bf16, fp16 or float8_e4m3fn. Token and head stride free, element stride 1.
            ``P`` is a multiple of 8, from 8 to 2^20.
        k_pe: ``[T, R]`` or ``[T, 1, R]``, dtype of ``k_nope``. Token stride free, element stride 1.
            ``R`` is a multiple of 8; 0 makes the op a plain copy.
        out: contiguous ``[T, H, P + R]``, dtype of ``k_nope``, base aligned to 8 elements. It may not overlap
            an input. None allocates it.

    Returns:
        ``out``. Without tokens nothing is launched.

    Raises:
        TypeError: a dtype that is not supported, or not the one required.
        ValueError: a shape, stride, alignment, device or overlap that is not supported.
        RuntimeError: CUDA refused the launch, or this build has no kernel for the GPU.
    """
    if through_dispatcher(k_nope, k_pe, out):
        if out is None:
            result: torch.Tensor = torch.ops.vllm_hotpath.mla_kv_concat(k_nope, k_pe)
            return result
        torch.ops.vllm_hotpath.mla_kv_concat.out(k_nope, k_pe, out=out)
        return out
    result = _core.mla_kv_concat(k_nope, k_pe, out, allocate)
    return result


def mla_kv_concat_quant_fp8(
    k_nope: torch.Tensor,
    k_pe: torch.Tensor,
    v: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_out: torch.Tensor | None = None,
    v_out: torch.Tensor | None = None,
    v_pad_to: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack keys as in :func:`mla_kv_concat` and values, both in FP8 e4m3, in one launch.

    A value is stored as ``e4m3(x / scale)``: fp32 division, round to nearest even, saturated to +-448
    (infinities too); NaN becomes 0x7F with the sign of the quotient. Without a scale every byte equals a
    saturating cast. e4m3 values of ``k_pe`` are stored unchanged, whatever ``k_scale`` is.

    Args:
        k_nope: ``[T, H, P]``, bf16, fp16 or float8_e4m3fn. Token and head stride free, element stride 1.
            ``P`` is a multiple of 8, from 8 to 2^20.
        k_pe: ``[T, R]`` or ``[T, 1, R]``, any of these dtypes. ``R`` is a multiple of 8, 0 included.
        v: ``[T, H, V]``, any of these dtypes. Strides as ``k_nope``; ``V`` is a multiple of 8.
        k_scale: fp32 tensor of one element on the inputs' device, the dequantisation scale of the keys.
        v_scale: the same for the values.
        k_out: contiguous float8_e4m3fn ``[T, H, P + R]``, base aligned to 8 bytes. None allocates it.
        v_out: the same for the values, ``[T, H, V]``, or ``[T, H, v_pad_to]`` with padding.
        v_pad_to: width of a stored head of V, a multiple of 8 and at least ``V``; its tail is written zero.

    Returns:
        ``(k_out, v_out)``. Without tokens nothing is launched.

    Raises:
        TypeError: a dtype that is not supported, or not the one required.
        ValueError: a shape, stride, alignment, device or overlap that is not supported.
        RuntimeError: CUDA refused the launch, or this build has no kernel for the GPU.
    """
    if through_dispatcher(k_nope, k_pe, v, k_scale, v_scale, k_out, v_out):
        return _dispatch_quant_fp8(k_nope, k_pe, v, k_scale, v_scale, k_out, v_out, v_pad_to)
    return _core.mla_kv_concat_quant_fp8(k_nope, k_pe, v, k_scale, v_scale, k_out, v_out, v_pad_to, allocate)


# ---- The torch ops, for torch.compile and for tensors that handle dispatch themselves ----


def _dispatch_quant_fp8(
    k_nope: torch.Tensor,
    k_pe: torch.Tensor,
    v: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    k_out: torch.Tensor | None,
    v_out: torch.Tensor | None,
    v_pad_to: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    op = torch.ops.vllm_hotpath.mla_kv_concat_quant_fp8
    options: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale, "v_pad_to": v_pad_to}
    if k_out is None and v_out is None:
        result: tuple[torch.Tensor, torch.Tensor] = op(k_nope, k_pe, v, **options)
        return result
    k_new, v_new = _fake_quant_fp8(k_nope, k_pe, v, **options)
    k_out = k_new if k_out is None else k_out
    v_out = v_new if v_out is None else v_out
    op.out(k_nope, k_pe, v, **options, k_out=k_out, v_out=v_out)
    return k_out, v_out


def _concat(k_nope: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _core.mla_kv_concat(plain(k_nope), plain(k_pe), None, allocate)
    return result


def _concat_out(k_nope: torch.Tensor, k_pe: torch.Tensor, *, out: torch.Tensor) -> None:
    _core.mla_kv_concat(plain(k_nope), plain(k_pe), plain(out), allocate)


def _fake_concat(k_nope: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
    tokens, heads, nope = k_nope.shape
    return k_nope.new_empty((tokens, heads, nope + k_pe.shape[-1]))


def _fake_concat_out(k_nope: torch.Tensor, k_pe: torch.Tensor, *, out: torch.Tensor) -> None:
    pass


def _quant_fp8(
    k_nope: torch.Tensor,
    k_pe: torch.Tensor,
    v: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    v_pad_to: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    scales = (plain(k_scale), plain(v_scale))
    return _core.mla_kv_concat_quant_fp8(
        plain(k_nope), plain(k_pe), plain(v), *scales, None, None, v_pad_to, allocate
    )


def _quant_fp8_out(
    k_nope: torch.Tensor,
    k_pe: torch.Tensor,
    v: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    v_pad_to: int | None = None,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
) -> None:
    scales = (plain(k_scale), plain(v_scale))
    _core.mla_kv_concat_quant_fp8(
        plain(k_nope), plain(k_pe), plain(v), *scales, plain(k_out), plain(v_out), v_pad_to, allocate
    )


def _fake_quant_fp8(
    k_nope: torch.Tensor,
    k_pe: torch.Tensor,
    v: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    v_pad_to: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, nope = k_nope.shape
    k = k_nope.new_empty((tokens, heads, nope + k_pe.shape[-1]), dtype=torch.float8_e4m3fn)
    width = v.shape[-1] if v_pad_to is None else v_pad_to
    return k, k_nope.new_empty((tokens, heads, width), dtype=torch.float8_e4m3fn)


def _fake_quant_fp8_out(
    k_nope: torch.Tensor,
    k_pe: torch.Tensor,
    v: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    v_pad_to: int | None = None,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
) -> None:
    pass


_QUANT_ARGUMENTS = (
    "Tensor k_nope, Tensor k_pe, Tensor v, *, "
    "Tensor? k_scale=None, Tensor? v_scale=None, SymInt? v_pad_to=None"
)

register("mla_kv_concat", "(Tensor k_nope, Tensor k_pe) -> Tensor", _concat, _fake_concat)
register(
    "mla_kv_concat.out",
    "(Tensor k_nope, Tensor k_pe, *, Tensor(a!) out) -> ()",
    _concat_out,
    _fake_concat_out,
)
register("mla_kv_concat_quant_fp8", f"({_QUANT_ARGUMENTS}) -> (Tensor, Tensor)", _quant_fp8, _fake_quant_fp8)
register(
    "mla_kv_concat_quant_fp8.out",
    f"({_QUANT_ARGUMENTS}, Tensor(a!) k_out, Tensor(b!) v_out) -> ()",
    _quant_fp8_out,
    _fake_quant_fp8_out,
)
