"""The NVFP4 ops against the reference, on CPU and GPU: every code, every scale, every byte of padding."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st

import vllm_hotpath
from tests.helpers import BF16, FP16, POISON, SEED, Output, as_bits, assert_same_bits, every_pattern
from tests.nvfp4_cases import (
    LAYOUTS,
    Norm,
    check_quantize,
    forms,
    outputs,
    placed,
    scale_of,
    values,
)
from tests.reference import nvfp4_quant as reference
from vllm_hotpath import _core

DTYPES = (BF16, FP16)
_SCALES = (1.0, 2.0**-9, 448 * 6 / 3.7, 0.02, 1e4, 3e38, 1e-38, 1e-40, 0.0, -1.5, float("inf"), float("nan"))


def test_reciprocals_are_those_of_the_gpu() -> None:
    """The digest is of ``rcp.approx.ftz.f32`` on an H200, for all mantissas."""
    digest = hashlib.sha256(_core.approximate_reciprocals()).hexdigest()
    assert digest == "c408381446132e07fa5581e930dc33fb790bea7ec4276ef3621e322df2492a55"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", _SCALES, ids=str)
def test_every_bit_pattern_is_quantised(scale: float, dtype: torch.dtype, device: torch.device) -> None:
    check_quantize(every_pattern(dtype, (64, 1024), device), scale, "linear")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("amax", [1.0, 5.0, 6.0, 0.0117, 300.0], ids=str)
def test_every_finite_pattern_beside_a_larger_one_is_rounded(
    amax: float, dtype: torch.dtype, device: torch.device
) -> None:
    """Each element stands in a block whose scale another element decides."""
    x = every_pattern(dtype, (65536, 1), device).cpu()
    x = torch.where(x.abs() <= amax, x, 0.0).expand(65536, 16).clone()
    x[:, 7] = amax
    for scale in (1.0, 37.0):
        check_quantize(x.to(device), scale, "linear")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_widths_strides_and_padding(
    dtype: torch.dtype, layout: str, device: torch.device, rng: torch.Generator
) -> None:
    for rows, width, how in forms():
        x = placed(values((rows, width), dtype, rng), device, how)
        check_quantize(x, 448 * 6 / 5, layout)


@pytest.mark.parametrize("width", [5472, 7152, 7168, 14336])
def test_widths_of_models(width: int, device: torch.device, rng: torch.Generator) -> None:
    for layout, rows in itertools.product(LAYOUTS, (1, 19)):
        check_quantize(values((rows, width), BF16, rng).to(device), 100.0, layout)


def test_padding_bytes_of_a_known_8x4_matrix(device: torch.device) -> None:
    """5 rows of 5 scales lie in 64 bytes, 39 of which are padding."""
    packed, scales = outputs((5,), 80, "swizzled_8x4", device)
    x = torch.ones(5, 80, dtype=BF16, device=device)
    vllm_hotpath.nvfp4_quantize(
        x, scale_of(6.0, device), layout="swizzled_8x4", out=packed.tensor, out_scale=scales.tensor
    )
    flat = scales.tensor.flatten().cpu()
    live = [col // 4 * 32 + row * 4 + col % 4 for row in range(5) for col in range(5)]
    assert flat[live].tolist() == [0x38] * 25
    flat[live] = 0
    assert flat.tolist() == [0] * 64


@pytest.mark.parametrize(("rows", "width"), [(5, 7168), (128, 464), (5, 464), (128, 7168)])
def test_padding_rows_and_columns_of_128x4(
    rows: int, width: int, device: torch.device, rng: torch.Generator
) -> None:
    check_quantize(values((rows, width), BF16, rng).to(device), 30.0, "swizzled_128x4")


@pytest.mark.parametrize(
    ("block", "scale", "byte", "codes"),
    [
        ([0.0] * 16, 0.02, 0x00, [0x00] * 8),
        ([-0.0] * 16, 1.0, 0x00, [0x88] * 8),
        ([6.0, -6.0] * 8, 1.0, 0x38, [0xF7] * 8),
        ([float("inf")] + [1.0] * 15, 1.0, 0x7E, None),
        ([float("nan")] * 2 + [6.0] * 14, 1.0, 0x38, [0x77] * 8),
        ([float("nan")] * 16, 1.0, 0x7F, [0x77] * 8),
        ([-1e-5] * 16, 1.0, 0x00, [0x88] * 8),
    ],
)
def test_known_blocks(
    block: list[float], scale: float, byte: int, codes: list[int] | None, device: torch.device
) -> None:
    x = torch.tensor([block], dtype=BF16, device=device)
    packed, scales = vllm_hotpath.nvfp4_quantize(x, scale_of(scale, device))
    assert scales.tolist() == [[byte]]
    assert codes is None or packed.tolist() == [codes]


def test_no_rows(device: torch.device) -> None:
    x = torch.empty(0, 7168, dtype=BF16, device=device)
    for layout in LAYOUTS:
        packed, scales = vllm_hotpath.nvfp4_quantize(x, scale_of(1.0, device), layout=layout)
        assert packed.shape == (0, 3584)
        assert scales.shape == (0, 448)
    gate_up = torch.empty(2, 0, 64, dtype=BF16, device=device)
    assert vllm_hotpath.silu_mul_nvfp4(gate_up, scale_of(1.0, device))[0].shape == (2, 0, 16)


def test_float8_scales_are_written_as_uint8(device: torch.device, rng: torch.Generator) -> None:
    x = values((3, 64), BF16, rng).to(device)
    out_scale = torch.zeros(3, 4, dtype=torch.float8_e4m3fn, device=device)
    packed, scales = vllm_hotpath.nvfp4_quantize(x, scale_of(2.0, device), out_scale=out_scale)
    assert scales is out_scale
    reference.assert_quantized((packed, scales), x, 2.0, "linear")


@seed(SEED)
@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(0, 140),
    blocks=st.integers(1, 40),
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from(DTYPES),
    scale=st.floats(width=32),
    how=st.sampled_from(("dense", "wide", "odd")),
    draw=st.integers(0, 2**31),
)
def test_any_shape_and_scale(
    rows: int, blocks: int, layout: str, dtype: torch.dtype, scale: float, how: str, draw: int
) -> None:
    rng = torch.Generator().manual_seed(draw)
    x = values((rows, blocks * 16), dtype, rng)
    check_quantize(placed(x, torch.device("cpu"), how), scale, layout)


# ---- SiLU and multiply ----


def _gate_up(shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> torch.Tensor:
    x = values(shape, dtype, rng)
    half = shape[-1] // 2
    x[..., :half][~reference.silu_is_plain(x[..., :half])] = 1.0
    return x


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_mul(dtype: torch.dtype, layout: str, device: torch.device, rng: torch.Generator) -> None:
    for rows, width, how in forms():
        x = _gate_up((rows, 2 * width), dtype, rng)
        packed, scales = outputs((rows,), width, layout, device)
        got = vllm_hotpath.silu_mul_nvfp4(
            placed(x, device, how),
            scale_of(20.0, device),
            layout=layout,
            out=packed.tensor,
            out_scale=scales.tensor,
        )
        packed.assert_guards_intact("out")
        scales.assert_guards_intact("out_scale")
        reference.assert_quantized(got, reference.silu_mul(x), 20.0, layout, f"M={rows} K={width} {how}")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("per_expert", [False, True])
def test_rows_past_an_experts_count_stay_as_they_are(
    per_expert: bool, layout: str, device: torch.device, rng: torch.Generator
) -> None:
    experts, rows, width = 5, 37, 80
    counts = [0, 1, 37, 12, 1000]
    x = _gate_up((experts, rows, 2 * width), BF16, rng)
    scales = [3.0 * (i + 1 if per_expert else 1) for i in range(experts)]
    packed, stored = outputs((experts, rows), width, layout, device)
    vllm_hotpath.silu_mul_nvfp4(
        placed(x, device, "wide"),
        torch.tensor(scales if per_expert else scales[:1], device=device),
        layout=layout,
        mask_m=torch.tensor(counts, dtype=torch.int32, device=device),
        out=packed.tensor,
        out_scale=stored.tensor,
    )
    packed.assert_guards_intact("out")
    stored.assert_guards_intact("out_scale")
    for expert, count in enumerate(counts):
        live = min(count, rows)
        assert (packed.tensor[expert, live:] == POISON).all()
        if live:
            want = reference.silu_mul(x[expert, :live])
            codes = (
                packed.tensor[expert, :live],
                torch.from_numpy(reference.quantize(want.float().numpy(), scales[expert])[2]),
            )
            reference.assert_quantized(codes, want, scales[expert], "linear", f"expert {expert}")
        full = torch.full((rows, width // 16), POISON, dtype=torch.uint8)
        if live:
            full[:live] = codes[1]
        placed_scales = reference.place(full.numpy(), layout)
        got = stored.tensor[expert].cpu().numpy().copy()
        if layout != "linear":
            # Padding columns of the rows past the count are theirs.
            marks = np.zeros((rows, -(-width // 64) * 4), np.uint8)
            marks[live:, width // 16 :] = 1
            padding = reference.place(marks, layout) == 1
            assert (got[padding] == POISON).all()
            got[padding] = 0
        assert (got == placed_scales).all(), f"expert {expert}"


# ---- Add and RMSNorm ----


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm(dtype: torch.dtype, layout: str, device: torch.device, rng: torch.Generator) -> None:
    shapes = [*forms(), (300, 464, "dense"), (257, 1024, "odd"), (3, 8208, "dense"), (256, 8208, "wide")]
    for rows, width, how in shapes:
        call = Norm(rows, width, dtype, device, rng, how)
        norm = Output((rows, width), dtype, device)
        (packed, scales), (more, more_scales) = (
            outputs((rows,), width, chosen, device) for chosen in (layout, "swizzled_8x4")
        )
        got = call.run(
            50.0,
            layout,
            out_norm=norm.tensor,
            second_scale=scale_of(7.0, device),
            second_layout="swizzled_8x4",
            out=packed.tensor,
            out_scale=scales.tensor,
            second_out=more.tensor,
            second_out_scale=more_scales.tensor,
        )
        for output in (packed, scales, more, more_scales, norm):
            output.assert_guards_intact()
        call.assert_norm(norm.tensor)
        what = f"M={rows} K={width} {how}"
        reference.assert_quantized(got[:2], norm.tensor, 50.0, layout, what)
        reference.assert_quantized(got[2:], norm.tensor, 7.0, "swizzled_8x4", what)


def test_the_norm_may_replace_x(device: torch.device, rng: torch.Generator) -> None:
    for rows, how in itertools.product((3, 300), ("dense", "odd")):
        call = Norm(rows, 464, BF16, device, rng, how)
        call.run(9.0, "linear", out_norm=call.x)
        call.assert_norm(call.x)


def test_the_fp4_of_the_norm_does_not_depend_on_the_other_outputs(
    device: torch.device, rng: torch.Generator
) -> None:
    state = rng.get_state()
    results = []
    norm = torch.empty(9, 1024, dtype=BF16, device=device)
    for options in ({}, {"second_scale": scale_of(3.0, device)}, {"out_norm": norm}):
        rng.set_state(state)
        results.append(Norm(9, 1024, BF16, device, rng, "dense").run(9.0, "linear", **options)[:2])
    for got in results[1:]:
        assert_same_bits(got[0], results[0][0])
        assert_same_bits(got[1], results[0][1])


def test_rows_of_the_norm_do_not_depend_on_each_other(device: torch.device, rng: torch.Generator) -> None:
    call = Norm(40, 1024, BF16, device, rng, "dense")
    one = Norm(1, 1024, BF16, device, rng, "dense")
    one.x, one.residual, one.weight = call.x[17:18].clone(), call.residual[17:18].clone(), call.weight
    assert_same_bits(one.run(9.0, "linear")[0], call.run(9.0, "linear")[0][17:18])


def test_inputs_are_left_alone(device: torch.device, rng: torch.Generator) -> None:
    call = Norm(5, 80, BF16, device, rng, "dense")
    before = [tensor.clone() for tensor in (call.x, call.weight)]
    call.run(4.0, "linear")
    vllm_hotpath.nvfp4_quantize(call.x, scale_of(3.0, device))
    for tensor, old in zip((call.x, call.weight), before, strict=True):
        assert torch.equal(as_bits(tensor), as_bits(old))
