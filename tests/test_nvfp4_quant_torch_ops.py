"""The registered torch ops of NVFP4: schemas, opcheck, fakes, torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import vllm_hotpath.ops
from tests.helpers import BF16, assert_same_bits
from tests.nvfp4_cases import LAYOUTS, scale_of

OPS = torch.ops.vllm_hotpath
SCHEMAS = {
    OPS.nvfp4_quantize.default: (
        "vllm_hotpath::nvfp4_quantize(Tensor x, Tensor global_scale, str layout, Tensor(a!) out, "
        "Tensor(b!) out_scale) -> ()"
    ),
    OPS.silu_mul_nvfp4.default: (
        "vllm_hotpath::silu_mul_nvfp4(Tensor gate_up, Tensor global_scale, str layout, Tensor? mask_m, "
        "Tensor(a!) out, Tensor(b!) out_scale) -> ()"
    ),
    OPS.add_rms_norm_nvfp4.default: (
        "vllm_hotpath::add_rms_norm_nvfp4(Tensor x, Tensor(c!) residual, Tensor weight, float eps, "
        "Tensor global_scale, str layout, Tensor(a!) out, Tensor(b!) out_scale, Tensor(d!)? out_norm, "
        "Tensor? second_scale, str second_layout, Tensor(e!)? second_out, Tensor(f!)? second_out_scale) -> ()"
    ),
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("op", list(SCHEMAS), ids=str)
def test_schema_is_pinned(op: torch._ops.OpOverload) -> None:
    assert str(op._schema) == SCHEMAS[op]


def _tensors(device: torch.device, rng: torch.Generator, rows: int = 5) -> dict[str, torch.Tensor]:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng).to(device, BF16)

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.uint8, device=device)

    return {
        "x": draw(rows, 80),
        "gate_up": draw(2, rows, 160),
        "residual": draw(rows, 80),
        "weight": draw(80),
        "scale": scale_of(20.0, device),
        "out": zeros(rows, 40),
        "out_scale": zeros(rows, 5),
        "second_out": zeros(rows, 40),
        "second_out_scale": zeros(8 if rows else 0, 8),
        "norm": draw(rows, 80),
    }


@pytest.mark.parametrize("rows", [0, 5])
def test_opcheck_is_clean(rows: int, device: torch.device, rng: torch.Generator) -> None:
    t = _tensors(device, rng, rows)
    outs = t["out"], t["out_scale"]
    torch.library.opcheck(OPS.nvfp4_quantize.default, (t["x"], t["scale"], "linear", *outs))
    counts = torch.tensor([rows, 0], dtype=torch.int32, device=device)
    silu_outs = (
        t["gate_up"].new_zeros((2, rows, 40), dtype=torch.uint8),
        t["gate_up"].new_zeros((2, rows, 5), dtype=torch.uint8),
    )
    for mask in (None, counts):
        torch.library.opcheck(
            OPS.silu_mul_nvfp4.default, (t["gate_up"], t["scale"], "linear", mask, *silu_outs)
        )
    start = (t["x"], t["residual"], t["weight"], 1e-6, t["scale"], "linear", *outs)
    second = (t["scale"], "swizzled_8x4", t["second_out"], t["second_out_scale"])
    for rest in ((None, None, "linear", None, None), (t["norm"], *second)):
        torch.library.opcheck(OPS.add_rms_norm_nvfp4.default, (*start, *rest))


def _all_three(t: dict[str, torch.Tensor], layout: Any) -> list[torch.Tensor]:
    """Every op between torch ops, with outputs given and made."""
    scale = t["scale"] * 2
    results = [
        *vllm_hotpath.nvfp4_quantize(t["x"] + 1, scale, layout=layout),
        *vllm_hotpath.silu_mul_nvfp4(t["gate_up"] * 2, scale, layout=layout),
        *vllm_hotpath.add_rms_norm_nvfp4(
            t["x"],
            t["residual"],
            t["weight"],
            1e-6,
            scale,
            layout=layout,
            out_norm=t["norm"],
            second_scale=scale,
        ),
    ]
    vllm_hotpath.nvfp4_quantize(t["norm"] + t["residual"], scale, out=t["out"], out_scale=t["out_scale"])
    return results


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_calls_keep_values_and_mutations(
    layout: str, backend: str, device: torch.device, rng: torch.Generator
) -> None:
    if backend == "inductor" and layout != "swizzled_128x4":
        pytest.skip("one inductor compilation is enough")
    compiled = torch.compile(_all_three, fullgraph=True, backend=backend)
    for rows in (5, 9):
        want = _tensors(device, rng, rows)
        got = {name: tensor.clone() for name, tensor in want.items()}
        for ours, theirs in zip(compiled(got, layout), _all_three(want, layout), strict=True):
            assert_same_bits(ours, theirs)
        for name, tensor in want.items():
            assert_same_bits(got[name], tensor, name)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fake_tensors_get_the_shapes_of_real_ones(layout: Any, kind: str) -> None:
    real = vllm_hotpath.nvfp4_quantize(torch.zeros(5, 80, dtype=BF16), torch.ones(1), layout=layout)
    with FakeTensorMode():
        x, scale = torch.empty(5, 80, dtype=BF16, device=kind), torch.empty(1, device=kind)
        fake = vllm_hotpath.nvfp4_quantize(x, scale, layout=layout)
        gate_up = torch.empty(3, 5, 160, dtype=BF16, device=kind)
        grouped = vllm_hotpath.silu_mul_nvfp4(gate_up, scale, layout=layout)
        four = vllm_hotpath.add_rms_norm_nvfp4(
            x, x.clone(), x[0], 1e-6, scale, layout=layout, second_scale=scale
        )
    for ours, by_expert, normed, want in zip(fake, grouped, four[:2], real, strict=True):
        assert ours.shape == normed.shape == want.shape
        assert by_expert.shape == (3, *want.shape)
        assert ours.dtype == by_expert.dtype == want.dtype
        assert ours.device.type == kind
        assert ours.is_contiguous()
    assert len(four) == 4
    assert four[3].shape == (5, 5)
