"""Runs vLLM's MoE runner and prepare step on CPU tensors, stock and with the preamble feature, and compares.

Experts and vLLM's quantisation kernel, which is for Blackwell, are stand-ins; gate, runner, kernel object,
prepare step and the description of the quantisation are vLLM's own.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.helpers import BF16, assert_same_bits
from tests.reference import nvfp4_quant as reference
from tests.vllm.compare import counted
from tests.vllm.compare_moe_router import HIDDEN, activations, context, make_gate, make_router, make_runner
from tests.vllm.driver import OPS, PREPARE, RELOAD, TRTLLM

FLAG = "VLLM_MOE_FP4_PREAMBLE_FUSION"
EXPERTS = 32
TOKENS = (1, 5, 16, 17)


def scaled_fp4_quant(
    x: torch.Tensor, scale: torch.Tensor, is_sf_swizzled_layout: bool = True, **_: Any
) -> Any:
    """What vLLM's kernel computes, by our tests' reference; of the swizzled layout nothing is looked at."""
    if is_sf_swizzled_layout:
        return torch.zeros(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    low, _, scales = reference.quantize(reference.to_float32(x), float(scale.flatten()[0]))
    packed = torch.from_numpy(low[..., ::2] | low[..., 1::2] << 4)
    return packed.to(torch.uint8), torch.from_numpy(np.ascontiguousarray(scales)).view(torch.float8_e4m3fn)


def quantisation(scale: float, **changes: Any) -> Any:
    from vllm.model_executor.layers.fused_moe.config import nvfp4_moe_quant_config

    ones = torch.ones(EXPERTS)
    given = {
        "g1_alphas": ones,
        "g2_alphas": ones,
        "a1_gscale": torch.full((EXPERTS,), scale),
        "a2_gscale": ones,
        "w1_scale": ones,
        "w2_scale": ones,
        "is_scale_swizzled": False,
    }
    return nvfp4_moe_quant_config(**given | changes)


class Kernel:
    """Stands for the layer's experts; between it and the experts' kernel everything is vLLM's."""

    expects_unquantized_inputs = False

    def __init__(self, scale: float, **changes: Any) -> None:
        from vllm.model_executor.layers.fused_moe import modular_kernel

        self.quant_config = quantisation(scale, **changes)
        prepare = importlib.import_module(PREPARE).make_moe_prepare_and_finalize_no_dp_ep(use_monolithic=True)
        self.impl = modular_kernel.FusedMoEKernelMonolithicImpl(prepare, self)
        self.got: list[tuple[Any, ...]] = []

    def apply(self, hidden_states: Any, router_logits: Any, a1q_scale: Any, **_: Any) -> Any:
        self.got.append((hidden_states, a1q_scale, router_logits))
        return torch.zeros(len(hidden_states), HIDDEN)

    def run(self, x: torch.Tensor, router_logits: torch.Tensor, **_: Any) -> Any:
        sink = {"routing_sink": None} if "routing_sink" in _parameters(self.impl.apply) else {}
        return self.impl.apply(x, None, None, router_logits, None, EXPERTS, None, False, **sink)


def _parameters(function: Any) -> Any:
    return inspect.signature(function).parameters


class Layer:
    """A layer whose kernel selects the experts itself."""

    def __init__(self, scale: float = 30.0, out_dtype: torch.dtype | None = None, **changes: Any) -> None:
        self.gate = make_gate(EXPERTS, out_dtype=out_dtype)
        self.runner = make_runner(self.gate, make_router(EXPERTS))
        self.kernel = Kernel(scale, **changes)
        experts = self.runner.experts_stand_in
        experts.is_monolithic = True
        experts.forward_monolithic = lambda x, router_logits, **_: self.kernel.run(x, router_logits)
        experts.apply_monolithic = lambda layer, x, router_logits, **_: self.kernel.run(x, router_logits)

    def run(self, x: torch.Tensor) -> tuple[Any, ...]:
        layer = (
            (self.runner.experts_stand_in,) if "layer" in _parameters(type(self.runner)._forward_impl) else ()
        )
        with context():
            self.runner._forward_impl(*layer, x, x, None)
        (got,) = self.kernel.got
        self.kernel.got.clear()
        return got


def make_layers() -> list[Layer]:
    return [Layer(), Layer(5.0, torch.float32), Layer(is_scale_swizzled=True), Layer(448 * 6 / 3)]


def assert_same(got: tuple[Any, ...], want: tuple[Any, ...]) -> None:
    for ours, stock in zip(got[:2], want[:2], strict=True):
        assert ours.dtype == stock.dtype
        assert_same_bits(ours.view(torch.uint8), stock.view(torch.uint8))
    # One channel of the gate a row: the same in any order of summation.
    assert_same_bits(got[2], want[2])


def run() -> None:
    """Stock first; then the flag comes into this process, whose modules are imported and stock."""
    from vllm_hotpath.plugin import register

    ops: Any = importlib.import_module(OPS)
    kernel = ops.scaled_fp4_quant
    ops.scaled_fp4_quant = scaled_fp4_quant
    try:
        wants = [[layer.run(activations(tokens)) for tokens in TOKENS] for layer in make_layers()]
        os.environ[FLAG] = "2"
        register()
        for layer, want in zip(make_layers(), wants, strict=True):
            ours = not layer.kernel.quant_config.is_scale_swizzled
            for number, tokens in enumerate(TOKENS):
                with counted("moe_fp4_preamble") as calls:
                    assert_same(layer.run(activations(tokens)), want[number])
                assert len(calls) == int(ours), tokens
            assert ("forward" in vars(layer.gate)) == ours
        check_one_launch()
    finally:
        ops.scaled_fp4_quant = kernel
    check_bias()


def check_one_launch() -> None:
    """From the second call on, gate and codes are one call of the op; a changed scale counts at once."""
    layer = Layer()
    x = activations(5)
    layer.run(x)
    stock = []
    gate_kernel = layer.gate.forward.stock
    layer.gate.forward.stock = lambda x: stock.append(x) or gate_kernel(x)
    layer.kernel.quant_config.a1_gscale.fill_(7.0)
    packed, scales, _ = layer.run(x)
    assert not stock
    want = scaled_fp4_quant(x, torch.tensor([7.0]), is_sf_swizzled_layout=False)
    assert_same_bits(packed, want[0])
    assert_same_bits(scales.view(torch.uint8), want[1].view(torch.uint8))


# ---- The bias ----


def check_bias() -> None:
    """0.22.1 casts in every call, and gets a bias that has been cast; 0.33.0 hands fp32 on."""
    module: Any = importlib.import_module(TRTLLM)
    experts = module.TrtLlmNvFp4ExpertsMonolithic
    casts = not hasattr(experts, "supports_routing_replay_capture")
    assert hasattr(experts.apply, "__wrapped__") == casts
    if not casts:
        return
    seen: list[torch.Tensor] = []

    def kernel(routing_bias: torch.Tensor, **_: Any) -> list[torch.Tensor]:
        seen.append(routing_bias)
        return [torch.zeros(1)]

    before, number = sys.modules.get("flashinfer"), module.activation_to_flashinfer_int
    module.activation_to_flashinfer_int = lambda _: 0
    fake = SimpleNamespace(fused_moe=SimpleNamespace(trtllm_fp4_block_scale_moe=kernel))
    sys.modules["flashinfer"] = fake  # type: ignore[assignment]
    try:
        bias = nn.Parameter(torch.randn(EXPERTS) + 11, requires_grad=False)
        for _ in range(2):
            consume(experts, bias)
        assert_same_bits(seen[0], bias.detach().to(BF16))
        assert seen[1].data_ptr() == seen[0].data_ptr()
        consume(experts, None)
        assert seen.pop() is None
        check_reload(bias, seen[0])
    finally:
        module.activation_to_flashinfer_int = number
        if before is None:
            del sys.modules["flashinfer"]
        else:
            sys.modules["flashinfer"] = before


def consume(experts: Any, bias: torch.Tensor | None) -> None:
    """Through vLLM's kernel object, which hands the bias to the experts in its own way."""
    from vllm.model_executor.layers.fused_moe import modular_kernel
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import RoutingMethodType

    layer = experts.__new__(experts)
    layer.quant_config = quantisation(1.0)
    layer.routing_method_type = RoutingMethodType.DeepSeekV3
    layer.gemm1_clamp_limit = layer.g1_scale_c = None
    layer.topk = layer.intermediate_size_per_partition = layer.local_num_experts = 8
    layer.ep_rank = 0
    prepare = importlib.import_module(PREPARE).make_moe_prepare_and_finalize_no_dp_ep(use_monolithic=True)
    modular_kernel.FusedMoEKernelMonolithicImpl(prepare, layer).apply(
        activations(2),
        None,
        None,
        torch.zeros(2, EXPERTS),
        MoEActivation.SILU,
        EXPERTS,
        None,
        False,
        e_score_correction_bias=bias,
    )


def check_reload(bias: nn.Parameter, kept: torch.Tensor) -> None:
    """A load into the parameter, then a reload of its layer as vLLM's workers make it."""
    from vllm.model_executor.model_loader import reload

    bias.weight_loader(bias, torch.full((EXPERTS,), 3.0))  # type: ignore[attr-defined]
    assert kept.tolist() == [3.0] * EXPERTS

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e_score_correction_bias = bias

    model = Gate()
    reload.record_metadata_for_reloading(model)
    reload.initialize_layerwise_reload(model)
    param: Any = model.e_score_correction_bias
    param.weight_loader(param, torch.full((EXPERTS,), 4.0))
    reload.finalize_layerwise_reload(model, SimpleNamespace(dtype=BF16))
    assert model.e_score_correction_bias is bias
    assert bias.tolist() == [4.0] * EXPERTS
    assert kept.tolist() == [4.0] * EXPERTS
    assert hasattr(importlib.import_module(RELOAD).finalize_layerwise_processing, "__wrapped__")
