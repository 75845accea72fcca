"""What ``verify`` and ``bench`` know of the KDA decode: inputs, fp64 reference, bytes, floor, peer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vllm_hotpath import _core
from vllm_hotpath.bench import peers
from vllm_hotpath.bench.kda_calls import (
    BF16,
    DIM,
    EPS,
    FP16,
    FP32,
    TAPS,
    Problem,
    Recipe,
    SpecProblem,
    call,
    call_spec,
    conv_bytes,
    dtype_name,
    problems,
    reference,
    spec_problems,
    spec_reference,
    state_bytes,
)
from vllm_hotpath.bench.numerics import Guarded, Tolerance
from vllm_hotpath.bench.spec import BenchCase, BufferSet, Floor, OpSpec, Output, VerifyCase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vllm_hotpath.bench.models import Model

_SPLITS = (1, 2, 4, 8, 16)
_PEER_HEADS = (12, 24, 48, 96)
# Rows by heads of the full table: the heads of a Kimi-K3 rank of eight in detail.
_BENCH_ROWS = {12: (1, 2, 4, 8, 16, 32, 64, 128, 256)}
_OTHER_ROWS = (1, 8, 64, 256)
_SPEC_ROWS = (1, 4, 8, 16, 32, 64)
_QUICK_ROWS, _QUICK_VARIANT_ROWS = (1, 8, 64), (64,)
_HALF_NULL_ROWS = (64, 256)
_BF16_ROWS = {12: (32, 64, 128, 256), 96: (64,)}
# Heads times rows of the largest call that verify makes.
_VERIFY_TILES = 256

OUT_TOLERANCE = Tolerance(relative=1e-3, dims=1, ulps=1)
"""One ulp, or a thousandth of the head's largest output where terms cancel."""


def state_tolerance(dtype: torch.dtype) -> Tolerance:
    """A hundred-thousandth of the head's largest element; one ulp where the state is stored in 16 bits."""
    return Tolerance(relative=1e-5, dims=2, ulps=0 if dtype == FP32 else 1)


@dataclass(frozen=True)
class Shape:
    """Heads on one rank."""

    heads: int

    def __str__(self) -> str:
        return f"H={self.heads}"


def _shape(model: Model, tp: int) -> Shape | None:
    return Shape(model.kda_heads_per_rank(tp)) if model.kda_heads else None


_RECIPES = (
    Recipe(),
    Recipe("DS", lower_bound=None, norm=False),
    Recipe("SD", BF16, lower_bound=None, half_null=True),
    Recipe("DS", BF16, half_null=True, strided=True),
    Recipe("SD", half_null=True, odd=True, bias=True),
    Recipe("DS", lower_bound=None, odd=True, shared=False, strided=True),
    Recipe("SD", FP16, FP16, norm=False, slot_zero=True, half_null=True),
    Recipe("SD", lower_bound=None, pieces=True, shared=False, bias=True, half_null=True),
    Recipe("DS", lower_bound=None, pieces=True, odd=True),
)


def _verify(recipe: Recipe, heads: int, rows: int) -> Callable[[torch.Generator, torch.device], list[Output]]:
    def run(generator: torch.Generator, device: torch.device) -> list[Output]:
        def draw(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        (p,) = problems(recipe, heads, rows, draw, 1)
        live, null = p.rows()
        slots = p.slots(live)
        before = tuple(pages.clone() for pages in p.pages)
        want, want_conv, want_state = reference(p, live)
        row = heads * DIM + 5 * recipe.odd
        stored = Guarded((rows, row), recipe.activations, device)
        out = stored.tensor[:, : heads * DIM].unflatten(1, (heads, DIM))
        gaps = stored.tensor[:, heads * DIM :].clone()
        call(p, out)
        conv, state = p.conv_state[slots, :, : TAPS - 1], p.state[slots]
        # With the live slots taken over, the pools have to be as they were.
        p.conv_state_of(before)[slots, :, : TAPS - 1] = conv
        p.state_of(before)[slots] = state
        return [
            Output("out", out[live], want, OUT_TOLERANCE),
            Output("out of null rows", out[null], torch.zeros_like(out[null])),
            Output("conv state", conv, want_conv),
            Output("state", state, want_state, state_tolerance(recipe.state)),
            *(
                Output("cache bytes beside the live slots", *pair)
                for pair in zip(p.pages, before, strict=True)
            ),
            Output("bytes between rows of out", stored.tensor[:, heads * DIM :], gaps),
            Output("bytes beside out", stored.guard(), stored.untouched()),
        ]

    return run


def _verify_spec(
    recipe: Recipe, heads: int, rows: int
) -> Callable[[torch.Generator, torch.device], list[Output]]:
    def run(generator: torch.Generator, device: torch.device) -> list[Output]:
        def draw(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        (s,) = spec_problems(recipe, heads, rows, draw, 1, full=False)
        p, before = s.tokens, tuple(pages.clone() for pages in s.tokens.pages)
        want = spec_reference(s, s.live())
        tokens = p.x.shape[0]
        row = heads * DIM + 5 * recipe.odd
        stored = Guarded((tokens, row), recipe.activations, device)
        out = stored.tensor[:, : heads * DIM].unflatten(1, (heads, DIM))
        gaps = stored.tensor[:, heads * DIM :].clone()
        call_spec(s, out)
        rest = torch.ones(tokens, dtype=torch.bool, device=device)
        rest[want.tokens] = False
        conv, state = p.conv_state[want.conv_slots], p.state[want.slots]
        # With what the live rows own taken over, the pools have to be as they were.
        p.conv_state_of(before)[want.conv_slots] = conv
        p.state_of(before)[want.slots] = state
        return [
            Output("out", out[want.tokens], want.out, OUT_TOLERANCE),
            Output("out of other tokens", out[rest], torch.zeros_like(out[rest])),
            Output("conv state", conv, want.conv),
            Output("state", state, want.state, state_tolerance(recipe.state)),
            *(
                Output("cache bytes beside the live slots", *pair)
                for pair in zip(p.pages, before, strict=True)
            ),
            Output("bytes between tokens of out", stored.tensor[:, heads * DIM :], gaps),
            Output("bytes beside out", stored.guard(), stored.untouched()),
        ]

    return run


def _verify_cases(op: str, shape: Shape) -> Iterator[VerifyCase]:
    if op == "kda_decode_spec":
        few = 5 if shape.heads <= 12 else 2
        for i, recipe in enumerate(_RECIPES):
            columns = (4, 2, 8, 1)[i % 4]
            for rows in (few, max(few, _VERIFY_TILES // shape.heads // 4)) if i == 0 else (few,):
                label = f"N={rows} S={columns} {recipe}"
                yield VerifyCase(label, _verify_spec(recipe._replace(columns=columns), shape.heads, rows))
        return
    few = 5 if shape.heads <= 12 else 2
    for i, recipe in enumerate(_RECIPES):
        for rows in (0, 1, few, max(few, _VERIFY_TILES // shape.heads)) if i == 0 else (few,):
            yield VerifyCase(f"B={rows} {recipe}", _verify(recipe, shape.heads, rows))


def _make(recipe: Recipe, heads: int, rows: int, device: torch.device, count: int) -> list[BufferSet]:
    def draw(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    outputs = torch.empty(count, 1, rows, heads, DIM, dtype=recipe.activations, device=device)
    made = zip(problems(recipe, heads, rows, draw, count), outputs, strict=True)
    return [buffer_set(p, out) for p, out in made]


def buffer_set(p: Problem, out: torch.Tensor) -> BufferSet:
    """What is timed of ``p``, into a contiguous ``out`` of [1, B, H, D]."""
    heads, recipe = p.heads, p.recipe
    conv_state, state = p.conv_state, p.state
    peer = peers.op("_C", "fused_kda_decode")

    def ours() -> tuple[torch.Tensor]:
        return (call(p, out),)

    def theirs() -> tuple[torch.Tensor]:
        assert peer is not None
        peer(
            *(p.x, p.conv_weight, p.conv_bias, conv_state, p.raw_gate.unsqueeze(0), p.raw_beta.unsqueeze(0)),
            *(p.a_log, p.dt_bias, p.indices, state, out),
            *(recipe.lower_bound, p.output_gate, p.norm_weight, EPS),
        )
        return (out,)

    def sample() -> tuple[torch.Tensor, torch.Tensor]:
        live, null = p.rows()
        return live[:: max(1, len(live) // 4)], null

    def want() -> tuple[torch.Tensor, ...]:
        live, null = sample()
        return (*reference(p, live), torch.zeros_like(out[0, null]))

    def got() -> tuple[torch.Tensor, ...]:
        live, null = sample()
        slots = p.slots(live)
        return out[0, live], conv_state[slots, :, : TAPS - 1], state[slots], out[0, null]

    # The live rows' states in the order of the rows, as the op comes to them; slot 1 is tile 0.
    page = p.pages[0].shape[1]
    tile = state_bytes(heads, recipe)
    order = p.slots(p.rows()[0]).sub(1).int().unsqueeze(1)
    tiles = (page + conv_bytes(heads, recipe), page, len(order), tile)
    pool = p.pages[0].view(-1)

    def rmw(split: int) -> Callable[[], object]:
        return lambda: _core.bench_rmw(pool, *tiles, split, order)

    knows = heads in _PEER_HEADS and recipe.state == FP32 and not recipe.half_null
    return BufferSet(
        subjects={"ours": ours} | ({"peer": theirs} if peer and knows else {}),
        outputs=(out,),
        want=want,
        got=got,
        tolerances=(OUT_TOLERANCE, None, state_tolerance(recipe.state), None),
        floors={str(split): rmw(split) for split in _SPLITS if tile % (2**16 // split) == 0},
    )


def _make_spec(recipe: Recipe, heads: int, rows: int, device: torch.device, count: int) -> list[BufferSet]:
    def draw(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    tokens = rows * recipe.columns
    outputs = torch.empty(count, tokens, heads, DIM, dtype=recipe.activations, device=device)
    made = zip(spec_problems(recipe, heads, rows, draw, count, full=True), outputs, strict=True)
    return [spec_buffer_set(s, out) for s, out in made]


def spec_buffer_set(s: SpecProblem, out: torch.Tensor) -> BufferSet:
    """What is timed of ``s``, into a contiguous ``out`` of [T, H, D]."""
    p, rows = s.tokens, s.starts.shape[0] - 1
    recipe, heads = p.recipe, p.heads
    sample = torch.arange(0, rows, max(1, rows // 4), device=out.device)

    def want() -> tuple[torch.Tensor, ...]:
        right = spec_reference(s, sample)
        return right.out, right.conv, right.state

    def got() -> tuple[torch.Tensor, ...]:
        slots = s.indices.long()[sample]
        tokens = s.starts[sample].long() + torch.arange(recipe.columns, device=out.device).unsqueeze(1)
        return out[tokens.flatten()], p.conv_state[slots[:, 0]], p.state[slots.T.flatten()]

    page, tile = p.pages[0].shape[1], state_bytes(heads, recipe)
    tiles = (page + conv_bytes(heads, recipe), page, rows, tile)
    pool = p.pages[0].view(-1)
    starts = s.indices.gather(1, s.accepted.long().unsqueeze(1) - 1)
    order = torch.cat([starts, s.indices], 1).sub(1).int()

    def rmw(split: int) -> Callable[[], object]:
        return lambda: _core.bench_rmw(pool, *tiles, split, order)

    return BufferSet(
        subjects={"ours": lambda: (call_spec(s, out),)},
        outputs=(out,),
        want=want,
        got=got,
        tolerances=(OUT_TOLERANCE, None, state_tolerance(recipe.state)),
        floors={str(split): rmw(split) for split in _SPLITS if tile % (2**16 // split) == 0},
    )


def live_rows(recipe: Recipe, rows: int) -> int:
    """How many of ``rows`` are not null."""
    return rows // 2 if recipe.half_null else rows


def bytes_moved(recipe: Recipe, heads: int, rows: int) -> tuple[int, int]:
    """Bytes that the op has to read and to write: of null rows an index and zeros only, weights once."""
    live = live_rows(recipe, rows)
    caches = live * (conv_bytes(heads, recipe) + state_bytes(heads, recipe))
    out = rows * heads * DIM * 2
    # q, k, v and two gates of DIM, and a beta.
    read = live * heads * (5 * DIM + 1) * 2 + rows * 4
    weights = (3 * TAPS * heads * DIM + heads + heads * DIM + DIM) * 4
    return caches + read + weights, caches + out


def spec_bytes_moved(recipe: Recipe, heads: int, rows: int) -> tuple[int, int]:
    """The same for rows of ``recipe.columns`` tokens: a row's state is read once and written per token."""
    tokens, state = rows * recipe.columns, state_bytes(heads, recipe)
    column = 3 * heads * DIM * 2
    read = (
        rows * (state + (TAPS - 1) * column) + tokens * (heads * (5 * DIM + 1) * 2 + 4) + (2 * rows + 1) * 4
    )
    weights = (3 * TAPS * heads * DIM + heads + heads * DIM + DIM) * 4
    return read + weights, tokens * (state + heads * DIM * 2) + (tokens + 2 * rows) * column


def _spec_bench_cases(heads: int, quick: bool) -> Iterator[BenchCase]:
    recipes = [Recipe(columns=4)]
    if heads in _BENCH_ROWS and not quick:
        recipes += [
            Recipe("DS", columns=4),
            Recipe("SD", BF16, columns=4),
            *(Recipe(columns=n) for n in (2, 8)),
        ]
    for recipe in recipes:
        for rows in (8, 32) if quick else _SPEC_ROWS if heads in _BENCH_ROWS else _OTHER_ROWS[:3]:
            read, written = spec_bytes_moved(recipe, heads, rows)
            page = conv_bytes(heads, recipe) + state_bytes(heads, recipe)
            yield BenchCase(
                op="kda_decode_spec",
                params={
                    "H": heads,
                    "state": dtype_name(recipe.state),
                    "layout": recipe.layout,
                    "tokens": recipe.columns,
                    "B": rows,
                },
                bytes_read=read,
                bytes_written=written,
                set_bytes=read + written + page,
                make=lambda device, count, recipe=recipe, rows=rows: _make_spec(  # type: ignore[misc]
                    recipe, heads, rows, device, count
                ),
            )


def _bench_recipes(heads: int) -> Iterator[tuple[Recipe, tuple[int, ...]]]:
    rows = _BENCH_ROWS.get(heads, _OTHER_ROWS)
    yield Recipe(), rows
    if heads in _BENCH_ROWS:
        yield Recipe("DS"), rows
    if heads in _BF16_ROWS:
        yield Recipe("SD", BF16), _BF16_ROWS[heads]
    if heads in _BENCH_ROWS:
        yield Recipe(half_null=True), _HALF_NULL_ROWS


def _bench_cases(op: str, shape: Shape, quick: bool) -> Iterator[BenchCase]:
    heads = shape.heads
    if op == "kda_decode_spec":
        yield from _spec_bench_cases(heads, quick)
        return
    for recipe, all_rows in _bench_recipes(heads):
        for rows in all_rows:
            if quick and rows not in (_QUICK_ROWS if recipe == Recipe() else _QUICK_VARIANT_ROWS):
                continue
            read, written = bytes_moved(recipe, heads, rows)
            page = conv_bytes(heads, recipe) + state_bytes(heads, recipe)
            yield BenchCase(
                op=op,
                params={
                    "H": heads,
                    "state": dtype_name(recipe.state),
                    "layout": recipe.layout,
                    "rows": "half null" if recipe.half_null else "live",
                    "B": rows,
                },
                bytes_read=read,
                bytes_written=written,
                set_bytes=read + written + (rows + 1 - 2 * live_rows(recipe, rows)) * page,
                make=lambda device, count, recipe=recipe, rows=rows: _make(  # type: ignore[misc]
                    recipe, heads, rows, device, count
                ),
            )


SPEC = OpSpec(
    stem="kda_decode",
    shape=_shape,
    verify_cases=_verify_cases,
    bench_shapes=tuple(Shape(heads) for heads in (3, 6, 8, 12, 16, 24, 32, 96)),
    bench_cases=_bench_cases,
    peer="fused_kda_decode, for 12, 24, 48 and 96 heads, fp32 states and no null rows",
    floor=Floor(
        name="rmw",
        title="read and rewrite of the states",
        text="`rmw` is the floor: a kernel that only reads and rewrites the recurrent states of the live "
        "rows in the order of the rows, as their indices say, the fastest of 1, 2, 4, 8 and 16 blocks per "
        "64 KiB; `split` says which. For several tokens a row it reads each state once and writes it "
        "once per token, to their slots.",
        choice="split",
    ),
    agreement="(plain torch in fp64, for a sample of the rows: conv states and zeros of null rows bit by "
    "bit, outputs and states within the op's tolerance, and ten times that for the peer)",
)
