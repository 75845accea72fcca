"""The registered torch op of ``moe_fp4_preamble``: schema, opcheck, fakes, torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import vllm_hotpath.ops
from tests.helpers import BF16, assert_same_bits
from tests.moe_router_cases import FP32
from tests.nvfp4_cases import LAYOUTS, scale_of

OP = torch.ops.vllm_hotpath.moe_fp4_preamble.default
E, K = 24, 80


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def test_schema_is_pinned() -> None:
    assert str(OP._schema) == (
        "vllm_hotpath::moe_fp4_preamble(Tensor hidden_states, Tensor global_scale, Tensor? gate_weight, "
        "ScalarType? logits_dtype, Tensor? routing_bias, str layout, Tensor(a!) out, "
        "Tensor(b!) out_scale, Tensor(c!)? out_logits) -> ()"
    )


def _tensors(device: torch.device, rng: torch.Generator, rows: int = 5) -> dict[str, torch.Tensor]:
    return {
        "x": torch.randn(rows, K, generator=rng).to(device, BF16),
        "weight": torch.randn(E, K, generator=rng).to(device, BF16),
        "bias": torch.randn(E, generator=rng).to(device),
        "scale": scale_of(20.0, device),
    }


@pytest.mark.parametrize("rows", [0, 5])
def test_opcheck_is_clean(rows: int, device: torch.device, rng: torch.Generator) -> None:
    t = _tensors(device, rng, rows)
    out = torch.zeros(rows, K // 2, dtype=torch.uint8, device=device)
    out_scale = torch.zeros(rows, K // 16, dtype=torch.uint8, device=device)
    logits = torch.zeros(rows, E, device=device)
    for gate, given in (((None, None, None), None), ((t["weight"], FP32, t["bias"]), logits)):
        torch.library.opcheck(OP, (t["x"], t["scale"], *gate, "linear", out, out_scale, given))


def _both(t: dict[str, torch.Tensor], layout: Any) -> list[torch.Tensor]:
    """The op between torch ops, with a gate and without."""
    bias = {"routing_bias": t["bias"] + 1, "bias_dtype": BF16}
    whole = vllm_hotpath.moe_fp4_preamble(
        t["x"] + 1, t["scale"] * 2, gate_weight=t["weight"] * 2, layout=layout, **bias
    )
    alone = vllm_hotpath.moe_fp4_preamble(t["x"], t["scale"], layout=layout)
    assert whole.router_logits is not None
    assert whole.routing_bias is not None
    return [whole.packed, whole.scales, whole.router_logits + 1, whole.routing_bias, *alone[:2]]


# One compilation by inductor is enough.
_COMPILED = [(layout, backend) for layout in LAYOUTS for backend in ("eager", "aot_eager")]


@pytest.mark.parametrize(("layout", "backend"), [*_COMPILED, ("swizzled_128x4", "inductor")])
def test_torch_compile_gives_the_same_bits(
    layout: Any, backend: str, device: torch.device, rng: torch.Generator
) -> None:
    compiled = torch.compile(_both, fullgraph=True, backend=backend)
    for rows in (5, 9):
        t = _tensors(device, rng, rows)
        for ours, theirs in zip(compiled(t, layout), _both(t, layout), strict=True):
            assert_same_bits(ours, theirs)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fake_tensors_get_the_shapes_of_real_ones(layout: Any, kind: str) -> None:
    def run(device: str) -> vllm_hotpath.MoePreamble:
        return vllm_hotpath.moe_fp4_preamble(
            torch.zeros(5, K, dtype=BF16, device=device),
            torch.ones(1, device=device),
            gate_weight=torch.zeros(E, K, dtype=BF16, device=device),
            logits_dtype=FP32,
            routing_bias=torch.zeros(E, device=device),
            bias_dtype=BF16,
            layout=layout,
        )

    real = run("cpu")
    with FakeTensorMode():
        fake = run(kind)
    for ours, want in zip(fake, real, strict=True):
        assert ours is not None
        assert want is not None
        assert (ours.shape, ours.dtype) == (want.shape, want.dtype)
        assert ours.device.type == kind
        assert ours.is_contiguous()
