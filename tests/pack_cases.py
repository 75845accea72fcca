"""Inputs of ``mla_kv_pack`` calls in every layout callers use, and checked calls of both ops."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import vllm_hotpath
from tests.helpers import E4M3, Output, as_bits, assert_same_bits, random_values, strided
from tests.reference import mla_kv_pack as reference

if TYPE_CHECKING:
    from collections.abc import Iterable

WIDTHS = ((128, 64, 128), (8, 0, 8), (8, 8, 16), (192, 64, 128), (64, 32, 64), (128, 64, 192), (136, 8, 24))
HEADS = (1, 3, 6, 8, 12, 16, 96, 128)
TOKENS = (0, 1, 2, 3, 13, 137)

# Layout of a [T, H, W] input: name -> (token stride, head stride, offset) in elements.
_HEAD_LAYOUTS = {
    "contiguous": lambda t, h, w: (h * w, w, 0),
    "first half of kv": lambda t, h, w: (2 * h * w, 2 * w, 0),
    "second half of kv": lambda t, h, w: (2 * h * w, 2 * w, w),
    "padded heads": lambda t, h, w: (h * (w + 64), w + 64, 0),
    "slice of a wide projection": lambda t, h, w: (4 * h * w + w + h, w, h),
    "odd strides": lambda t, h, w: (h * (w + 1) + 1, w + 1, 0),
    "odd base": lambda t, h, w: (h * w, w, 1),
    "odd base and strides": lambda t, h, w: (h * (w + 3) + 5, w + 3, 3),
    "4-byte aligned": lambda t, h, w: (h * (w + 2), w + 2, 2),
    "8-byte aligned": lambda t, h, w: (h * (w + 4), w + 4, 4),
    "heads outside tokens": lambda t, h, w: (w, t * w, 0),
    "one head for all": lambda t, h, w: (w, 0, 0),
    "one token for all": lambda t, h, w: (0, w, 0),
    "one row for all": lambda t, h, w: (0, 0, 0),
    "overlapping rows": lambda t, h, w: (8, 1, 0),
}
HEAD_LAYOUTS = tuple(_HEAD_LAYOUTS)

# Layout of a [T, W] input: name -> (token stride, offset).
_ROW_LAYOUTS = {
    "contiguous": lambda w: (w, 0),
    "tail of the latent row": lambda w: (512 + w, 512),
    "odd stride": lambda w: (w + 1, 0),
    "odd base": lambda w: (w, 1),
    "odd base and stride": lambda w: (w + 5, 7),
    "one row for all": lambda w: (0, 0),
}
ROW_LAYOUTS = tuple(_ROW_LAYOUTS)


def make_heads(
    layout: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    rng: torch.Generator,
) -> torch.Tensor:
    """Random ``[T, H, W]`` input in a named layout."""
    token, head, offset = _HEAD_LAYOUTS[layout](*shape)
    return strided(shape, (token, head, 1), dtype, device, rng, offset=offset)


def make_rows(
    layout: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    rng: torch.Generator,
    *,
    three_dims: bool = False,
) -> torch.Tensor:
    """Random ``[T, W]`` (or ``[T, 1, W]``) input in a named layout."""
    token, offset = _ROW_LAYOUTS[layout](shape[1])
    rows = strided(shape, (token, 1), dtype, device, rng, offset=offset)
    return rows.unsqueeze(1) if three_dims else rows


def make_inputs(
    tokens: int,
    heads: int,
    widths: tuple[int, int, int],
    device: torch.device,
    rng: torch.Generator,
    *,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype] = (torch.bfloat16,) * 3,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random contiguous k_nope, k_pe and v."""
    p, r, v = widths
    shapes = ((tokens, heads, p), (tokens, r), (tokens, heads, v))
    inputs = [
        random_values(shape, dtype, rng).to(device) for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    return inputs[0], inputs[1], inputs[2]


def make_scale(value: float, device: torch.device, shape: tuple[int, ...] = ()) -> torch.Tensor:
    return torch.full(shape, value, dtype=torch.float32).to(device)


def _snapshot(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [as_bits(tensor).clone() for tensor in tensors]


def check_concat(k_nope: torch.Tensor, k_pe: torch.Tensor, *, allocate: bool = False) -> torch.Tensor:
    """Call ``mla_kv_concat`` and compare every byte of the result, the guards and the inputs."""
    want = reference.concat(k_nope, k_pe)
    before = _snapshot((k_nope, k_pe))
    if allocate:
        got = vllm_hotpath.mla_kv_concat(k_nope, k_pe)
    else:
        out = Output(tuple(want.shape), k_nope.dtype, k_nope.device)
        got = vllm_hotpath.mla_kv_concat(k_nope, k_pe, out=out.tensor)
        assert got is out.tensor
        out.assert_guards_intact("out")
    assert got.device == k_nope.device
    assert got.is_contiguous()
    assert_same_bits(got, want, "out")
    for tensor, bits in zip((k_nope, k_pe), before, strict=True):
        assert_same_bits(as_bits(tensor), bits, "input")
    return got


def check_quant(
    k_nope: torch.Tensor,
    k_pe: torch.Tensor,
    v: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    v_pad_to: int | None = None,
    allocate: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call ``mla_kv_concat_quant_fp8`` and compare every byte of both results, the guards and the inputs."""
    wants = reference.concat_quant_fp8(k_nope, k_pe, v, k_scale=k_scale, v_scale=v_scale, v_pad_to=v_pad_to)
    inputs = [tensor for tensor in (k_nope, k_pe, v, k_scale, v_scale) if tensor is not None]
    before = _snapshot(inputs)
    if allocate:
        got = vllm_hotpath.mla_kv_concat_quant_fp8(
            k_nope, k_pe, v, k_scale=k_scale, v_scale=v_scale, v_pad_to=v_pad_to
        )
    else:
        outputs = [Output(tuple(want.shape), E4M3, k_nope.device) for want in wants]
        got = vllm_hotpath.mla_kv_concat_quant_fp8(
            k_nope,
            k_pe,
            v,
            k_scale=k_scale,
            v_scale=v_scale,
            k_out=outputs[0].tensor,
            v_out=outputs[1].tensor,
            v_pad_to=v_pad_to,
        )
        for result, output, name in zip(got, outputs, ("k_out", "v_out"), strict=True):
            assert result is output.tensor
            output.assert_guards_intact(name)
    for result, want, name in zip(got, wants, ("k_out", "v_out"), strict=True):
        assert result.device == k_nope.device
        assert result.is_contiguous()
        assert_same_bits(result, want, name)
    for tensor, bits in zip(inputs, before, strict=True):
        assert_same_bits(as_bits(tensor), bits, "input")
    return got[0], got[1]
