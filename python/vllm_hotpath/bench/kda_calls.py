"""Calls of the KDA decode: how to make them, and an fp64 reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from vllm_hotpath.ops import kda_decode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Draw = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

DIM = 128
"""Of keys and of values: a head's state is DIM x DIM."""

TAPS = 4
"""Of the convolution."""

EPS = 1e-5
"""Of the norm."""


class Recipe(NamedTuple):
    """One way to make inputs and to call the op; the defaults are vLLM's for Kimi-K3.

    ``odd``: odd row strides and bases, a conv state of five columns, pages with a gap, outputs with gaps.
    ``pieces``: three tensors of q, k and v, log decay and activated beta in fp32, as Kimi-Linear has them.
    ``slot_zero``: slot 0 is real and -1 is null. ``strided``: int64 indices out of a wider table.
    ``columns``: most tokens of a row, for several of which the conv state is as much wider.
    """

    layout: str = "SD"
    state: torch.dtype = FP32
    activations: torch.dtype = BF16
    lower_bound: float | None = -5.0
    norm: bool = True
    half_null: bool = False
    shared: bool = True
    bias: bool = False
    odd: bool = False
    pieces: bool = False
    slot_zero: bool = False
    strided: bool = False
    columns: int = 1

    @property
    def width(self) -> int:
        """Columns of the conv state; two more than a row has tokens, or three, are used."""
        return self.columns + (TAPS if self.odd else TAPS - 2)

    @property
    def null_index(self) -> int:
        """The highest index of a null row."""
        return -1 if self.slot_zero else 0

    def __str__(self) -> str:
        words = [self.layout, *(dtype_name(t) for t in dict.fromkeys((self.state, self.activations)))]
        words.append("unbounded" if self.lower_bound is None else f"bound {self.lower_bound:g}")
        flags = {name: getattr(self, name) for name in self._fields[5:-1]}
        words += [name.replace("_", " ") for name, value in flags.items() if value and name != "norm"]
        return " ".join(words + ["no norm"] * (not self.norm)).replace("shared", "shared pages")


def dtype_name(dtype: torch.dtype) -> str:
    """``bf16``, ``fp16`` or ``fp32``."""
    return {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[dtype]


class Problem(NamedTuple):
    """The tensors of one call with ``B`` rows: q, k and v side by side, the pools' bytes as [slots, page]."""

    recipe: Recipe
    x: torch.Tensor
    conv_weight: torch.Tensor
    conv_bias: torch.Tensor | None
    raw_gate: torch.Tensor
    raw_beta: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    output_gate: torch.Tensor | None
    norm_weight: torch.Tensor | None
    indices: torch.Tensor
    pages: tuple[torch.Tensor, ...]

    @property
    def heads(self) -> int:
        """``H``."""
        return self.a_log.shape[0]

    @property
    def conv_state(self) -> torch.Tensor:
        """[slots, 3*H*D, W], a view of the pages."""
        return self.conv_state_of(self.pages)

    @property
    def state(self) -> torch.Tensor:
        """[slots, H, V, K], a view of the pages."""
        return self.state_of(self.pages)

    def conv_state_of(self, pages: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The conv states in ``pages``, which are like this call's."""
        channels, width = 3 * self.heads * DIM, self.recipe.width
        used = pages[0][:, : channels * width * 2].view(self.recipe.activations)
        if self.recipe.layout == "DS":
            return used.view(-1, channels, width)
        return used.view(-1, width, channels).transpose(1, 2)

    def state_of(self, pages: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The recurrent states in ``pages``, which are like this call's."""
        start = conv_bytes(self.heads, self.recipe) if self.recipe.shared else 0
        used = pages[-1][:, start : start + state_bytes(self.heads, self.recipe)].view(self.recipe.state)
        return used.view(-1, self.heads, DIM, DIM)

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Live rows and null rows."""
        live = self.indices.reshape(-1) > self.recipe.null_index
        return live.nonzero()[:, 0], (~live).nonzero()[:, 0]

    def slots(self, rows: torch.Tensor) -> torch.Tensor:
        """The slots of live rows."""
        return self.indices.reshape(-1)[rows].long()


def conv_bytes(heads: int, recipe: Recipe) -> int:
    """Bytes of a slot's conv state."""
    return 3 * heads * DIM * recipe.width * 2


def state_bytes(heads: int, recipe: Recipe) -> int:
    """Bytes of a slot's recurrent state."""
    return heads * DIM * DIM * recipe.state.itemsize


def problems(recipe: Recipe, heads: int, rows: int, draw: Draw, count: int) -> Iterator[Problem]:
    """Make ``count`` calls as slices of a few allocations.

    Args:
        recipe: how to make them.
        heads: ``H``.
        rows: ``B``. There is one slot more than rows, and half of the rows are null if asked for.
        draw: ``draw(shape, dtype)`` makes standard normal tensors on the device.
        count: how many.
    """
    act, channels = recipe.activations, heads * DIM
    shift, gap = (1, 3) if recipe.odd else (0, 0)
    # A row of the fused projection: q, k, v, output gate, a low-rank part of DIM, beta.
    row = 4 * channels + DIM + heads + gap
    fused = draw((count, rows * row + shift), act)[:, shift:].unflatten(1, (rows, row))
    gate = draw((count, rows, channels + gap), FP32 if recipe.pieces else act)[..., :channels]
    beta = fused[..., 4 * channels + DIM : 4 * channels + DIM + heads]
    if recipe.pieces:
        gate, beta = -gate.abs(), draw((count, rows, heads), FP32).sigmoid()
    weight = draw((count, 3, TAPS, channels), FP32)
    bias = draw((count, 3 * channels), FP32)
    a_log, dt_bias = draw((count, heads), FP32), draw((count, channels), FP32)
    norm_weight = draw((count, DIM), FP32)

    conv, state = conv_bytes(heads, recipe), state_bytes(heads, recipe)
    sizes = (conv + state + 16 * gap,) if recipe.shared else (conv + 16 * gap, state + 16 * gap)
    slots = rows + 1
    pools = [torch.zeros(count, slots, size, dtype=torch.uint8, device=fused.device) for size in sizes]
    pools[0][..., :conv].view(act).copy_(draw((count, slots, conv // 2), act))
    at = conv if recipe.shared else 0
    elements = state // recipe.state.itemsize
    pools[-1][..., at : at + state].view(recipe.state).copy_(draw((count, slots, elements), recipe.state))

    # A random order of the slots, and a random half of the rows.
    indices = draw((count, rows), FP32).argsort(1) + (0 if recipe.slot_zero else 1)
    if recipe.half_null:
        null = draw((count, rows), FP32).argsort(1) < (rows + 1) // 2
        indices.masked_fill_(null, recipe.null_index)
    if recipe.strided:
        indices = indices.repeat_interleave(3, dim=1)[:, ::3].unsqueeze(-1)
    else:
        indices = indices.to(torch.int32)

    for i in range(count):
        yield Problem(
            recipe=recipe,
            x=fused[i, :, : 3 * channels],
            conv_weight=weight[i],
            conv_bias=bias[i] if recipe.bias else None,
            raw_gate=gate[i].unflatten(1, (heads, DIM)),
            raw_beta=beta[i],
            a_log=a_log[i],
            dt_bias=dt_bias[i],
            output_gate=fused[i, :, 3 * channels : 4 * channels].unflatten(1, (heads, DIM))
            if recipe.norm
            else None,
            norm_weight=norm_weight[i] if recipe.norm else None,
            indices=indices[i],
            pages=tuple(pool[i] for pool in pools),
        )


def reference(p: Problem, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the op has to leave for live ``rows``: out [R, H, D], the conv state's three columns and state.

    The maths of Kimi Delta Attention (arXiv:2510.26692) in fp64, without rounding in between.
    """
    slots = p.slots(rows)
    window = torch.cat([p.conv_state[slots, :, : TAPS - 1], p.x[rows].unsqueeze(-1)], dim=-1)
    out, h = _step(p, rows, window, p.state[slots].double())
    return out, window[..., 1:], h


def _step(
    p: Problem, rows: torch.Tensor, window: torch.Tensor, h: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out [R, H, D] and state behind the tokens ``rows``, from their windows [R, 3*H*D, 4] and states."""
    heads = p.heads
    mixed = (window.double() * p.conv_weight.double().transpose(1, 2).reshape(-1, TAPS)).sum(-1)
    if p.conv_bias is not None:
        mixed = mixed + p.conv_bias
    q, k, v = torch.nn.functional.silu(mixed).unflatten(1, (3, heads, DIM)).unbind(1)
    q = q * (q.square().sum(-1, keepdim=True) + 1e-6).rsqrt() * DIM**-0.5
    k = k * (k.square().sum(-1, keepdim=True) + 1e-6).rsqrt()

    log_decay, beta = p.raw_gate[rows].double(), p.raw_beta[rows].double()
    if not p.recipe.pieces:
        rate, shifted = p.a_log.double().exp().unsqueeze(-1), log_decay + p.dt_bias.view(heads, DIM)
        if p.recipe.lower_bound is None:
            log_decay = -rate * torch.nn.functional.softplus(shifted)
        else:
            log_decay = p.recipe.lower_bound * (rate * shifted).sigmoid()
        beta = beta.sigmoid()

    h = h * log_decay.exp().unsqueeze(-2)
    delta = (v - (h @ k.unsqueeze(-1)).squeeze(-1)) * beta.unsqueeze(-1)
    h += delta.unsqueeze(-1) * k.unsqueeze(-2)
    out = (h @ q.unsqueeze(-1)).squeeze(-1)
    if p.output_gate is not None and p.norm_weight is not None:
        out = out * (out.square().mean(-1, keepdim=True) + EPS).rsqrt() * p.norm_weight
        out = out * p.output_gate[rows].double().sigmoid()
    return out, h


def call(p: Problem, out: torch.Tensor) -> torch.Tensor:
    """Run the op on ``p``, into ``out`` of [B, H, D] or [1, B, H, D]."""
    arguments, options = _arguments(p)
    return kda_decode.kda_decode(*[*arguments, p.indices], **options, out=out)


def _arguments(p: Problem) -> tuple[list[Any], dict[str, Any]]:
    """What the ops have in common: arguments up to the state, and options."""
    recipe, channels = p.recipe, p.heads * DIM
    x: kda_decode.Tensors = p.x
    weight: kda_decode.Tensors = p.conv_weight
    conv_state: kda_decode.Tensors = p.conv_state
    bias: kda_decode.Tensors | None = p.conv_bias
    if recipe.pieces:
        x, conv_state = p.x.split(channels, 1), p.conv_state.split(channels, 1)
        weight = p.conv_weight.transpose(1, 2).unsqueeze(2).contiguous().unbind(0)
        bias = None if p.conv_bias is None else p.conv_bias.split(channels)
    arguments = [
        x,
        weight,
        conv_state,
        p.raw_gate,
        p.raw_beta,
        None if recipe.pieces else p.a_log,
        None if recipe.pieces else p.dt_bias,
        p.state,
    ]
    options = {
        "conv_bias": bias,
        "lower_bound": None if recipe.pieces else recipe.lower_bound,
        "output_gate": p.output_gate,
        "norm_weight": p.norm_weight,
        "norm_eps": EPS,
        "null_index": recipe.null_index,
        "gate_is_log_decay": recipe.pieces,
        "beta_is_sigmoid": recipe.pieces,
    }
    return arguments, options


class SpecProblem(NamedTuple):
    """A call of several tokens a row: ``tokens`` has one slot for every token that rows may have."""

    tokens: Problem
    starts: torch.Tensor
    accepted: torch.Tensor

    @property
    def indices(self) -> torch.Tensor:
        """[N, S], a view."""
        flat = self.tokens.indices
        flat = flat[:, 0] if flat.dim() == 2 else flat
        table: torch.Tensor = flat.unflatten(0, (-1, self.tokens.recipe.columns))
        return table

    def live(self) -> torch.Tensor:
        """Numbers of the rows that have tokens and slots to start from."""
        indices, null = self.indices.long(), self.tokens.recipe.null_index
        first = indices.gather(1, self.accepted.long().unsqueeze(1) - 1)[:, 0]
        return ((self.starts.diff() > 0) & (indices[:, 0] > null) & (first > null)).nonzero()[:, 0]


def spec_problems(
    recipe: Recipe, heads: int, rows: int, draw: Draw, count: int, *, full: bool
) -> Iterator[SpecProblem]:
    """Make ``count`` calls of ``rows`` rows of up to ``recipe.columns`` tokens, or of so many if ``full``."""
    columns = recipe.columns

    def numbers(least: int) -> torch.Tensor:
        uniform = draw((rows,), FP32).mul(0.7).erf().add(1).mul(0.5)
        return (least + uniform * (columns + 1 - least)).int().clamp(least, columns)

    for tokens in problems(recipe, heads, rows * columns, draw, count):
        lengths = numbers(0)
        lengths = torch.full_like(lengths, columns) if full else lengths
        starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0).int()])
        yield SpecProblem(tokens, starts, numbers(1))


class SpecResult(NamedTuple):
    """What the op has to leave for some of the live rows."""

    tokens: torch.Tensor
    """Their tokens."""
    out: torch.Tensor
    """``[tokens, H, D]``."""
    conv_slots: torch.Tensor
    """Slots of their conv states."""
    conv: torch.Tensor
    """``[rows, 3*H*D, W]``."""
    slots: torch.Tensor
    """Slots that take states."""
    state: torch.Tensor
    """``[slots, H, V, K]``."""


def spec_reference(s: SpecProblem, rows: torch.Tensor) -> SpecResult:
    """Token by token, as ``reference``."""
    p = s.tokens
    indices, columns = s.indices.long()[rows], p.recipe.columns
    begin, accepted = s.starts[rows].long(), s.accepted[rows].long()
    lengths = s.starts.diff()[rows]
    conv = p.conv_state[indices[:, 0]].clone()
    taps = accepted.view(-1, 1, 1) - 1 + torch.arange(TAPS - 1, device=conv.device)
    window = conv.gather(2, taps.expand(-1, conv.shape[1], -1))
    conv[..., : TAPS - 2] = window[..., 1:]
    h = p.state[indices.gather(1, accepted.unsqueeze(1) - 1)[:, 0]].double()
    tokens, outs, slots, states = [], [], [], []
    for step in range(columns):
        going = (lengths > step).nonzero()[:, 0]
        token = begin[going] + step
        seen = torch.cat([window[going], p.x[token].unsqueeze(-1)], dim=-1)
        window[going] = seen[..., 1:]
        conv[going, :, TAPS - 2 + step] = p.x[token]
        out, h[going] = _step(p, token, seen, h[going])
        kept = (indices[going, step] > p.recipe.null_index).nonzero()[:, 0]
        tokens.append(token)
        outs.append(out)
        slots.append(indices[going, step][kept])
        states.append(h[going][kept])
    return SpecResult(
        torch.cat(tokens), torch.cat(outs), indices[:, 0], conv, torch.cat(slots), torch.cat(states)
    )


def call_spec(s: SpecProblem, out: torch.Tensor) -> torch.Tensor:
    """Run the op on ``s``, into ``out`` of [T, H, D]."""
    arguments, options = _arguments(s.tokens)
    arguments += [s.indices, s.starts, s.accepted]
    return kda_decode.kda_decode_spec(*arguments, **options, out=out)
