"""What ``verify`` and ``bench`` know of the MLA key and value pack: inputs, reference, bytes, peers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm_hotpath.bench import peers
from vllm_hotpath.bench.numerics import Guarded, awkward, e4m3
from vllm_hotpath.bench.spec import BenchCase, BufferSet, OpSpec, Output, VerifyCase
from vllm_hotpath.ops import mla_kv_pack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vllm_hotpath.bench.models import Model

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn

# Width of the gathered context workspace in the models: latent 512, then the rotary part.
_LATENT = 512

_RAGGED = (13, 137)
_BENCH_TOKENS = (64, 128, 256, 512, 1024, 4096, 16384, 65536)
_QUICK_TOKENS = (64, 512, 4096, 16384)
# The forms beside bf16 are measured at one head count.
_FORM_HEADS = 12
_FORM_TOKENS = (64, 512, 4096, 16384)


@dataclass(frozen=True)
class Shape:
    """Heads on one rank and the widths of their parts."""

    heads: int
    nope: int = 128
    rope: int = 64
    v: int = 128

    def __str__(self) -> str:
        return f"H={self.heads}"


def _shape(model: Model, tp: int) -> Shape:
    return Shape(model.heads_per_rank(tp), model.nope, model.rope, model.v)


class _Inputs(NamedTuple):
    k_nope: torch.Tensor
    k_pe: torch.Tensor
    v: torch.Tensor


class _Recipe(NamedTuple):
    """One way to make inputs and to call the op.

    ``layout``: ``halves`` slices K and V out of one [T, H, P+V] projection and k_pe out of a [T, 576]
    workspace, as the models do; ``contiguous`` has dense tensors and k_pe [T, 1, R]; ``odd`` has odd strides
    and bases; ``padded`` slices V out of [T, H, P+R] and asks for padded output.
    """

    layout: str
    dtype: torch.dtype
    pe_dtype: torch.dtype
    tokens: tuple[int, ...]
    k_scale: float | None = None
    v_scale: float | None = None
    allocate: bool = False

    def label(self, tokens: int) -> str:
        names = [str(t).removeprefix("torch.") for t in dict.fromkeys((self.dtype, self.pe_dtype))]
        scales = "" if self.k_scale is None else f" scales {self.k_scale:g}, {self.v_scale:g}"
        return f"T={tokens} {'+'.join(names)} {self.layout}{scales}{' allocated' if self.allocate else ''}"


def _recipes(op: str, shape: Shape) -> Iterator[_Recipe]:
    large = 4096 if shape.heads <= 4 else 1024 if shape.heads <= 16 else 263
    every = (0, 1, *_RAGGED, large)
    if op == "mla_kv_concat":
        yield _Recipe("halves", BF16, BF16, every)
        for dtype in (FP16, FP8):
            yield _Recipe("halves", dtype, dtype, _RAGGED)
        for dtype, layout in product((BF16, FP8), ("contiguous", "odd")):
            yield _Recipe(layout, dtype, dtype, (1, 13))
        yield _Recipe("halves", BF16, BF16, (0, 13), allocate=True)
        return
    yield _Recipe("halves", BF16, BF16, every)
    yield _Recipe("halves", BF16, BF16, every, 0.37, 2.9)
    yield _Recipe("halves", FP16, FP16, _RAGGED)
    yield _Recipe("halves", BF16, FP8, _RAGGED)
    yield _Recipe("halves", BF16, FP8, (13,), 0.11, 0.23)
    yield _Recipe("halves", FP16, FP16, (13,), 5.3, 0.017)
    yield _Recipe("contiguous", BF16, BF16, (1, 137))
    yield _Recipe("contiguous", FP16, BF16, (13,), 1.7, 0.6)
    yield _Recipe("halves", FP8, BF16, (13,))
    yield _Recipe("halves", FP8, BF16, (13,), 0.4, 1.9)
    yield _Recipe("odd", BF16, BF16, _RAGGED)
    yield _Recipe("padded", BF16, BF16, (1, 13))
    yield _Recipe("padded", BF16, BF16, (13,), 0.8, 3.1)
    yield _Recipe("halves", BF16, BF16, (0, 13), allocate=True)
    inf, nan = float("inf"), float("nan")
    for k_scale, v_scale in ((-0.75, -0.0), (0.0, inf), (nan, -inf), (1e-40, 2.0**127)):
        yield _Recipe("halves", BF16, BF16, (13,), k_scale, v_scale)


def _inputs(
    recipe: _Recipe, shape: Shape, tokens: int, generator: torch.Generator, device: torch.device
) -> _Inputs:
    heads, nope, rope, wide = shape.heads, shape.nope, shape.rope, shape.nope + shape.v

    def fresh(count: int, dtype: torch.dtype, scale: float | None) -> torch.Tensor:
        return awkward(count, dtype, generator, scale).to(device)

    if recipe.layout == "contiguous":
        return _Inputs(
            fresh(tokens * heads * nope, recipe.dtype, recipe.k_scale).view(tokens, heads, nope),
            fresh(tokens * rope, recipe.pe_dtype, recipe.k_scale).view(tokens, 1, rope),
            fresh(tokens * heads * shape.v, recipe.dtype, recipe.v_scale).view(tokens, heads, shape.v),
        )
    if recipe.layout == "odd":
        row, pe_row = heads * wide + heads + 2, _LATENT + rope + 1
        kv = fresh(tokens * row + 1, recipe.dtype, recipe.k_scale)[1:].view(tokens, row)
        parts = kv[:, : heads * (wide + 1)].unflatten(1, (heads, wide + 1))
        workspace = fresh(tokens * pe_row + 1, recipe.pe_dtype, recipe.k_scale)[1:].view(tokens, pe_row)
        return _Inputs(parts[..., :nope], workspace[:, _LATENT : _LATENT + rope], parts[..., nope:wide])
    kv = fresh(tokens * heads * wide, recipe.dtype, recipe.k_scale).view(tokens, heads, wide)
    workspace = fresh(tokens * (_LATENT + rope), recipe.pe_dtype, recipe.k_scale).view(tokens, _LATENT + rope)
    v = kv[..., nope:]
    if recipe.layout == "padded":
        padded = fresh(tokens * heads * (nope + rope), recipe.dtype, recipe.v_scale)
        v = padded.view(tokens, heads, nope + rope)[..., : shape.v]
    return _Inputs(kv[..., :nope], workspace[:, _LATENT:], v)


def _concat(k_nope: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
    tokens, heads, _ = k_nope.shape
    shared = k_pe.reshape(tokens, 1, k_pe.shape[-1]).expand(tokens, heads, k_pe.shape[-1])
    joined = torch.cat([k_nope.view(_bytes_as(k_nope)), shared.view(_bytes_as(shared))], dim=-1)
    return joined.view(k_nope.dtype)


def _bytes_as(x: torch.Tensor) -> torch.dtype:
    return torch.int16 if x.element_size() == 2 else torch.int8


def _reference_fp8(
    inputs: _Inputs,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    v_pad_to: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast and concatenate with plain torch; e4m3 bytes of k_pe pass through."""
    pe = inputs.k_pe if inputs.k_pe.dtype == FP8 else e4m3(inputs.k_pe, k_scale)
    v = e4m3(inputs.v, v_scale)
    if v_pad_to is not None:
        stored = v.view(torch.uint8)
        v = torch.nn.functional.pad(stored, (0, v_pad_to - v.shape[-1])).view(FP8)
    return _concat(e4m3(inputs.k_nope, k_scale), pe), v


def _verify_concat(
    recipe: _Recipe, shape: Shape, tokens: int
) -> Callable[[torch.Generator, torch.device], list[Output]]:
    def run(generator: torch.Generator, device: torch.device) -> list[Output]:
        inputs = _inputs(recipe, shape, tokens, generator, device)
        want = _concat(inputs.k_nope, inputs.k_pe)
        if recipe.allocate:
            return [Output("k", mla_kv_pack.mla_kv_concat(inputs.k_nope, inputs.k_pe), want)]
        out = Guarded((tokens, shape.heads, shape.nope + shape.rope), recipe.dtype, device)
        mla_kv_pack.mla_kv_concat(inputs.k_nope, inputs.k_pe, out=out.tensor)
        return [Output("k", out.tensor, want), Output("bytes beside k", out.guard(), out.untouched())]

    return run


def _verify_fp8(
    recipe: _Recipe, shape: Shape, tokens: int
) -> Callable[[torch.Generator, torch.device], list[Output]]:
    def run(generator: torch.Generator, device: torch.device) -> list[Output]:
        inputs = _inputs(recipe, shape, tokens, generator, device)
        k_scale = None if recipe.k_scale is None else torch.tensor([recipe.k_scale], device=device)
        v_scale = None if recipe.v_scale is None else torch.tensor([recipe.v_scale], device=device)
        v_pad_to = shape.nope + shape.rope if recipe.layout == "padded" else None
        want_k, want_v = _reference_fp8(inputs, k_scale, v_scale, v_pad_to)
        if recipe.allocate:
            k, v = mla_kv_pack.mla_kv_concat_quant_fp8(
                *inputs, k_scale=k_scale, v_scale=v_scale, v_pad_to=v_pad_to
            )
            return [Output("k", k, want_k), Output("v", v, want_v)]
        k_out = Guarded((tokens, shape.heads, shape.nope + shape.rope), FP8, device)
        v_out = Guarded((tokens, shape.heads, v_pad_to or shape.v), FP8, device)
        mla_kv_pack.mla_kv_concat_quant_fp8(
            *inputs,
            k_scale=k_scale,
            v_scale=v_scale,
            k_out=k_out.tensor,
            v_out=v_out.tensor,
            v_pad_to=v_pad_to,
        )
        return [
            Output("k", k_out.tensor, want_k),
            Output("v", v_out.tensor, want_v),
            Output("bytes beside k", k_out.guard(), k_out.untouched()),
            Output("bytes beside v", v_out.guard(), v_out.untouched()),
        ]

    return run


def _verify_cases(op: str, shape: Shape) -> Iterator[VerifyCase]:
    verify = _verify_concat if op == "mla_kv_concat" else _verify_fp8
    for recipe in _recipes(op, shape):
        for tokens in recipe.tokens:
            yield VerifyCase(recipe.label(tokens), verify(recipe, shape, tokens))


class Form(NamedTuple):
    """What a benchmark row varies beside the sizes: dtypes, scales, padding of V, alignment."""

    name: str
    dtype: torch.dtype = BF16
    rope: torch.dtype = BF16
    scaled: bool = False
    v_pad_to: int | None = None
    odd: bool = False


_FORMS = {
    "mla_kv_concat": (
        Form("bf16"),
        Form("e4m3", FP8, FP8),
        Form("odd rows", odd=True),
    ),
    "mla_kv_concat_quant_fp8": (
        Form("bf16"),
        Form("fp16", torch.float16, torch.float16),
        Form("scaled", scaled=True),
        Form("e4m3 k_pe", rope=FP8),
        Form("v to 192", v_pad_to=192),
        Form("odd rows", odd=True),
    ),
}


def _bench_buffers(
    op: str, form: Form, shape: Shape, tokens: int, device: torch.device, count: int
) -> Iterator[tuple[_Inputs, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield inputs, the projection they are halves of, and the outputs: views of a few allocations."""
    heads, nope, rope, wide = shape.heads, shape.nope, shape.rope, shape.nope + shape.v
    fp8 = op == "mla_kv_concat_quant_fp8"
    out_dtype = FP8 if fp8 else form.dtype
    first = int(form.odd)
    kv = torch.randn(count, tokens, heads * wide + first, dtype=BF16, device=device).to(form.dtype)
    kv = kv[..., first:].unflatten(-1, (heads, wide))
    workspace = torch.randn(count, tokens, _LATENT + rope, dtype=BF16, device=device).to(form.rope)
    k_out = torch.empty(count, tokens, heads, nope + rope, dtype=out_dtype, device=device)
    v_width = (form.v_pad_to or shape.v) if fp8 else 0
    v_out = torch.empty(count, tokens, heads, v_width, dtype=out_dtype, device=device)
    for i in range(count):
        inputs = _Inputs(kv[i, ..., :nope], workspace[i, :, _LATENT:], kv[i, ..., nope:])
        yield inputs, kv[i], k_out[i], v_out[i]


def _make_concat(form: Form, shape: Shape, tokens: int, device: torch.device, count: int) -> list[BufferSet]:
    peer = peers.op("_C", "fused_kimi_k3_mla_kv_concat") if form.name in _PEER_FORMS else None

    def one(inputs: _Inputs, k: torch.Tensor) -> BufferSet:
        k_nope, k_pe, _ = inputs

        def ours() -> tuple[torch.Tensor]:
            mla_kv_pack.mla_kv_concat(k_nope, k_pe, out=k)
            return (k,)

        def stock() -> tuple[torch.Tensor]:
            k[..., : shape.nope].copy_(k_nope)
            k[..., shape.nope :].copy_(k_pe.unsqueeze(1).expand(-1, shape.heads, -1))
            return (k,)

        def theirs() -> tuple[torch.Tensor]:
            assert peer is not None
            peer(k_nope, k_pe, k)
            return (k,)

        subjects = {"ours": ours, "torch": stock} | ({"peer": theirs} if peer else {})
        return BufferSet(subjects, (k,), lambda: (_concat(k_nope, k_pe),))

    buffers = _bench_buffers("mla_kv_concat", form, shape, tokens, device, count)
    return [one(inputs, k) for inputs, _, k, _ in buffers]


def _make_fp8(form: Form, shape: Shape, tokens: int, device: torch.device, count: int) -> list[BufferSet]:
    peer = peers.op("_C", "fused_kimi_k3_mla_kv_concat_quant_fp8") if form.name in _PEER_FORMS else None
    scale = torch.tensor([0.37], device=device) if form.scaled else None

    def one(inputs: _Inputs, kv: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> BufferSet:
        def ours() -> tuple[torch.Tensor, torch.Tensor]:
            return mla_kv_pack.mla_kv_concat_quant_fp8(
                *inputs, k_scale=scale, v_scale=scale, k_out=k, v_out=v, v_pad_to=form.v_pad_to
            )

        def stock() -> tuple[torch.Tensor, torch.Tensor]:
            kv_fp8, pe_fp8 = kv.to(FP8), inputs.k_pe.to(FP8)
            k[..., : shape.nope].copy_(kv_fp8[..., : shape.nope])
            k[..., shape.nope :].copy_(pe_fp8.unsqueeze(1).expand(-1, shape.heads, -1))
            return k, kv_fp8[..., shape.nope :]

        def theirs() -> tuple[torch.Tensor, torch.Tensor]:
            assert peer is not None
            peer(*inputs, k, v)
            return k, v

        subjects: dict[str, Callable[[], tuple[torch.Tensor, ...]]] = {"ours": ours}
        if form.name == "bf16":
            subjects["torch"] = stock
        if peer is not None:
            subjects["peer"] = theirs
        return BufferSet(subjects, (k, v), lambda: _reference_fp8(inputs, scale, scale, form.v_pad_to))

    buffers = _bench_buffers("mla_kv_concat_quant_fp8", form, shape, tokens, device, count)
    return [one(*buffers_of_one) for buffers_of_one in buffers]


# What vLLM's kernels accept.
_PEER_FORMS = ("bf16", "fp16", "e4m3 k_pe")


def bytes_moved(
    op: str, shape: Shape, tokens: int, form: Form = _FORMS["mla_kv_concat"][0]
) -> tuple[int, int]:
    """Bytes that ``op`` has to read and to write; k_pe is read once for all heads."""
    rows = tokens * shape.heads
    size = form.dtype.itemsize
    shared = tokens * shape.rope * form.rope.itemsize
    if op == "mla_kv_concat":
        return rows * shape.nope * size + shared, rows * (shape.nope + shape.rope) * size
    v_width = form.v_pad_to or shape.v
    return rows * (shape.nope + shape.v) * size + shared, rows * (shape.nope + shape.rope + v_width)


def _bench_cases(op: str, shape: Shape, quick: bool) -> Iterator[BenchCase]:
    make = _make_concat if op == "mla_kv_concat" else _make_fp8
    for form in _FORMS[op]:
        if form.name != "bf16" and (quick or shape.heads != _FORM_HEADS):
            continue
        for tokens in _QUICK_TOKENS if quick else _BENCH_TOKENS if form.name == "bf16" else _FORM_TOKENS:
            read, written = bytes_moved(op, shape, tokens, form)
            held = tokens * shape.heads * (shape.nope + shape.v) * 2 + tokens * (_LATENT + shape.rope) * 2
            yield BenchCase(
                op=op,
                params={"form": form.name, "H": shape.heads, "T": tokens},
                bytes_read=read,
                bytes_written=written,
                set_bytes=held + written,
                make=lambda device, count, form=form, tokens=tokens: make(  # type: ignore[misc]
                    form, shape, tokens, device, count
                ),
            )


SPEC = OpSpec(
    stem="mla_kv_pack",
    shape=_shape,
    verify_cases=_verify_cases,
    bench_shapes=tuple(Shape(heads) for heads in (1, 3, 6, 8, 12, 16, 96, 128)),
    bench_cases=_bench_cases,
    peer="fused_kimi_k3_mla_kv_concat, fused_kimi_k3_mla_kv_concat_quant_fp8",
    torch_ops="bf16: two slice copies; fp8: cast of kv, cast of k_pe, two slice copies",
)
