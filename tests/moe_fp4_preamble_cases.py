"""Calls of ``moe_fp4_preamble`` and the check of all that they write."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch

import vllm_hotpath
from tests.helpers import BF16, POISON, Output, as_bits, assert_same_bits
from tests.moe_router_cases import FP32, assert_logits_close, matrix
from tests.nvfp4_cases import outputs, scale_of
from tests.reference import nvfp4_quant as reference

if TYPE_CHECKING:
    from vllm_hotpath import MoePreamble
    from vllm_hotpath.ops.nvfp4_quant import ScaleLayout


@dataclasses.dataclass(frozen=True)
class Form:
    """What distinguishes a call with a gate."""

    tokens: int = 3
    experts: int = 40
    hidden: int = 464
    layout: ScaleLayout = "linear"
    logits: torch.dtype | None = None
    scale: float = 448 * 6 / 5
    hidden_layout: str = "contiguous"
    weight_layout: str = "contiguous"


FORMS = {
    "kimi k2.6": Form(tokens=16, experts=384, hidden=7168),
    "kimi k2.6, one token": Form(tokens=1, experts=384, hidden=7168, layout="swizzled_128x4"),
    "deepseek v3": Form(tokens=32, experts=256, hidden=7168, layout="swizzled_8x4", logits=FP32),
    "kimi k3": Form(tokens=5, experts=896, hidden=7168, logits=FP32),
    "one expert": Form(tokens=9, experts=1, hidden=16, layout="swizzled_128x4"),
    "experts of two clusters": Form(tokens=17, experts=17, hidden=48, layout="swizzled_8x4"),
    "padding columns": Form(tokens=8, experts=33, hidden=80, layout="swizzled_8x4"),
    "odd sizes": Form(tokens=31, experts=1000, hidden=7152 // 3, layout="swizzled_128x4"),
}


@dataclasses.dataclass(frozen=True)
class Call:
    """Inputs of a call with a gate."""

    hidden: torch.Tensor
    weight: torch.Tensor
    form: Form
    # Made with the call, because a capture cannot copy it from the host.
    scale: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", scale_of(self.form.scale, self.hidden.device))

    def to(self, device: torch.device | str) -> Call:
        """The same values on a device, in the same layouts."""
        hidden = matrix(self.form.hidden_layout, self.hidden.cpu(), BF16, device)
        return Call(hidden, matrix(self.form.weight_layout, self.weight.cpu(), BF16, device), self.form)

    def run(self, **options: Any) -> MoePreamble:
        return vllm_hotpath.moe_fp4_preamble(
            self.hidden,
            self.scale,
            **{"gate_weight": self.weight, "logits_dtype": self.form.logits, "layout": self.form.layout}
            | options,
        )


def make_call(
    device: torch.device | str, rng: torch.Generator, form: Form | None = None, **changes: Any
) -> Call:
    """A random call; rows of the activations differ in size."""
    form = dataclasses.replace(form or Form(), **changes)
    x = torch.randn(form.tokens, form.hidden, generator=rng)
    x *= torch.exp2(torch.rand(form.tokens, 1, generator=rng) * 8 - 4)
    if form.tokens > 1:
        x[0, :16], x[-1, -16:] = 0.0, -0.0
    w = torch.randn(form.experts, form.hidden, generator=rng) * (2 / math.sqrt(form.hidden))
    hidden, weight = matrix(form.hidden_layout, x, BF16, device), matrix(form.weight_layout, w, BF16, device)
    return Call(hidden, weight, form)


def check(call: Call, *, gap: int = 3, finite: bool = True) -> MoePreamble:
    """Run a call into poisoned outputs, check every byte of them, and compare with the call that allocates.

    Args:
        call: with a gate.
        gap: elements between the rows of the logits.
        finite: compare the logits with fp64.
    """
    form, device = call.form, call.hidden.device
    before = [as_bits(value).clone() for value in (call.hidden, call.weight)]
    packed, scales = outputs((form.tokens,), form.hidden, form.layout, device)
    stored = Output((form.tokens, form.experts + gap), form.logits or BF16, device)
    logits = stored.tensor[:, : form.experts]
    got = call.run(out=packed.tensor, out_scale=scales.tensor, out_logits=logits)
    assert got.packed is packed.tensor
    assert got.scales is scales.tensor
    assert got.router_logits is logits
    assert got.routing_bias is None
    for name, output in (("out", packed), ("out_scale", scales), ("out_logits", stored)):
        output.assert_guards_intact(name)
    between = stored.tensor[:, form.experts :].contiguous()
    assert (between.view(torch.uint8) == POISON).all(), "bytes between rows of the logits were written"
    for value, bits in zip((call.hidden, call.weight), before, strict=True):
        assert torch.equal(as_bits(value), bits), "an input was written"

    reference.assert_quantized((got.packed, got.scales), call.hidden, form.scale, form.layout)
    alone = vllm_hotpath.nvfp4_quantize(call.hidden, scale_of(form.scale, device), layout=form.layout)
    assert_same_bits(got.packed, alone[0], "codes beside those of nvfp4_quantize")
    assert_same_bits(got.scales, alone[1], "scales beside those of nvfp4_quantize")
    if finite:
        assert_logits_close(logits, call.hidden, call.weight)
    again = call.run()
    assert again.router_logits is not None
    assert_same_bits(again.router_logits, logits.contiguous(), "allocated logits")
    assert_same_bits(again.packed, got.packed, "allocated codes")
    assert_same_bits(again.scales, got.scales, "allocated scales")
    return got
