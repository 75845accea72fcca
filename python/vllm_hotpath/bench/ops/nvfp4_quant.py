"""What ``verify`` and ``bench`` know of the NVFP4 ops: inputs, reference, bytes, peers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from vllm_hotpath.bench import peers
from vllm_hotpath.bench.numerics import Guarded, Tolerance
from vllm_hotpath.bench.spec import BenchCase, BufferSet, OpSpec, Output, VerifyCase
from vllm_hotpath.ops import nvfp4_quant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vllm_hotpath.bench.models import Model

BF16, FP16 = torch.bfloat16, torch.float16

_BLOCK = 16
_EPS = 1e-6
_TILES = {"linear": (1, 1), "swizzled_128x4": (128, 4), "swizzled_8x4": (8, 4)}
_VERIFY_ROWS = (0, 1, 5, 129, 300)
_BENCH_ROWS = (1, 4, 16, 64, 512, 4096, 16384)
_QUICK_ROWS = (1, 16, 512, 4096)
# A norm in 16 bits of a value in fp64, and of the mean in fp32.
_NORM = Tolerance(relative=2.0**-20, dims=1, ulps=0.51)


@dataclass(frozen=True)
class Shape:
    """Hidden size, and the width of an expert's activation."""

    hidden: int
    intermediate: int

    def __str__(self) -> str:
        return f"K={self.hidden}, I={self.intermediate}"


def _shape(model: Model, tp: int) -> Shape | None:
    intermediate = model.moe_intermediate // tp
    if not model.hidden or model.moe_intermediate % tp or intermediate % _BLOCK:
        return None
    return Shape(model.hidden, intermediate)


# ---- Reference: the contract in torch. Approximate reciprocals leave a few codes two values. ----


class _Reference(NamedTuple):
    low: torch.Tensor
    high: torch.Tensor
    scales: torch.Tensor


def _e2m1(y: torch.Tensor) -> torch.Tensor:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=y.dtype, device=y.device)
    magnitude = y.abs().nan_to_num(nan=torch.inf)
    below, above = (torch.searchsorted(ties, magnitude, right=right) for right in (False, True))
    code = torch.where(below % 2 == 0, below, above)
    return torch.where(y.isnan(), 7, code | y.signbit() << 3).to(torch.uint8)


def _reference(x: torch.Tensor, global_scale: torch.Tensor) -> _Reference:
    """Scale bytes, and the lowest and highest code that the GPU's two approximate reciprocals allow."""
    blocks = x.float().unflatten(-1, (-1, _BLOCK))
    amax = blocks.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(-1)
    wanted = global_scale * (amax * torch.tensor(1 / 6, device=x.device))
    scales = wanted.clamp(max=448).to(torch.float8_e4m3fn)
    stored = scales.float()
    factor = torch.where(stored == 0, 0.0, 1 / (stored * (1 / global_scale)))
    exact = blocks.double() * factor[..., None]
    low, high = (_e2m1(exact * (1 + sign * 2.0**-21)).flatten(-2) for sign in (-1, 1))
    return _Reference(low, high, scales.view(torch.uint8))


def _codes(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def _place(scales: torch.Tensor, layout: str) -> torch.Tensor:
    tall, wide = _TILES[layout]
    rows, cols = scales.shape
    padded = torch.nn.functional.pad(scales, (0, -cols % wide, 0, -rows % tall))
    if layout == "linear" or not rows:
        return padded
    tiles = padded.view(-1, tall, padded.shape[1] // 4, 4)
    if layout == "swizzled_8x4":
        return tiles.transpose(1, 2).reshape(padded.shape)
    return tiles.view(-1, 4, 32, padded.shape[1] // 4, 4).permute(0, 3, 2, 1, 4).reshape(padded.shape)


def code_outputs(
    got: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor, scale: torch.Tensor, layout: str
) -> list[Output]:
    """Codes and scales of ``x``, and what they have to be; where a code has two values, the nearer."""
    want = _reference(x, scale)
    codes = _codes(got[0])
    nearest = torch.where(codes == want.high, want.high, want.low)
    return [
        Output("codes", codes, nearest),
        Output("scales", got[1], _place(want.scales, layout)),
    ]


def _silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As vLLM's silu_and_mul: silu rounded to the dtype, then the product."""
    gate, up = gate_up.chunk(2, -1)
    wide = gate.double()
    activated = (wide / (1 + torch.exp(-wide))).float().to(gate.dtype)
    return (activated.float() * up.float()).to(gate.dtype)


def _plain_gates(gate_up: torch.Tensor) -> torch.Tensor:
    """Replace gates whose silu lies so near to a rounding tie that fp32 may round it either way."""
    gate = gate_up.chunk(2, -1)[0]
    wide = gate.double()
    silu = wide / (1 + torch.exp(-wide))
    low, high = ((silu * (1 + sign * 2.0**-20)).float().to(gate.dtype) for sign in (-1, 1))
    gate.masked_fill_(low != high, 1.0)
    return gate_up


# ---- verify ----


def random_rows(
    rows: int, width: int, dtype: torch.dtype, generator: torch.Generator, device: torch.device, odd: bool
) -> torch.Tensor:
    """Rows of different size, blocks of zeros and of NaN among them; ``odd`` strides and base."""
    row = width + 5 * odd
    storage = torch.randn(rows * row + odd, generator=generator).to(dtype)
    x = storage[odd:].view(rows, row)[:, :width]
    if rows > 1:
        x[0, :_BLOCK] = 0.0
        x[1, :_BLOCK] = -0.0
        x[1, _BLOCK - 1] = torch.nan
        x[rows - 1].mul_(2.0**-9)
    moved = storage.to(device)
    return moved[odd:].view(rows, row)[:, :width]


def guarded_outputs(rows: int, width: int, layout: str, device: torch.device) -> tuple[Guarded, Guarded]:
    """Outputs for codes and scales, between guard bytes."""
    tall, wide = _TILES[layout]
    scales = (-(-rows // tall) * tall, -(-(width // _BLOCK) // wide) * wide)
    return Guarded((rows, width // 2), torch.uint8, device), Guarded(scales, torch.uint8, device)


def _verify(
    op: str, shape: Shape, rows: int, dtype: torch.dtype, layout: str, odd: bool
) -> Callable[[torch.Generator, torch.device], list[Output]]:
    width = shape.intermediate if op == "silu_mul_nvfp4" else shape.hidden

    def run(generator: torch.Generator, device: torch.device) -> list[Output]:
        scale = torch.tensor([448 * 6 / 5.3], device=device)
        packed, scales = guarded_outputs(rows, width, layout, device)
        outputs: dict[str, Any] = {"layout": layout, "out": packed.tensor, "out_scale": scales.tensor}
        more = []
        if op == "add_rms_norm_nvfp4":
            x = random_rows(rows, width, dtype, generator, device, odd).nan_to_num()
            residual = random_rows(rows, width, dtype, generator, device, odd).nan_to_num()
            weight = torch.randn(width, generator=generator).to(dtype).to(device)
            total = (x.float() + residual.float()).to(dtype)
            rms = torch.rsqrt(total.double().pow(2).mean(-1, keepdim=True) + _EPS)
            norm = torch.empty_like(x)
            got = nvfp4_quant.add_rms_norm_nvfp4(x, residual, weight, _EPS, scale, **outputs, out_norm=norm)
            more += [
                Output("residual", residual, total),
                Output("norm", norm, total.double() * rms * weight.double(), _NORM),
            ]
            value = norm
        elif op == "silu_mul_nvfp4":
            gate_up = _plain_gates(random_rows(rows, 2 * width, dtype, generator, device, odd))
            got = nvfp4_quant.silu_mul_nvfp4(gate_up, scale, **outputs)
            value = _silu_mul(gate_up)
        else:
            value = random_rows(rows, width, dtype, generator, device, odd)
            got = nvfp4_quant.nvfp4_quantize(value, scale, **outputs)
        beside = [Output("bytes beside an output", g.guard(), g.untouched()) for g in (packed, scales)]
        return [*code_outputs((got[0], got[1]), value, scale, layout), *more, *beside]

    return run


def _verify_cases(op: str, shape: Shape) -> Iterator[VerifyCase]:
    for rows in _VERIFY_ROWS:
        for layout in _TILES:
            label = f"M={rows} bf16 {layout}"
            yield VerifyCase(label, _verify(op, shape, rows, BF16, layout, odd=False))
    for dtype, odd in ((FP16, False), (BF16, True), (FP16, True)):
        label = f"M=5 {str(dtype).removeprefix('torch.')} linear{' odd rows' if odd else ''}"
        yield VerifyCase(label, _verify(op, shape, 5, dtype, "linear", odd))


# ---- bench ----


def bytes_moved(op: str, width: int, rows: int) -> tuple[int, int]:
    """Bytes that ``op`` has to read and to write, padding of a layout aside."""
    fp4 = rows * width // 2 + rows * width // _BLOCK
    if op == "silu_mul_nvfp4":
        return rows * width * 4, fp4
    if op == "add_rms_norm_nvfp4":
        return rows * width * 4 + width * 2, rows * width * 2 + fp4
    return rows * width * 2, fp4


class CodeCheck:
    """Compares codes with a reference that leaves some of them two values."""

    def __init__(self, packed: torch.Tensor, scales: torch.Tensor, scale: torch.Tensor, layout: str) -> None:
        self._packed, self._scales, self._scale, self._layout = packed, scales, scale, layout
        self._reference: _Reference | None = None

    def want(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What codes and scales of ``value`` have to be."""
        self._reference = _reference(value, self._scale)
        return self._reference.low, _place(self._reference.scales, self._layout)

    def got(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The codes and scales that were written; of two allowed values a code counts as the lower."""
        assert self._reference is not None
        codes = _codes(self._packed)
        return torch.where(codes == self._reference.high, self._reference.low, codes), self._scales


def _make(op: str, width: int, rows: int, layout: str, device: torch.device, count: int) -> list[BufferSet]:
    scale = torch.tensor([448 * 6 / 5.3], device=device)
    make = {"nvfp4_quantize": _quantize_set, "silu_mul_nvfp4": _silu_set, "add_rms_norm_nvfp4": _norm_set}[op]
    tall, wide = _TILES[layout]
    padded = (-(-rows // tall) * tall, -(-(width // _BLOCK) // wide) * wide)
    sets = []
    for _ in range(count):
        packed = torch.empty(rows, width // 2, dtype=torch.uint8, device=device)
        scales = torch.empty(padded, dtype=torch.uint8, device=device)
        sets.append(make(width, layout, packed, scales, scale))
    return sets


def _fresh(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=BF16, device=like.device)


def _quantize_set(
    width: int, layout: Any, packed: torch.Tensor, scales: torch.Tensor, scale: torch.Tensor
) -> BufferSet:
    x = _fresh(scale, len(packed), width)
    check = CodeCheck(packed, scales, scale, layout)

    def ours() -> tuple[torch.Tensor, ...]:
        return nvfp4_quant.nvfp4_quantize(x, scale, layout=layout, out=packed, out_scale=scales)

    return BufferSet({"ours": ours}, (packed, scales), lambda: check.want(x), check.got)


def _silu_set(
    width: int, layout: Any, packed: torch.Tensor, scales: torch.Tensor, scale: torch.Tensor
) -> BufferSet:
    gate_up = _plain_gates(_fresh(scale, len(packed), 2 * width))
    activated = _fresh(scale, len(packed), width)
    check = CodeCheck(packed, scales, scale, layout)
    peer = peers.op("_C", "silu_and_mul")

    def ours() -> tuple[torch.Tensor, ...]:
        return nvfp4_quant.silu_mul_nvfp4(gate_up, scale, layout=layout, out=packed, out_scale=scales)

    def theirs() -> tuple[torch.Tensor, ...]:
        assert peer is not None
        peer(activated, gate_up)
        return nvfp4_quant.nvfp4_quantize(activated, scale, layout=layout, out=packed, out_scale=scales)

    subjects = {"ours": ours} | ({"peer": theirs} if peer else {})
    return BufferSet(subjects, (packed, scales), lambda: check.want(_silu_mul(gate_up)), check.got)


def _norm_set(
    width: int, layout: Any, packed: torch.Tensor, scales: torch.Tensor, scale: torch.Tensor
) -> BufferSet:
    x, residual, weight = (_fresh(scale, *shape) for shape in ((len(packed), width),) * 2 + ((width,),))
    # vLLM's op writes the norm over its input.
    replaced = x.clone()
    check = CodeCheck(packed, scales, scale, layout)
    peer = peers.op("_C", "fused_add_rms_norm")

    def ours() -> tuple[torch.Tensor, ...]:
        return nvfp4_quant.add_rms_norm_nvfp4(
            x, residual, weight, _EPS, scale, layout=layout, out=packed, out_scale=scales
        )

    def theirs() -> tuple[torch.Tensor, ...]:
        assert peer is not None
        peer(replaced, residual, weight, _EPS)
        return nvfp4_quant.nvfp4_quantize(replaced, scale, layout=layout, out=packed, out_scale=scales)

    def want() -> tuple[torch.Tensor, torch.Tensor]:
        norm = torch.empty_like(x)
        nvfp4_quant.add_rms_norm_nvfp4(x, residual.clone(), weight, _EPS, scale, out_norm=norm)
        return check.want(norm)

    subjects = {"ours": ours} | ({"peer": theirs} if peer else {})
    return BufferSet(subjects, (packed, scales), want, check.got)


def _bench_cases(op: str, shape: Shape, quick: bool) -> Iterator[BenchCase]:
    fused = op == "silu_mul_nvfp4"
    if shape.intermediate == shape.hidden and not fused:
        return
    width = shape.intermediate if fused else shape.hidden
    for layout in ("linear",) if quick else ("linear", "swizzled_128x4"):
        for rows in _QUICK_ROWS if quick else _BENCH_ROWS:
            read, written = bytes_moved(op, width, rows)
            yield BenchCase(
                op=op,
                params={"K": width, "layout": layout, "M": rows},
                bytes_read=read,
                bytes_written=written,
                set_bytes=2 * read + written,
                make=lambda device, count, layout=layout, rows=rows: _make(  # type: ignore[misc]
                    op, width, rows, layout, device, count
                ),
            )


SPEC = OpSpec(
    stem="nvfp4_quant",
    shape=_shape,
    verify_cases=_verify_cases,
    # The second gives the wide activation of a dense layer.
    bench_shapes=(Shape(7168, 2048), Shape(7168, 7168)),
    bench_cases=_bench_cases,
    peer="silu_and_mul or fused_add_rms_norm, followed by our nvfp4_quantize; vLLM's own needs Blackwell",
)
