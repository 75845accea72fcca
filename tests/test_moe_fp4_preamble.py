"""``moe_fp4_preamble`` against ``nvfp4_quantize`` to the bit and fp64 logits, on CPU and GPU."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st

import vllm_hotpath
from tests.helpers import BF16, FP16, SEED, assert_same_bits
from tests.moe_fp4_preamble_cases import FORMS, Form, check, make_call
from tests.moe_router_cases import FP32
from tests.moe_router_cases import LAYOUTS as MATRICES
from tests.nvfp4_cases import LAYOUTS, outputs, placed, scale_of, values
from tests.reference import nvfp4_quant as reference


@pytest.mark.parametrize("name", list(FORMS))
def test_forms_of_models_and_small_ones_agree_with_the_reference(
    name: str, device: torch.device, rng: torch.Generator
) -> None:
    check(make_call(device, rng, FORMS[name]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_number_of_tokens_agrees_with_the_reference(
    layout: str, device: torch.device, rng: torch.Generator
) -> None:
    for tokens, dtype in itertools.product(range(1, 33), (BF16, FP32)):
        check(make_call(device, rng, tokens=tokens, hidden=80, layout=layout, logits=dtype))


@pytest.mark.parametrize("hidden", [16, 32, 48, 80, 5472, 7152, 14336])
def test_every_width_agrees_with_the_reference(
    hidden: int, device: torch.device, rng: torch.Generator
) -> None:
    for layout, tokens in zip(LAYOUTS, (1, 6, 32), strict=True):
        check(make_call(device, rng, tokens=tokens, hidden=hidden, layout=layout))


@pytest.mark.parametrize("experts", [1, 7, 15, 16, 17, 128, 513, 1024])
def test_every_number_of_experts_agrees_with_the_reference(
    experts: int, device: torch.device, rng: torch.Generator
) -> None:
    for tokens, logits in ((1, None), (12, FP32)):
        check(make_call(device, rng, tokens=tokens, experts=experts, logits=logits), gap=0)


@pytest.mark.parametrize("hidden_layout", MATRICES)
@pytest.mark.parametrize("weight_layout", ["contiguous", "odd base and stride", "slice of a wide projection"])
def test_every_row_stride_and_base_is_honoured(
    hidden_layout: str, weight_layout: str, device: torch.device, rng: torch.Generator
) -> None:
    for layout in LAYOUTS:
        form = Form(layout=layout, hidden_layout=hidden_layout, weight_layout=weight_layout)
        check(make_call(device, rng, form, tokens=7))


def test_tokens_do_not_depend_on_each_other(device: torch.device, rng: torch.Generator) -> None:
    """Codes and logits of a token are the same beside others that hold NaN and infinities."""
    call = make_call(device, rng, tokens=6)
    want = call.run()
    call.hidden[1, 5], call.hidden[4, 200], call.hidden[4, 201] = math.nan, math.inf, -math.inf
    got = check(call, finite=False)
    assert want.router_logits is not None
    assert got.router_logits is not None
    clean = [0, 2, 3, 5]
    assert_same_bits(got.packed[clean], want.packed[clean])
    assert_same_bits(got.router_logits[clean].contiguous(), want.router_logits[clean])
    assert got.router_logits[1].isnan().all()
    assert not got.router_logits[4].isfinite().any()


def test_infinite_activations_make_infinite_logits(device: torch.device, rng: torch.Generator) -> None:
    call = make_call(device, rng, tokens=2)
    call.hidden[1] = 0.0
    call.hidden[1, 100] = math.inf
    call.weight[:, 100] = torch.where(torch.arange(40, device=device) % 2 == 0, 1.0, -1.0)
    logits = call.run().router_logits
    assert logits is not None
    assert logits[1].tolist() == [math.inf, -math.inf] * 20


def test_zeros_are_zeros(device: torch.device, rng: torch.Generator) -> None:
    call = make_call(device, rng, tokens=4)
    call.hidden.zero_()
    got = check(call)
    assert not got.packed.any()
    assert not got.scales.any()


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_a_gate_it_is_nvfp4_quantize(
    layout: str, dtype: torch.dtype, device: torch.device, rng: torch.Generator
) -> None:
    for rows, how in ((1, "dense"), (33, "odd"), (130, "wide")):
        x = placed(values((rows, 464), dtype, rng), device, how)
        packed, scales = outputs((rows,), 464, layout, device)
        got = vllm_hotpath.moe_fp4_preamble(
            x, scale_of(30.0, device), layout=layout, out=packed.tensor, out_scale=scales.tensor
        )
        packed.assert_guards_intact("out")
        scales.assert_guards_intact("out_scale")
        reference.assert_quantized(got[:2], x, 30.0, layout)
        assert got.router_logits is None
        assert got.routing_bias is None
        alone = vllm_hotpath.nvfp4_quantize(x, scale_of(30.0, device), layout=layout)
        for ours, theirs in zip(got[:2], alone, strict=True):
            assert_same_bits(ours, theirs)


@pytest.mark.parametrize("gate", [False, True], ids=["alone", "gate"])
def test_no_tokens_make_empty_outputs(gate: bool, device: torch.device) -> None:
    x = torch.empty(0, 7168, dtype=BF16, device=device)
    weight = torch.zeros(256, 7168, dtype=BF16, device=device) if gate else None
    for layout in LAYOUTS:
        got = vllm_hotpath.moe_fp4_preamble(x, scale_of(1.0, device), gate_weight=weight, layout=layout)
        assert got.packed.shape == (0, 3584)
        assert got.scales.shape == (0, 448)
        assert (got.router_logits is not None) == gate
        assert not gate or got.router_logits.shape == (0, 256)


def test_parameters_are_inputs(device: torch.device, rng: torch.Generator) -> None:
    call = make_call(device, rng)
    bias = torch.nn.Parameter(torch.randn(40, generator=rng).to(device))
    got = call.run(gate_weight=torch.nn.Parameter(call.weight), routing_bias=bias, bias_dtype=BF16)
    want = call.run()
    assert got.router_logits is not None
    assert want.router_logits is not None
    assert_same_bits(got.router_logits, want.router_logits)
    assert not got.router_logits.requires_grad
    assert got.routing_bias is not None
    assert_same_bits(got.routing_bias, bias.detach().to(BF16))


@seed(SEED)
@settings(deadline=None, max_examples=40)
@given(
    tokens=st.integers(0, 32),
    blocks=st.integers(1, 40),
    experts=st.integers(1, 80),
    layout=st.sampled_from(LAYOUTS),
    logits=st.sampled_from((None, BF16, FP32)),
    scale=st.floats(2.0**-10, 2.0**13, width=32),
    hidden_layout=st.sampled_from(MATRICES),
    weight_layout=st.sampled_from(MATRICES),
    draw=st.integers(0, 2**31),
)
def test_any_shape(
    tokens: int,
    blocks: int,
    experts: int,
    layout: str,
    logits: torch.dtype | None,
    scale: float,
    hidden_layout: str,
    weight_layout: str,
    draw: int,
) -> None:
    form = Form(
        tokens,
        experts,
        blocks * 16,
        layout,
        logits,
        scale,
        hidden_layout,
        weight_layout,  # type: ignore[arg-type]
    )
    check(make_call("cpu", torch.Generator().manual_seed(draw), form))
