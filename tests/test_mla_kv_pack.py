"""``mla_kv_concat`` and ``mla_kv_concat_quant_fp8`` against the reference, byte for byte, on CPU and GPU."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st

import vllm_hotpath
from tests.helpers import (
    BF16,
    DTYPES,
    E4M3,
    FP16,
    SEED,
    Output,
    as_bits,
    assert_same_bits,
    every_pattern,
    random_patterns,
    random_values,
)
from tests.pack_cases import (
    HEAD_LAYOUTS,
    HEADS,
    ROW_LAYOUTS,
    TOKENS,
    WIDTHS,
    check_concat,
    check_quant,
    make_heads,
    make_inputs,
    make_rows,
    make_scale,
)

_FLOAT32_MAX = torch.finfo(torch.float32).max
_SCALES = (
    *(1.0, 2.0, 0.5, 2.0**-10, 2.0**10, 2.0**-126, 2.0**127, _FLOAT32_MAX),
    *(1 / 3, 0.1, 1.7, 3e-5, 448.0, 0.0123456, 7.7777),
    *(1e-40, 1.4e-45, 1.1e-38),
    *(0.0, -0.0, math.inf, -math.inf, math.nan, -1.0, -0.3),
)


def _every_pattern_three_ways(
    dtype: torch.dtype, device: torch.device, widths: tuple[int, int, int] = (128, 64, 128)
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    p, r, v = widths
    return (
        every_pattern(dtype, (1024, 1, p), device),
        every_pattern(dtype, (1024, r), device),
        every_pattern(dtype, (1024, 1, v), device),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("widths", [(128, 64, 128), (64, 128, 64)], ids=str)
def test_every_bit_pattern_is_cast_with_saturation(
    widths: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    check_quant(*_every_pattern_three_ways(dtype, device, widths))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", _SCALES, ids=str)
def test_every_bit_pattern_is_divided_in_fp32_then_cast(
    scale: float, dtype: torch.dtype, device: torch.device
) -> None:
    scales = make_scale(scale, device), make_scale(scale, device, (1,))
    check_quant(*_every_pattern_three_ways(dtype, device), k_scale=scales[0], v_scale=scales[1])


def test_random_scale_bit_patterns(device: torch.device, rng: torch.Generator) -> None:
    for dtype, widths in itertools.product(DTYPES, ((128, 64, 128), (64, 128, 64))):
        inputs = _every_pattern_three_ways(dtype, device, widths)
        for _ in range(3):
            k_scale, v_scale = random_patterns((2, 1), torch.float32, rng).to(device)
            check_quant(*inputs, k_scale=k_scale, v_scale=v_scale)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_finite_values_in_range_equal_torchs_cast(dtype: torch.dtype, device: torch.device) -> None:
    x = every_pattern(dtype, (64, 8, 128), device)
    x = torch.where(x.abs() <= 448, x, 1.5)
    _, got = vllm_hotpath.mla_kv_concat_quant_fp8(x, x[:, 0, :0], x)
    assert_same_bits(got, x.to(E4M3), "v_out")


@pytest.mark.parametrize(
    ("value", "scale", "byte"),
    [(4.0, 2.0, 0x40), (1000.0, 2.0, 0x7E), (-1000.0, 2.0, 0xFE), (0.05, None, 0x15), (-0.0, None, 0x80)],
)
def test_known_bytes(value: float, scale: float | None, byte: int, device: torch.device) -> None:
    x = torch.full((1, 1, 8), value, dtype=BF16, device=device)
    scale_tensor = None if scale is None else make_scale(scale, device)
    k, v = vllm_hotpath.mla_kv_concat_quant_fp8(x, x[:, 0], x, k_scale=scale_tensor, v_scale=scale_tensor)
    assert as_bits(k).unique().tolist() == [byte]
    assert as_bits(v).unique().tolist() == [byte]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_concat_keeps_every_bit_pattern(dtype: torch.dtype, device: torch.device) -> None:
    k_nope, k_pe, _ = _every_pattern_three_ways(dtype, device)
    check_concat(k_nope, k_pe)


@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, repeat=3)), ids=str)
def test_input_dtypes_mix(
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype], device: torch.device, rng: torch.Generator
) -> None:
    inputs = make_inputs(13, 3, (128, 64, 128), device, rng, dtypes=dtypes)
    check_quant(*inputs)
    check_quant(*inputs, k_scale=make_scale(0.37, device))
    check_quant(*inputs, v_scale=make_scale(0.37, device))


def test_scaled_fp8_k_pe_passes_through(device: torch.device, rng: torch.Generator) -> None:
    k_nope, _, v = make_inputs(256, 2, (128, 64, 128), device, rng)
    k_pe = every_pattern(E4M3, (256, 64), device)
    k, _ = check_quant(k_nope, k_pe, v, k_scale=make_scale(3.0, device))
    assert_same_bits(k[:, 1, 128:], k_pe, "rotary part of k_out")


def test_each_scale_is_used_for_its_own_output(device: torch.device, rng: torch.Generator) -> None:
    inputs = make_inputs(5, 3, (128, 64, 128), device, rng)
    unscaled = check_quant(*inputs)
    k_scaled = check_quant(*inputs, k_scale=make_scale(0.5, device))
    v_scaled = check_quant(*inputs, v_scale=make_scale(0.5, device))
    assert_same_bits(k_scaled[1], unscaled[1], "v_out with k_scale")
    assert_same_bits(v_scaled[0], unscaled[0], "k_out with v_scale")
    assert not torch.equal(as_bits(k_scaled[0]), as_bits(unscaled[0]))
    assert not torch.equal(as_bits(v_scaled[1]), as_bits(unscaled[1]))


@pytest.mark.parametrize("heads", HEADS)
def test_every_token_and_head_count(heads: int, device: torch.device, rng: torch.Generator) -> None:
    for tokens in TOKENS:
        inputs = make_inputs(tokens, heads, (128, 64, 128), device, rng)
        check_quant(*inputs, allocate=True)
        check_quant(*inputs, k_scale=make_scale(0.21, device), v_scale=make_scale(1.3, device))
        check_concat(*inputs[:2], allocate=True)
        check_concat(*inputs[:2])


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_width(
    widths: tuple[int, int, int], dtype: torch.dtype, device: torch.device, rng: torch.Generator
) -> None:
    for tokens, heads in ((1, 1), (13, 6), (3, 128)):
        inputs = make_inputs(tokens, heads, widths, device, rng, dtypes=(dtype,) * 3)
        check_concat(*inputs[:2])
        check_quant(*inputs)
        check_quant(*inputs, k_scale=make_scale(0.7, device), v_scale=make_scale(0.7, device), v_pad_to=192)


@pytest.mark.parametrize("layout", HEAD_LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_head_layout(
    layout: str, dtype: torch.dtype, device: torch.device, rng: torch.Generator
) -> None:
    for (p, r, width), tokens, heads in itertools.product(((128, 64, 128), (8, 8, 16)), (1, 7), (1, 3, 16)):
        k_nope = make_heads(layout, (tokens, heads, p), dtype, device, rng)
        v = make_heads(layout, (tokens, heads, width), dtype, device, rng)
        k_pe = random_values((tokens, r), dtype, rng).to(device)
        check_concat(k_nope, k_pe)
        check_quant(k_nope, k_pe, v)
        check_quant(k_nope, k_pe, v, k_scale=make_scale(0.3, device), v_pad_to=192)


@pytest.mark.parametrize("layout", ROW_LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("three_dims", [False, True], ids=["T,R", "T,1,R"])
def test_every_row_layout(
    layout: str, dtype: torch.dtype, three_dims: bool, device: torch.device, rng: torch.Generator
) -> None:
    k_nope, _, v = make_inputs(11, 6, (128, 64, 128), device, rng, dtypes=(dtype,) * 3)
    k_pe = make_rows(layout, (11, 64), dtype, device, rng, three_dims=three_dims)
    check_concat(k_nope, k_pe)
    check_quant(k_nope, k_pe, v, v_scale=make_scale(0.3, device))


@st.composite
def _geometries(draw: st.DrawFn) -> dict[str, object]:
    width = st.integers(1, 26).map(lambda n: 8 * n)
    tokens = draw(st.integers(0, 40))
    heads = draw(st.integers(1, 20))
    pad = draw(st.none() | st.integers(0, 4))
    v = draw(width)
    return {
        "tokens": tokens,
        "heads": heads,
        "widths": (draw(width), draw(st.just(0) | width), v),
        "dtypes": draw(st.tuples(*[st.sampled_from(DTYPES)] * 3)),
        "layouts": (
            draw(st.sampled_from(HEAD_LAYOUTS)),
            draw(st.sampled_from(ROW_LAYOUTS)),
            draw(st.sampled_from(HEAD_LAYOUTS)),
        ),
        "three_dims": draw(st.booleans()),
        "scales": draw(st.tuples(*[st.none() | st.floats(width=32)] * 2)),
        "v_pad_to": None if pad is None else v + 8 * pad,
        "allocate": draw(st.booleans()),
        "data": draw(st.integers(0, 2**31)),
    }


@seed(SEED)
@settings(max_examples=150, deadline=None, database=None)
@given(case=_geometries())
def test_random_geometries(case: dict, device: torch.device) -> None:
    rng = torch.Generator().manual_seed(case["data"])
    tokens, heads, (p, r, width) = case["tokens"], case["heads"], case["widths"]
    dtypes, layouts = case["dtypes"], case["layouts"]
    k_nope = make_heads(layouts[0], (tokens, heads, p), dtypes[0], device, rng)
    k_pe = make_rows(layouts[1], (tokens, r), dtypes[1], device, rng, three_dims=case["three_dims"])
    v = make_heads(layouts[2], (tokens, heads, width), dtypes[2], device, rng)
    k_scale, v_scale = (None if s is None else make_scale(s, device) for s in case["scales"])
    check_quant(
        k_nope,
        k_pe,
        v,
        k_scale=k_scale,
        v_scale=v_scale,
        v_pad_to=case["v_pad_to"],
        allocate=case["allocate"],
    )
    if dtypes[0] == dtypes[1]:
        check_concat(k_nope, k_pe, allocate=case["allocate"])


def test_halves_of_one_projection(device: torch.device, rng: torch.Generator) -> None:
    kv = random_values((137, 12, 256), BF16, rng).to(device)
    latent = random_values((137, 576), BF16, rng).to(device)
    k_nope, v = kv.split([128, 128], dim=-1)
    check_quant(k_nope, latent[:, 512:], v)
    check_concat(k_nope, latent[:, 512:].unsqueeze(1))


def test_values_come_padded(device: torch.device, rng: torch.Generator) -> None:
    k_nope, k_pe, padded = make_inputs(13, 6, (128, 64, 192), device, rng)
    padded[..., 128:] = math.nan
    check_quant(k_nope, k_pe, padded[..., :128])
    check_quant(k_nope, k_pe, padded[..., :128], v_pad_to=192, v_scale=make_scale(2.0, device))


@pytest.mark.parametrize("v_pad_to", [128, 136, 192, 256, 1024])
def test_padded_tail_is_zero_over_poison(v_pad_to: int, device: torch.device, rng: torch.Generator) -> None:
    inputs = make_inputs(13, 3, (128, 64, 128), device, rng)
    for v_scale in (None, make_scale(-1.0, device), make_scale(math.nan, device)):
        _, v = check_quant(*inputs, v_scale=v_scale, v_pad_to=v_pad_to)
        assert v.shape == (13, 3, v_pad_to)
        assert (as_bits(v[..., 128:]) == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_size_one_dimensions_have_no_stride_requirement(
    dtype: torch.dtype, device: torch.device, rng: torch.Generator
) -> None:
    absurd = 2**62 - 1
    row = random_values((8,), dtype, rng).to(device)
    two = random_values((2, 8), dtype, rng).to(device)
    k_pe = row.as_strided((1, 1, 8), (absurd, absurd, 1))
    for k_nope in (row.as_strided((1, 1, 8), (absurd, absurd, 1)), two.as_strided((1, 2, 8), (absurd, 8, 1))):
        check_concat(k_nope, k_pe)
        check_quant(k_nope, k_pe, k_nope)
    many = two.as_strided((2, 1, 8), (8, absurd, 1))
    check_quant(many, two.as_strided((2, 1, 8), (8, absurd, 1)), many)
    k_scale = make_scale(0.5, device).as_strided((1,), (absurd,))
    check_quant(many, two, many, k_scale=k_scale)


def test_outputs_with_absurd_strides_in_size_one_dimensions(
    device: torch.device, rng: torch.Generator
) -> None:
    k_nope, k_pe, v = make_inputs(1, 1, (8, 8, 8), device, rng)
    k_out = torch.empty(16, dtype=E4M3, device=device).as_strided((1, 1, 16), (3, 7, 1))
    v_out = torch.empty(8, dtype=E4M3, device=device).as_strided((1, 1, 8), (0, 1, 1))
    want = vllm_hotpath.mla_kv_concat_quant_fp8(k_nope, k_pe, v)
    vllm_hotpath.mla_kv_concat_quant_fp8(k_nope, k_pe, v, k_out=k_out, v_out=v_out)
    assert_same_bits(k_out, want[0], "k_out")
    assert_same_bits(v_out, want[1], "v_out")


@pytest.mark.parametrize("shift", [8, 24, 40])
def test_outputs_need_only_eight_element_alignment(
    shift: int, device: torch.device, rng: torch.Generator
) -> None:
    k_nope, k_pe, v = make_inputs(13, 3, (128, 64, 128), device, rng)
    k_out = Output((13, 3, 192), E4M3, device, shift)
    v_out = Output((13, 3, 128), E4M3, device, shift)
    out = Output((13, 3, 192), BF16, device, shift)
    vllm_hotpath.mla_kv_concat_quant_fp8(k_nope, k_pe, v, k_out=k_out.tensor, v_out=v_out.tensor)
    vllm_hotpath.mla_kv_concat(k_nope, k_pe, out=out.tensor)
    for output, want in zip(
        (k_out, v_out, out), (*check_quant(k_nope, k_pe, v), check_concat(k_nope, k_pe)), strict=True
    ):
        output.assert_guards_intact()
        assert_same_bits(output.tensor, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_rotary_part_the_concat_is_a_copy(
    dtype: torch.dtype, device: torch.device, rng: torch.Generator
) -> None:
    for layout in HEAD_LAYOUTS:
        k_nope = make_heads(layout, (13, 3, 128), dtype, device, rng)
        for k_pe in (k_nope[:, 0, :0], k_nope[:, :1, :0]):
            assert_same_bits(check_concat(k_nope, k_pe), k_nope)


def test_zero_tokens_give_empty_outputs(device: torch.device, rng: torch.Generator) -> None:
    for heads in HEADS:
        inputs = make_inputs(0, heads, (128, 64, 128), device, rng)
        assert check_concat(*inputs[:2], allocate=True).shape == (0, heads, 192)
        k, v = check_quant(*inputs, v_pad_to=192, allocate=True)
        assert (k.shape, v.shape) == ((0, heads, 192), (0, heads, 192))
        assert (k.dtype, v.dtype) == (E4M3, E4M3)
        check_quant(*inputs, v_pad_to=192, k_scale=make_scale(1.0, device))


def test_zero_token_slice_of_a_misaligned_tensor_is_accepted(
    device: torch.device, rng: torch.Generator
) -> None:
    storage = random_values((4096,), BF16, rng).to(device)
    k_nope = storage[1:].as_strided((0, 3, 128), (999, 129, 1))
    check_concat(k_nope, storage[3:3].view(0, 1)[:, :0])


def test_parameters_and_inference_tensors_are_accepted(device: torch.device, rng: torch.Generator) -> None:
    k_nope, k_pe, v = make_inputs(13, 3, (128, 64, 128), device, rng)
    wants = (*check_quant(k_nope, k_pe, v, k_scale=make_scale(0.5, device)), check_concat(k_nope, k_pe))
    parameters = [torch.nn.Parameter(tensor) for tensor in (k_nope, k_pe, v)]
    scale = torch.nn.Parameter(make_scale(0.5, device))
    with torch.inference_mode():
        inference = [tensor.clone() for tensor in (k_nope, k_pe, v)]
    for inputs in (parameters, inference):
        gots = (
            *vllm_hotpath.mla_kv_concat_quant_fp8(*inputs, k_scale=scale),
            vllm_hotpath.mla_kv_concat(*inputs[:2]),
        )
        for got, want in zip(gots, wants, strict=True):
            assert_same_bits(got, want)
            assert not got.requires_grad


def test_plain_subclasses_are_accepted(device: torch.device, rng: torch.Generator) -> None:
    class Weight(torch.Tensor):
        pass

    inputs = make_inputs(13, 3, (128, 64, 128), device, rng)
    want = check_quant(*inputs)
    got = vllm_hotpath.mla_kv_concat_quant_fp8(*[tensor.as_subclass(Weight) for tensor in inputs])
    assert_same_bits(got[0].as_subclass(torch.Tensor), want[0], "k_out")
    assert_same_bits(got[1].as_subclass(torch.Tensor), want[1], "v_out")


def test_repeated_calls_give_the_same_bytes(device: torch.device, rng: torch.Generator) -> None:
    inputs = make_inputs(137, 12, (128, 64, 128), device, rng)
    scale = make_scale(0.77, device)
    want = check_quant(*inputs, k_scale=scale, v_scale=scale)
    for _ in range(20):
        got = vllm_hotpath.mla_kv_concat_quant_fp8(*inputs, k_scale=scale, v_scale=scale)
        assert torch.equal(as_bits(got[0]), as_bits(want[0]))
        assert torch.equal(as_bits(got[1]), as_bits(want[1]))


def test_output_may_touch_an_input_without_overlap(device: torch.device, rng: torch.Generator) -> None:
    storage = random_values((128 + 64 + 192 + 8,), BF16, rng).to(device)
    k_nope, k_pe = storage[:128].view(1, 1, 128), storage[320:384].view(1, 64)
    out = storage[128:320].view(1, 1, 192)
    want = torch.cat([k_nope[0, 0], k_pe[0]]).view(1, 1, 192)
    vllm_hotpath.mla_kv_concat(k_nope, k_pe, out=out)
    assert_same_bits(out, want)


def test_token_offsets_beyond_int32_are_exact(rng: torch.Generator) -> None:
    stride = 2**31 // 2 + 24
    storage = torch.empty(2 * stride + 3 * 256, dtype=torch.uint8)
    kv = storage.as_strided((3, 3, 256), (stride, 256, 1))
    kv.copy_(as_bits(random_values((3, 3, 256), E4M3, rng)))
    kv = kv.view(E4M3)
    k_pe = storage.as_strided((3, 64), (stride, 1), 17).view(E4M3)
    check_concat(kv[..., :128], k_pe)
    check_quant(kv[..., :128], k_pe, kv[..., 128:], k_scale=make_scale(0.3, torch.device("cpu")))
