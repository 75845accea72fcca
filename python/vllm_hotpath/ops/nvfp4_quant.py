"""Activations in NVFP4, alone and fused with what stands before the quantisation.

The public functions and their torch ops. Checks and kernels live in ``src/ops/nvfp4_quant``; the numerics
and the layouts of the scales are described in ``docs/kernels/nvfp4_quant.md``.
"""

from __future__ import annotations

from typing import Literal

import torch

from vllm_hotpath import _core
from vllm_hotpath.ops import allocate, plain, register, through_dispatcher

ScaleLayout = Literal["linear", "swizzled_128x4", "swizzled_8x4"]

_BLOCK = 16
_TILES = {"linear": (1, 1), "swizzled_128x4": (128, 4), "swizzled_8x4": (8, 4)}


def nvfp4_quantize(
    x: torch.Tensor,
    global_scale: torch.Tensor,
    *,
    layout: ScaleLayout = "linear",
    out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows to NVFP4: e2m1 codes, and an e4m3 scale for every 16 elements.

    Codes and scales are computed in the order of operations of vLLM's ``scaled_fp4_quant``; its kernel needs
    Blackwell, where the two have not been compared. One launch defines every byte of both outputs, the
    padding of a swizzled layout included, which is zero.

    Args:
        x: ``[M, K]``, bf16 or fp16. Row stride and base free, element stride 1. ``K`` is a multiple of 16.
        global_scale: fp32 tensor of one element on the device of ``x``: what the amax of the scales is
            multiplied by, ``448 * 6 / amax`` of the calibration.
        layout: of the scales. ``"linear"``: ``[M, K/16]``. ``"swizzled_128x4"``, ``"swizzled_8x4"``: tiles of
            128 or 8 rows by 4 scales; rows and columns are padded to whole tiles.
        out: contiguous uint8 ``[M, K/2]``, base aligned to 8 bytes, apart from the inputs. The even element
            is in the low nibble. None allocates it.
        out_scale: contiguous uint8 or float8_e4m3fn of the layout's padded shape, for a swizzled layout
            aligned to 16 bytes. None allocates uint8.

    Returns:
        ``(out, out_scale)``. Without rows nothing is launched.

    Raises:
        TypeError: a dtype that is not supported.
        ValueError: a shape, stride, alignment, device, layout or overlap that is not supported.
        RuntimeError: CUDA refused the launch, or this build has no kernel for the GPU.
    """
    if through_dispatcher(x, global_scale, out, out_scale):
        out, out_scale = make_outputs(
            "nvfp4_quantize", {"x": x}, x.shape[-1], {"layout": layout}, out, out_scale
        )
        torch.ops.vllm_hotpath.nvfp4_quantize(x, global_scale, layout, out, out_scale)
        return out, out_scale
    return _core.nvfp4_quantize(x, global_scale, layout, out, out_scale, allocate)


def silu_mul_nvfp4(
    gate_up: torch.Tensor,
    global_scale: torch.Tensor,
    *,
    layout: ScaleLayout = "linear",
    mask_m: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise ``silu(gate) * up`` to NVFP4 in one launch.

    ``silu(gate)`` is rounded to the dtype of ``gate_up`` before the product, and the product too, as in
    vLLM's ``silu_and_mul``; the rest is :func:`nvfp4_quantize` of that.

    Args:
        gate_up: ``[M, 2K]`` or, by expert, ``[E, M, 2K]``: gate, then up. bf16 or fp16; the strides of
            experts and rows and the base are free, element stride 1. ``K`` is a multiple of 16.
        global_scale: fp32 of one element, or of one for each expert.
        layout: as in :func:`nvfp4_quantize`, for each expert on its own.
        mask_m: int32 ``[E]``, the rows of each expert that count, from 0 to ``M`` (larger numbers mean all).
            Codes and scales of the rows past them stay as they are; padding beyond ``M`` is zeroed.
        out: uint8 ``[(E,) M, K/2]``, as in :func:`nvfp4_quantize`.
        out_scale: of the layout's padded shape, with ``E`` in front by expert.

    Returns:
        ``(out, out_scale)``.

    Raises:
        TypeError: a dtype that is not supported.
        ValueError: a shape, stride, alignment, device, layout or overlap that is not supported.
        RuntimeError: CUDA refused the launch, or this build has no kernel for the GPU.
    """
    if through_dispatcher(gate_up, global_scale, mask_m, out, out_scale):
        out, out_scale = make_outputs(
            "silu_mul_nvfp4",
            {"gate_up": gate_up},
            gate_up.shape[-1] // 2,
            {"layout": layout},
            out,
            out_scale,
        )
        torch.ops.vllm_hotpath.silu_mul_nvfp4(gate_up, global_scale, layout, mask_m, out, out_scale)
        return out, out_scale
    return _core.silu_mul_nvfp4(gate_up, global_scale, layout, mask_m, out, out_scale, allocate)


def add_rms_norm_nvfp4(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    global_scale: torch.Tensor,
    *,
    layout: ScaleLayout = "linear",
    out_norm: torch.Tensor | None = None,
    second_scale: torch.Tensor | None = None,
    second_layout: ScaleLayout = "linear",
    out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    second_out: torch.Tensor | None = None,
    second_out_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Add, RMSNorm and NVFP4 in one launch: ``residual += x``, then ``norm(residual) * weight`` quantised.

    The normalised value, rounded to the dtype of ``x``, equals that of vLLM's ``fused_add_rms_norm`` bit for
    bit, whose order of summation depends on whether there are 256 rows or more.

    Args:
        x: ``[M, K]``, bf16 or fp16. Row stride and base free, element stride 1. ``K`` is a multiple of 16.
        residual: ``[M, K]`` like ``x``, updated in place. Its rows may not overlap.
        weight: ``[K]``, dtype of ``x``.
        eps: added to the mean of the squares.
        global_scale: fp32 of one element, as in :func:`nvfp4_quantize`.
        layout: of the scales.
        out_norm: ``[M, K]`` like ``x``, gets the normalised value if given. It may be ``x`` itself.
        second_scale: another global scale; with it the same value is quantised a second time, for a consumer
            such as the shared experts.
        second_layout: of the scales of the second quantisation.
        out: as in :func:`nvfp4_quantize`, and so ``out_scale``.
        out_scale: see ``out``.
        second_out: the outputs of the second quantisation, only with ``second_scale``.
        second_out_scale: see ``second_out``.

    Returns:
        ``(out, out_scale)``, with ``second_scale`` ``(out, out_scale, second_out, second_out_scale)``.

    Raises:
        TypeError: a dtype that is not supported.
        ValueError: a shape, stride, alignment, device, layout or overlap that is not supported.
        RuntimeError: CUDA refused the launch, or this build has no kernel for the GPU.
    """
    tensors = (x, residual, weight, global_scale, out_norm, second_scale)
    if through_dispatcher(*tensors, out, out_scale, second_out, second_out_scale):
        op, width = "add_rms_norm_nvfp4", x.shape[-1]
        out, out_scale = make_outputs(op, {"x": x}, width, {"layout": layout}, out, out_scale)
        if second_scale is not None:
            second_out, second_out_scale = make_outputs(
                op, {"x": x}, width, {"second_layout": second_layout}, second_out, second_out_scale
            )
        torch.ops.vllm_hotpath.add_rms_norm_nvfp4(
            x,
            residual,
            weight,
            eps,
            global_scale,
            layout,
            out,
            out_scale,
            out_norm,
            second_scale,
            second_layout,
            second_out,
            second_out_scale,
        )
        if second_out is None or second_out_scale is None:
            return out, out_scale
        return out, out_scale, second_out, second_out_scale
    return _core.add_rms_norm_nvfp4(
        x,
        residual,
        weight,
        eps,
        global_scale,
        layout,
        out,
        out_scale,
        out_norm,
        second_scale,
        second_layout,
        second_out,
        second_out_scale,
        allocate,
    )


# ---- The torch ops, for torch.compile and for tensors that handle dispatch themselves ----


def make_outputs(
    op: str,
    source: dict[str, torch.Tensor],
    width: int,
    layout: dict[str, ScaleLayout],
    out: torch.Tensor | None,
    out_scale: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The given outputs, or new ones for rows of ``width`` elements of ``source``.

    ``source`` and ``layout`` come under their names as arguments of ``op``, for the messages.
    """
    ((source_name, x),), ((layout_name, tiling),) = source.items(), layout.items()
    if x.dim() < 2:
        raise ValueError(f"{op}: {source_name}: expected rows of elements, got shape {list(x.shape)}")
    if tiling not in _TILES:
        raise ValueError(f"{op}: {layout_name}: expected one of {', '.join(_TILES)}, got {tiling!r}")
    *experts, rows, _ = x.shape
    tall, wide = _TILES[tiling]
    if out is None:
        out = x.new_empty((*experts, rows, width // 2), dtype=torch.uint8)
    if out_scale is None:
        scale_rows, scale_cols = -(-rows // tall) * tall, -(-(width // _BLOCK) // wide) * wide
        out_scale = x.new_empty((*experts, scale_rows, scale_cols), dtype=torch.uint8)
    return out, out_scale


def _quantize(
    x: torch.Tensor, global_scale: torch.Tensor, layout: str, out: torch.Tensor, out_scale: torch.Tensor
) -> None:
    _core.nvfp4_quantize(plain(x), plain(global_scale), layout, plain(out), plain(out_scale), allocate)


def _silu_mul(
    gate_up: torch.Tensor,
    global_scale: torch.Tensor,
    layout: str,
    mask_m: torch.Tensor | None,
    out: torch.Tensor,
    out_scale: torch.Tensor,
) -> None:
    scale, outputs = plain(global_scale), (plain(out), plain(out_scale))
    _core.silu_mul_nvfp4(plain(gate_up), scale, layout, plain(mask_m), *outputs, allocate)


def _add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    global_scale: torch.Tensor,
    layout: str,
    out: torch.Tensor,
    out_scale: torch.Tensor,
    out_norm: torch.Tensor | None,
    second_scale: torch.Tensor | None,
    second_layout: str,
    second_out: torch.Tensor | None,
    second_out_scale: torch.Tensor | None,
) -> None:
    _core.add_rms_norm_nvfp4(
        plain(x),
        plain(residual),
        plain(weight),
        eps,
        plain(global_scale),
        layout,
        plain(out),
        plain(out_scale),
        plain(out_norm),
        plain(second_scale),
        second_layout,
        plain(second_out),
        plain(second_out_scale),
        allocate,
    )


def _fake(*_: object) -> None:
    pass


_OUTPUTS = "Tensor(a!) out, Tensor(b!) out_scale"

register(
    "nvfp4_quantize",
    f"(Tensor x, Tensor global_scale, str layout, {_OUTPUTS}) -> ()",
    _quantize,
    _fake,
)
register(
    "silu_mul_nvfp4",
    f"(Tensor gate_up, Tensor global_scale, str layout, Tensor? mask_m, {_OUTPUTS}) -> ()",
    _silu_mul,
    _fake,
)
register(
    "add_rms_norm_nvfp4",
    f"(Tensor x, Tensor(c!) residual, Tensor weight, float eps, Tensor global_scale, str layout, {_OUTPUTS}, "
    "Tensor(d!)? out_norm, Tensor? second_scale, str second_layout, Tensor(e!)? second_out, "
    "Tensor(f!)? second_out_scale) -> ()",
    _add_rms_norm,
    _fake,
)
