"""Inputs, poisoned outputs and checks of the NVFP4 ops, shared by their tests."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

import vllm_hotpath
from tests.helpers import Output, as_bits, random_patterns
from tests.reference import nvfp4_quant as reference

if TYPE_CHECKING:
    from collections.abc import Iterator

LAYOUTS = ("linear", "swizzled_128x4", "swizzled_8x4")
# Rows on both sides of a tile and of the norm's change of order; widths with and without padding columns.
ROWS = (1, 5, 31, 32, 33, 127, 128, 129)
WIDTHS = (16, 48, 80, 464, 1024)
_TILES = {"linear": (1, 1), "swizzled_128x4": (128, 4), "swizzled_8x4": (8, 4)}


def scale_of(value: float, device: torch.device | str) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float32, device=device)


def values(shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> torch.Tensor:
    """Activations on the CPU whose blocks differ in size; some blocks are zero, subnormal, or hold NaN."""
    x = torch.randn(shape, generator=rng) * torch.exp2(torch.rand((*shape[:-1], 1), generator=rng) * 16 - 8)
    x = x.to(dtype)
    blocks = x.view(-1, reference.BLOCK)
    kind = torch.randint(0, 24, (len(blocks), 1), generator=rng)
    blocks = torch.where(kind == 0, torch.zeros_like(blocks), blocks)
    blocks = torch.where(kind == 1, -torch.zeros_like(blocks), blocks)
    blocks = torch.where(kind == 2, random_patterns(tuple(blocks.shape), dtype, rng), blocks)
    lone = torch.arange(reference.BLOCK) == 5
    return torch.where((kind == 3) & ~lone, torch.zeros_like(blocks), blocks).view(shape)


def placed(x: torch.Tensor, device: torch.device, how: str) -> torch.Tensor:
    """``x`` on the device: ``dense``; ``wide`` rows with 16-byte strides; ``odd`` stride and base."""
    if how == "dense":
        return x.to(device)
    pad, first = {"wide": (64, 8), "odd": (5, 1)}[how]
    row = x.shape[-1] + pad
    storage = torch.full((math.prod(x.shape[:-1]) * row + first,), 77.0, dtype=x.dtype, device=device)
    view = storage[first:].view(*x.shape[:-1], row)[..., : x.shape[-1]]
    as_bits(view).copy_(as_bits(x.to(device)))
    return view


def outputs(rows: tuple[int, ...], width: int, layout: str, device: torch.device) -> tuple[Output, Output]:
    """Poisoned codes and scales for ``rows`` (experts, if any, then rows)."""
    tall, wide = _TILES[layout]
    scales = (math.ceil(rows[-1] / tall) * tall, math.ceil(width / 16 / wide) * wide)
    shapes = (*rows, width // 2), (*rows[:-1], *scales)
    return Output(shapes[0], torch.uint8, device), Output(shapes[1], torch.uint8, device)


def check_quantize(x: torch.Tensor, global_scale: float, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Run ``nvfp4_quantize`` into poisoned outputs and compare with the reference."""
    packed, scales = outputs(tuple(x.shape[:1]), x.shape[1], layout, x.device)
    got = vllm_hotpath.nvfp4_quantize(
        x, scale_of(global_scale, x.device), layout=layout, out=packed.tensor, out_scale=scales.tensor
    )
    packed.assert_guards_intact("out")
    scales.assert_guards_intact("out_scale")
    reference.assert_quantized(got, x, global_scale, layout)
    return got


class Norm:
    """Inputs of ``add_rms_norm_nvfp4`` on a device, and what has to come of them."""

    def __init__(
        self, rows: int, width: int, dtype: torch.dtype, device: torch.device, rng: torch.Generator, how: str
    ) -> None:
        x, residual = (torch.randn(rows, width, generator=rng).mul(s).to(dtype) for s in (2.0, 3.0))
        self.x, self.residual = placed(x, device, how), placed(residual, device, how)
        self.weight = torch.randn(width, generator=rng).to(dtype).to(device)
        self.eps = 1e-6
        self.total, self.norm = reference.add_rms_norm(x, residual, self.weight, self.eps)

    def run(self, global_scale: float, layout: str, **options: Any) -> tuple[torch.Tensor, ...]:
        scale = scale_of(global_scale, self.x.device)
        return vllm_hotpath.add_rms_norm_nvfp4(
            self.x, self.residual, self.weight, self.eps, scale, layout=layout, **options
        )

    def assert_norm(self, norm: torch.Tensor) -> None:
        """The residual is exact, the norm within one rounding of fp64."""
        assert torch.equal(as_bits(self.residual).cpu(), as_bits(self.total))
        error = (norm.detach().cpu().double() - self.norm).abs()
        assert (error <= self.norm.abs() * torch.finfo(norm.dtype).eps * 0.51 + 1e-7).all()


def forms() -> Iterator[tuple[int, int, str]]:
    for index, rows in enumerate(ROWS):
        for width in WIDTHS:
            yield rows, width, ("dense", "wide", "odd")[index % 3]
