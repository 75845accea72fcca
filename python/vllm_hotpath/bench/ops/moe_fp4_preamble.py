"""What ``verify`` and ``bench`` know of the NVFP4 MoE preamble: inputs, references, bytes, floor, peer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from vllm_hotpath.bench.gates import QUICK_TOKENS, READ, TOKENS, reads_of
from vllm_hotpath.bench.models import MODELS, Gate
from vllm_hotpath.bench.numerics import Guarded, Tolerance
from vllm_hotpath.bench.ops.nvfp4_quant import CodeCheck, code_outputs, guarded_outputs, random_rows
from vllm_hotpath.bench.spec import BenchCase, BufferSet, OpSpec, Output, VerifyCase
from vllm_hotpath.ops import moe_fp4_preamble, nvfp4_quant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vllm_hotpath.bench.models import Model

BF16, FP32 = torch.bfloat16, torch.float32

_SCALE = 448 * 6 / 5.3
_LOGITS = {BF16: Tolerance(relative=1e-5, dims=1, ulps=1), FP32: Tolerance(relative=1e-5, dims=1)}
"""One rounding, and the sums of fp32 in any order."""


class Recipe(NamedTuple):
    """One way to make inputs and to call the op. ``odd``: rows of odd strides and bases."""

    logits: torch.dtype | None = BF16
    layout: Any = "linear"
    odd: bool = False
    allocate: bool = False

    def __str__(self) -> str:
        gate = "no gate" if self.logits is None else f"{str(self.logits).removeprefix('torch.')} logits"
        parts = {"odd rows": self.odd, "allocated": self.allocate}
        return " ".join([gate, self.layout, *(name for name, there in parts.items() if there)])


_VERIFY: tuple[tuple[Recipe, tuple[int, ...]], ...] = (
    (Recipe(), (0, 1, 8, 13, 32)),
    (Recipe(FP32, "swizzled_128x4"), (1, 17)),
    (Recipe(BF16, "swizzled_8x4"), (5,)),
    (Recipe(FP32, odd=True), (6,)),
    (Recipe(allocate=True), (0, 9)),
    (Recipe(None), (1, 300)),
    (Recipe(None, "swizzled_128x4", odd=True), (33,)),
)


def _verify(
    gate: Gate, recipe: Recipe, tokens: int
) -> Callable[[torch.Generator, torch.device], list[Output]]:
    def run(generator: torch.Generator, device: torch.device) -> list[Output]:
        x = random_rows(tokens, gate.hidden, BF16, generator, device, recipe.odd)
        scale = torch.tensor([_SCALE], device=device)
        packed, scales = guarded_outputs(tokens, gate.hidden, recipe.layout, device)
        given: dict[str, Any] = {"layout": recipe.layout}
        if not recipe.allocate:
            given |= {"out": packed.tensor, "out_scale": scales.tensor}
        beside = [packed, scales]
        if recipe.logits is None:
            got = moe_fp4_preamble.moe_fp4_preamble(x, scale, **given)
            found = code_outputs((got.packed, got.scales), x, scale, recipe.layout)
        else:
            # A NaN among the activations is for the quantiser alone.
            x.nan_to_num_(0.0)
            weight = torch.randn(gate.experts, gate.hidden, generator=generator) * (2 / gate.hidden**0.5)
            weight = weight.to(device, BF16)
            logits = Guarded((tokens, gate.experts), recipe.logits, device)
            beside.append(logits)
            if not recipe.allocate:
                given["out_logits"] = logits.tensor
            got = moe_fp4_preamble.moe_fp4_preamble(
                x, scale, gate_weight=weight, logits_dtype=recipe.logits, **given
            )
            assert got.router_logits is not None
            exact = x.double() @ weight.double().T
            found = code_outputs((got.packed, got.scales), x, scale, recipe.layout)
            found.append(Output("logits", got.router_logits, exact, _LOGITS[recipe.logits]))
        return [*found, *(Output("bytes beside an output", g.guard(), g.untouched()) for g in beside)]

    return run


def _verify_cases(op: str, gate: Gate) -> Iterator[VerifyCase]:
    for recipe, every in _VERIFY:
        for tokens in every:
            yield VerifyCase(f"M={tokens} {recipe}", _verify(gate, recipe, tokens))


def bytes_moved(gate: Gate, tokens: int) -> tuple[int, int]:
    """Bytes that the op with a gate has to read and to write, logits in bf16."""
    read = (gate.experts + tokens) * gate.hidden * 2
    return read, tokens * (gate.hidden // 2 + gate.hidden // 16 + gate.experts * 2)


def _make(gate: Gate, layout: Any, tokens: int, device: torch.device, count: int) -> list[BufferSet]:
    return [_buffer_set(gate, layout, tokens, device) for _ in range(count)]


def _buffer_set(gate: Gate, layout: Any, tokens: int, device: torch.device) -> BufferSet:
    x = torch.randn(tokens, gate.hidden, device=device).to(BF16)
    weight = (torch.randn(gate.experts, gate.hidden, device=device) * (2 / gate.hidden**0.5)).to(BF16)
    scale = torch.tensor([_SCALE], device=device)
    packed, scales = nvfp4_quant.nvfp4_quantize(x, scale, layout=layout)
    logits = torch.empty(tokens, gate.experts, dtype=BF16, device=device)
    check = CodeCheck(packed, scales, scale, layout)

    outputs = (packed, scales, logits)

    def ours() -> tuple[torch.Tensor, ...]:
        moe_fp4_preamble.moe_fp4_preamble(
            x, scale, gate_weight=weight, layout=layout, out=packed, out_scale=scales, out_logits=logits
        )
        return outputs

    def theirs() -> tuple[torch.Tensor, ...]:
        torch.mm(x, weight.T, out=logits)
        nvfp4_quant.nvfp4_quantize(x, scale, layout=layout, out=packed, out_scale=scales)
        return outputs

    return BufferSet(
        subjects={"ours": ours, "peer": theirs},
        outputs=outputs,
        want=lambda: (*check.want(x), x.double() @ weight.double().T),
        got=lambda: (*check.got(), logits),
        tolerances=(None, None, _LOGITS[BF16]),
        floors=reads_of(weight, logits),
    )


def _bench_cases(op: str, gate: Gate, quick: bool) -> Iterator[BenchCase]:
    for layout in ("linear",) if quick else ("linear", "swizzled_128x4"):
        for tokens in QUICK_TOKENS if quick else TOKENS:
            read, written = bytes_moved(gate, tokens)
            yield BenchCase(
                op=op,
                params={"E": gate.experts, "K": gate.hidden, "layout": layout, "M": tokens},
                bytes_read=read,
                bytes_written=written,
                set_bytes=read + written,
                make=lambda device, count, layout=layout, tokens=tokens: _make(  # type: ignore[misc]
                    gate, layout, tokens, device, count
                ),
            )


def _gate(model: Model, tp: int) -> Gate | None:
    return model.gate if model.hidden else None


SPEC = OpSpec(
    stem="moe_fp4_preamble",
    shape=_gate,
    verify_cases=_verify_cases,
    bench_shapes=tuple(model.gate for model in MODELS.values() if model.gate and model.hidden),
    bench_cases=_bench_cases,
    peer="the gate by cuBLAS (`torch.mm` in bf16), then our nvfp4_quantize. vLLM's quantiser needs "
    "Blackwell, its gate is cuBLAS in 0.33.0, and in 0.22.1 up to 16 tokens a kernel of its own",
    floor=READ,
    agreement="(codes and scales bit by bit; logits within one rounding of fp64)",
)
