"""What ``mla_kv_concat`` and ``mla_kv_concat_quant_fp8`` must return, to the byte, in plain numpy.

The e4m3 conversion is written out here from the format (one sign, four exponent and three mantissa bits,
bias 7, no infinities) instead of borrowed from torch, whose cast has changed between releases.
"""

from __future__ import annotations

import numpy as np
import torch

E4M3 = torch.float8_e4m3fn

_CODES = np.arange(127)
_EXPONENT, _MANTISSA = _CODES >> 3, _CODES & 7
# Magnitudes of the codes 0x00 to 0x7E; 0x7F is NaN. All of them, and the midpoints, are exact in float32.
MAGNITUDES = np.where(_EXPONENT == 0, _MANTISSA * 2.0**-9, (8 + _MANTISSA) * 2.0 ** (_EXPONENT - 10.0))
_MIDPOINTS = ((MAGNITUDES[:-1] + MAGNITUDES[1:]) / 2).astype(np.float32)


def e4m3_encode(x: np.ndarray) -> np.ndarray:
    """Round float32 to e4m3 bytes: nearest even, saturated to +-448, NaN to 0x7F with its sign."""
    magnitude = np.abs(x)
    code = np.searchsorted(_MIDPOINTS, magnitude)
    is_tie = magnitude == np.append(_MIDPOINTS, np.nan).astype(np.float32)[code]
    code += is_tie & (code % 2 == 1)
    code = np.where(np.isnan(x), 0x7F, code)
    return (code | np.signbit(x) << 7).astype(np.uint8)


def e4m3_decode(codes: np.ndarray) -> np.ndarray:
    """Value of every e4m3 byte as float32, with the sign of zeros and NaNs kept."""
    table = np.append(MAGNITUDES, np.nan).astype(np.float32)
    return np.copysign(table[codes & 0x7F], np.where(codes & 0x80, np.float32(-1), np.float32(1)))


def to_numpy_bits(tensor: torch.Tensor) -> np.ndarray:
    """Bit patterns of a tensor as unsigned integers, on the host."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    bits = tensor.detach().view(integer).cpu().contiguous().numpy()
    return bits.view(f"u{bits.dtype.itemsize}")


def to_float32(tensor: torch.Tensor) -> np.ndarray:
    """Exact float32 values of a bf16, fp16, fp32 or e4m3 tensor; the sign bit of a NaN is kept."""
    bits = to_numpy_bits(tensor)
    if tensor.dtype == torch.bfloat16:
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if tensor.dtype == torch.float16:
        with np.errstate(invalid="ignore"):
            return bits.view(np.float16).astype(np.float32)
    if tensor.dtype == E4M3:
        return e4m3_decode(bits)
    assert tensor.dtype == torch.float32
    return bits.view(np.float32)


def quantize(tensor: torch.Tensor, scale: torch.Tensor | None = None) -> np.ndarray:
    """Bytes of ``e4m3(x / scale)``; without a scale of ``e4m3(x)``.

    A NaN quotient has the sign of x times the sign of the scale, which IEEE 754 leaves open.
    """
    if scale is None:
        return to_numpy_bits(tensor) if tensor.dtype == E4M3 else e4m3_encode(to_float32(tensor))
    x, divisor = to_float32(tensor), to_float32(scale).reshape(())
    with np.errstate(all="ignore"):
        quotient = x / divisor
    codes = e4m3_encode(quotient)
    nan = np.uint8(0x7F) | ((np.signbit(x) ^ np.signbit(divisor)).astype(np.uint8) << 7)
    return np.where(np.isnan(quotient), nan, codes)


def _join_heads(nope: np.ndarray, pe: np.ndarray) -> np.ndarray:
    tokens, heads, _ = nope.shape
    pe = pe.reshape(tokens, 1, pe.shape[-1])
    return np.concatenate([nope, np.broadcast_to(pe, (tokens, heads, pe.shape[-1]))], axis=-1)


def concat(k_nope: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
    """``[k_nope | k_pe]`` on the host, in the dtype of ``k_nope``."""
    joined = _join_heads(to_numpy_bits(k_nope), to_numpy_bits(k_pe))
    return torch.from_numpy(joined.view(f"i{joined.dtype.itemsize}")).view(k_nope.dtype)


def concat_quant_fp8(
    k_nope: torch.Tensor,
    k_pe: torch.Tensor,
    v: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    v_pad_to: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed e4m3 keys and values on the host."""
    pe = to_numpy_bits(k_pe) if k_pe.dtype == E4M3 else quantize(k_pe, k_scale)
    keys = _join_heads(quantize(k_nope, k_scale), pe)
    values = quantize(v, v_scale)
    padding = 0 if v_pad_to is None else v_pad_to - values.shape[-1]
    values = np.pad(values, ((0, 0), (0, 0), (0, padding)))
    return torch.from_numpy(keys).view(E4M3), torch.from_numpy(values).view(E4M3)
