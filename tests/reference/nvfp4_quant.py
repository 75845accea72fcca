"""What the NVFP4 ops must return, in numpy, written from the format and the order of the operations.

The reciprocals of the GPU are not restated here: a code is free where the product lies as near to a tie as
the error of two approximate reciprocals reaches. Scales depend on none but that of 6 and are exact.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from tests.reference.mla_kv_pack import e4m3_decode, e4m3_encode, to_float32

BLOCK = 16
# Values of the codes 0 to 7, and the middles between them.
VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_TIES = (VALUES[:-1] + VALUES[1:]) / 2
_RCP_6 = np.float32(1 / 6)
# Of two reciprocals, each off by one unit in the last place, and of two products.
_REACH = 2.0**-21


def e2m1_encode(y: np.ndarray) -> np.ndarray:
    """Round to e2m1 codes: nearest, ties to the even code, saturated to +-6, NaN to code 7."""
    magnitude = np.abs(y)
    code = np.signbit(y).astype(np.uint8) << 3
    for lower, tie in enumerate(_TIES):
        code += magnitude > tie if lower % 2 == 0 else magnitude >= tie
    code[np.isnan(y)] = 7
    return code


def quantize(x: np.ndarray, global_scale: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lowest and highest code of every element, and the scale byte of every block, of float32 rows."""
    # Quiet NaN only: numpy's fmax does not ignore signalling ones.
    quiet = np.where(np.isnan(x), np.float32(np.nan), x)
    blocks = quiet.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    gs = np.float32(global_scale)
    with np.errstate(all="ignore"):
        amax = np.fmax.reduce(np.abs(blocks), axis=-1)
        wanted = gs * (amax * _RCP_6)
        scale = np.where(np.isnan(wanted), 0x7F, e4m3_encode(wanted)).astype(np.uint8)
        stored = e4m3_decode(scale)
        # Subnormal reciprocals are flushed, as are subnormal operands.
        rcp_gs = _flushed(np.float32(1) / _flushed(gs))
        factor = _flushed(np.float32(1) / _flushed(stored * rcp_gs))
        factor = np.where(stored == 0, np.float32(0), factor)[..., None]
        exact = blocks.astype(np.float64) * factor
        reach = np.where(np.isfinite(exact), np.abs(exact) * _REACH, 0.0)
        y = blocks * factor
        low, high = e2m1_encode(exact - reach), e2m1_encode(exact + reach)
        # The sign of a zero, and infinities, are those of the product.
        odd = ~np.isfinite(y) | (y == 0)
        low, high = np.where(odd, e2m1_encode(y), low), np.where(odd, e2m1_encode(y), high)
    return low.reshape(x.shape), high.reshape(x.shape), scale


def _flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def place(scales: np.ndarray, layout: str) -> np.ndarray:
    """The scales [..., rows, cols] in a layout, as bytes of the padded shape; padding is zero."""
    if layout == "linear":
        return scales
    tall = {"swizzled_128x4": 128, "swizzled_8x4": 8}[layout]
    *lead, rows, cols = scales.shape
    shape = (math.ceil(rows / tall) * tall, math.ceil(cols / 4) * 4)
    padded = np.zeros((*lead, *shape), np.uint8)
    padded[..., :rows, :cols] = scales
    tiles = padded.reshape(*lead, shape[0] // tall, tall, shape[1] // 4, 4)
    if tall == 128:
        tiles = tiles.reshape(*lead, shape[0] // tall, 4, 32, shape[1] // 4, 4)
        order = np.moveaxis(tiles, (-5, -2, -3, -4, -1), (-5, -4, -3, -2, -1))
    else:
        order = np.swapaxes(tiles, -3, -2)
    return order.reshape(*lead, *shape)


def assert_quantized(
    got: tuple[torch.Tensor, ...], value: torch.Tensor, global_scale: float, layout: str, what: str = ""
) -> None:
    """Codes and scales of ``got`` are those of ``value``, a 16-bit tensor with rows last but one."""
    low, high, scales = quantize(to_float32(value), global_scale)
    packed = got[0].detach().cpu().numpy()
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(low.shape)
    _assert_none((codes != low) & (codes != high), codes, low, f"{what} code")
    want = place(scales, layout)
    stored = got[1].detach().view(torch.uint8).cpu().numpy()
    assert stored.shape == want.shape, f"{what} scales: shape {stored.shape}, expected {want.shape}"
    _assert_none(stored != want, stored, want, f"{what} scale")


def _assert_none(wrong: np.ndarray, got: np.ndarray, want: np.ndarray, what: str) -> None:
    if wrong.any():
        at = tuple(np.argwhere(wrong)[0].tolist())
        raise AssertionError(
            f"{what}{list(at)}: got {got[at]:#x}, expected {want[at]:#x} ({wrong.sum()} of {got.size} differ)"
        )


def _rounded(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return to_float32(torch.from_numpy(np.ascontiguousarray(x, np.float32)).to(dtype))


def silu_is_plain(gate: torch.Tensor) -> torch.Tensor:
    """Where the error of an fp32 silu cannot change its rounding to the dtype of ``gate``."""
    with np.errstate(all="ignore"):
        x = to_float32(gate).astype(np.float64)
        y = x / (1 + np.exp(-x))
        low, high = (_rounded(y * (1 + sign * 2.0**-20), gate.dtype) for sign in (-1, 1))
    return torch.from_numpy((low == high) & (np.abs(x) < 80))


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``, each rounded to the dtype, where :func:`silu_is_plain`."""
    half = gate_up.shape[-1] // 2
    with np.errstate(all="ignore"):
        x = to_float32(gate_up).astype(np.float64)
        activated = _rounded(x[..., :half] / (1 + np.exp(-x[..., :half])), gate_up.dtype)
        product = activated * to_float32(gate_up)[..., half:]
    return torch.from_numpy(product).to(gate_up.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new residual, exact, and the norm in fp64, on the host."""
    total = (x.detach().cpu().float() + residual.detach().cpu().float()).to(x.dtype)
    wide = total.double()
    rms = torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return total, wide / rms * weight.detach().cpu().double()
