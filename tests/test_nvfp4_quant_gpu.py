"""CUDA behaviour of the NVFP4 ops: parity with the CPU and vLLM to the bit, capture, order, large sizes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import vllm_hotpath
from tests import cuda_probe
from tests.helpers import BF16, FP16, POISON, assert_same_bits, capture, every_pattern, random_patterns
from tests.nvfp4_cases import LAYOUTS, Norm, check_quantize, placed, scale_of, values
from vllm_hotpath import _core
from vllm_hotpath.bench import peers

OPS = ("nvfp4_quantize", "silu_mul_nvfp4", "add_rms_norm_nvfp4")
pytestmark = pytest.mark.gpu(*OPS)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DTYPES = (BF16, FP16)


def _assert_same(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...], what: str) -> None:
    for name, ours, theirs in zip(("out", "out_scale", "second", "second scale"), got, want, strict=False):
        assert ours.is_cuda
        assert_same_bits(ours, theirs, f"{what} {name}")


def test_the_cpus_reciprocal_is_that_of_the_gpu_for_every_mantissa() -> None:
    cpu = torch.frombuffer(bytearray(_core.approximate_reciprocals()), dtype=torch.int32)
    assert torch.equal(cuda_probe.reciprocals(0x3F800000, 2**23).cpu(), cpu)
    # The exponent only scales: the smallest and the largest whose results are normal numbers.
    for exponent in (1, 252):
        got = cuda_probe.reciprocals(exponent << 23, 2**23).cpu()
        assert torch.equal(got, cpu - ((exponent - 127) << 23)), exponent
    assert not cuda_probe.reciprocals((253 << 23) + 256, 2**23 - 256).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_pattern_and_random_scales_agree_with_the_cpu(dtype: torch.dtype, rng: torch.Generator) -> None:
    x = every_pattern(dtype, (64, 1024), CPU)
    shuffled = x.flatten()[torch.randperm(65536, generator=rng)].view(64, 1024)
    scales = [2.0**e for e in range(-149, 128, 5)]
    scales += random_patterns((100,), torch.float32, rng).tolist() + [448 * 6 / a for a in (0.3, 5.0, 77.0)]
    for scale, y in itertools.product(scales, (x, shuffled)):
        want = vllm_hotpath.nvfp4_quantize(y, scale_of(scale, CPU))
        got = vllm_hotpath.nvfp4_quantize(y.cuda(), scale_of(scale, CUDA))
        _assert_same(got, want, f"scale {scale!r}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_factor_agrees_with_the_cpu(dtype: torch.dtype, rng: torch.Generator) -> None:
    """Every e4m3 scale under many global scales, whose reciprocals are approximate."""
    for scale in (torch.rand(300, generator=rng) * 4096).tolist():
        size = torch.exp2(torch.rand(512, 1, generator=rng) * 18 - 9) * 6 * 448 / scale / 400
        x = (torch.randn(512, 256, generator=rng) * size).to(dtype)
        want = vllm_hotpath.nvfp4_quantize(x, scale_of(scale, CPU))
        _assert_same(vllm_hotpath.nvfp4_quantize(x.cuda(), scale_of(scale, CUDA)), want, f"scale {scale!r}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_of_every_gate_agrees_with_the_cpu(dtype: torch.dtype) -> None:
    gates = every_pattern(dtype, (4096, 16), CPU)
    for up in (1.0, 3.0, -0.37):
        x = torch.cat([gates, torch.full_like(gates, up)], -1)
        want = vllm_hotpath.silu_mul_nvfp4(x, scale_of(0.5, CPU))
        _assert_same(vllm_hotpath.silu_mul_nvfp4(x.cuda(), scale_of(0.5, CUDA)), want, f"up {up}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_mul_equals_vllms_to_the_code(dtype: torch.dtype, rng: torch.Generator) -> None:
    silu_and_mul = peers.op("_C", "silu_and_mul")
    if silu_and_mul is None:
        pytest.skip("no library of vLLM")
    gates = every_pattern(dtype, (64, 1024), CUDA)
    for up in (torch.ones_like(gates), torch.randn(64, 1024, generator=rng).to(CUDA, dtype)):
        x = torch.cat([gates, up], -1)
        activated = torch.empty_like(gates)
        silu_and_mul(activated, x)
        want = vllm_hotpath.nvfp4_quantize(activated, scale_of(3.0, CUDA))
        _assert_same(vllm_hotpath.silu_mul_nvfp4(x, scale_of(3.0, CUDA)), want, "silu_mul")


_NORM_SHAPES = [
    (1, 7168),
    (16, 7168),
    (255, 7168),
    (256, 7168),
    (4096, 7168),
    (5, 48),
    (7, 464),
    (300, 464),
    (3, 8192),
    (3, 8208),
    (300, 8192),
    (300, 8208),
    (2, 14336),
    (260, 14336),
    (300, 2048),
    (33, 5472),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), _NORM_SHAPES)
def test_the_norm_equals_vllms_bit_for_bit(
    rows: int, width: int, dtype: torch.dtype, rng: torch.Generator
) -> None:
    fused_add_rms_norm = peers.op("_C", "fused_add_rms_norm")
    if fused_add_rms_norm is None:
        pytest.skip("no library of vLLM")
    call = Norm(rows, width, dtype, CUDA, rng, "dense")
    x, residual = call.x.clone(), call.residual.clone()
    fused_add_rms_norm(x, residual, call.weight, call.eps)
    norm = torch.empty_like(x)
    got = call.run(30.0, "linear", out_norm=norm)
    assert_same_bits(call.residual, residual, "residual")
    assert_same_bits(norm, x, "norm")
    _assert_same(got, vllm_hotpath.nvfp4_quantize(x, scale_of(30.0, CUDA)), "norm")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", ["dense", "wide", "odd"])
def test_the_norm_agrees_with_the_cpu(how: str, dtype: torch.dtype, rng: torch.Generator) -> None:
    for (rows, width), layout in zip(_NORM_SHAPES, itertools.cycle(LAYOUTS), strict=False):
        if rows * width > 2**22:
            continue
        state = rng.get_state()
        results = []
        for device in (CPU, CUDA):
            rng.set_state(state)
            call = Norm(rows, width, dtype, device, rng, how)
            norm = torch.empty_like(call.x)
            second: dict[str, Any] = {"second_scale": scale_of(3.0, device), "second_layout": "swizzled_8x4"}
            results.append(((call.residual, norm), call.run(30.0, layout, out_norm=norm, **second)))
        for index in (0, 1):
            _assert_same(results[1][index], results[0][index], f"M={rows} K={width}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", ["dense", "wide", "odd"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_large_matrices_agree_with_the_cpu(
    layout: str, how: str, dtype: torch.dtype, rng: torch.Generator
) -> None:
    x = values((1030, 7168), dtype, rng)
    want = vllm_hotpath.nvfp4_quantize(x, scale_of(99.0, CPU), layout=layout)
    got = vllm_hotpath.nvfp4_quantize(placed(x, CUDA, how), scale_of(99.0, CUDA), layout=layout)
    _assert_same(got, want, how)
    x = values((3, 140, 2 * 2048), dtype, rng)
    counts = torch.tensor([140, 0, 77], dtype=torch.int32)
    outputs = []
    for device in (CPU, CUDA):
        made = vllm_hotpath.silu_mul_nvfp4(x.to(device), scale_of(1.0, device), layout=layout)
        for tensor in made:
            tensor.fill_(POISON)
        vllm_hotpath.silu_mul_nvfp4(
            placed(x, device, how),
            torch.tensor([9.0, 1.0, 30.0], device=device),
            layout=layout,
            mask_m=counts.to(device),
            out=made[0],
            out_scale=made[1],
        )
        outputs.append(made)
    _assert_same(outputs[1], outputs[0], how)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_captured_calls_follow_their_inputs_and_write_all_padding(layout: str, rng: torch.Generator) -> None:
    x = torch.zeros(5, 464, dtype=BF16, device=CUDA)
    gate_up = torch.zeros(5, 928, dtype=BF16, device=CUDA)
    scale = scale_of(1.0, CUDA)

    def body() -> list[tuple[torch.Tensor, ...]]:
        return [
            vllm_hotpath.nvfp4_quantize(x, scale, layout=layout),
            vllm_hotpath.silu_mul_nvfp4(gate_up, scale, layout=layout),
        ]

    graph, got = capture(body)
    for _ in range(3):
        x.copy_(values((5, 464), BF16, rng))
        gate_up.copy_(values((5, 928), BF16, rng))
        scale.fill_(float(torch.rand((), generator=rng)) * 50)
        for tensors in got:
            for tensor in tensors:
                tensor.fill_(POISON)
        graph.replay()
        for ours, want in zip(got, body(), strict=True):
            _assert_same(ours, want, layout)


def test_the_ops_wait_for_a_producer_that_lets_them_start_early(rng: torch.Generator) -> None:
    late_copy = cuda_probe.load_late_copy()
    source = values((16, 7168), BF16, rng).nan_to_num().cuda()
    x = torch.zeros_like(source)
    weight, scale = torch.ones(7168, dtype=BF16, device=CUDA), scale_of(100.0, CUDA)
    for _ in range(20):
        source.copy_(source.roll(1, 0))
        want = vllm_hotpath.nvfp4_quantize(source, scale)
        x.zero_()
        late_copy(source, x)
        _assert_same(vllm_hotpath.nvfp4_quantize(x, scale), want, "quantize")
        want = vllm_hotpath.silu_mul_nvfp4(source, scale)
        x.zero_()
        late_copy(source, x)
        _assert_same(vllm_hotpath.silu_mul_nvfp4(x, scale), want, "silu")
        want = vllm_hotpath.add_rms_norm_nvfp4(source, torch.zeros_like(source), weight, 1e-6, scale)
        residual = torch.zeros_like(source)
        x.zero_()
        late_copy(source, x)
        _assert_same(vllm_hotpath.add_rms_norm_nvfp4(x, residual, weight, 1e-6, scale), want, "norm")


def test_one_kernel_node_a_call() -> None:
    x, gate_up = (torch.zeros(5, width, dtype=BF16, device=CUDA) for width in (464, 928))
    scale, weight = scale_of(1.0, CUDA), torch.ones(464, dtype=BF16, device=CUDA)
    residual = x.clone()
    calls = (
        lambda: vllm_hotpath.nvfp4_quantize(x, scale, layout="swizzled_128x4"),
        lambda: vllm_hotpath.silu_mul_nvfp4(gate_up, scale, layout="swizzled_8x4"),
        lambda: vllm_hotpath.add_rms_norm_nvfp4(x, residual, weight, 1e-6, scale, layout="swizzled_128x4"),
    )
    for call in calls:
        call()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            call()
        assert cuda_probe.node_types(graph) == [cuda_probe.KERNEL_NODE]


@pytest.mark.big(device_gib=12)
def test_beyond_2_31_elements(rng: torch.Generator) -> None:
    rows = 300_007
    x = torch.randn(1031, 7168, generator=rng).to(CUDA, BF16).repeat(291, 1)[:rows]
    assert x.numel() > 2**31
    scale = scale_of(100.0, CUDA)
    packed, scales = vllm_hotpath.nvfp4_quantize(x, scale)
    part = vllm_hotpath.nvfp4_quantize(x[:1031], scale)
    for start in range(0, rows, 1031):
        stop = min(start + 1031, rows)
        assert torch.equal(packed[start:stop], part[0][: stop - start]), start
        assert torch.equal(scales[start:stop], part[1][: stop - start]), start
    swizzled = vllm_hotpath.nvfp4_quantize(x, scale, layout="swizzled_128x4")[1]
    tiles = swizzled.view(-1, 112, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(-1, 448)
    assert torch.equal(tiles[:rows], scales)
    assert not tiles[rows:].any()


def test_every_dirty_output_is_written_in_full(rng: torch.Generator) -> None:
    for rows, width in ((5, 7168), (128, 464), (5, 464), (128, 7168), (1, 7168), (33, 80)):
        x = values((rows, width), BF16, rng).cuda()
        for layout in LAYOUTS:
            check_quantize(x, 30.0, layout)


def test_context_is_usable_after_refused_calls(rng: torch.Generator) -> None:
    x = values((5, 64), BF16, rng).cuda()
    for _ in range(5):
        with pytest.raises(TypeError, match="x"):
            vllm_hotpath.nvfp4_quantize(x.float(), scale_of(1.0, CUDA))
    torch.cuda.synchronize()
    check_quantize(x, 1.0, "linear")
