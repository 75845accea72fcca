"""Calls of ``kda_decode`` in every form callers use, and the check of what a call may and may not write."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from tests.helpers import BF16, FP16, POISON, as_bits, assert_same_bits, random_patterns
from tests.reference import kda_decode as reference
from vllm_hotpath.ops.kda_decode import kda_decode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import Self

    from tests.reference.kda_decode import Decoded

D = 128
HEADS = (1, 3, 6, 8, 12, 16, 24, 32, 48, 64, 96)
ROWS = (0, 1, 2, 3, 8, 17, 33)

# Error of a state element as a part of the largest of its head, and of a head in norm as a part of its norm.
STATE_TOLERANCE = 1e-5
# Error of an output as a part of the largest of its head, where one step of its own is less: terms cancel.
OUT_TOLERANCE = 1e-3
_TINIEST = torch.finfo(torch.float32).tiny
_MANTISSA = {torch.bfloat16: 7, torch.float16: 10}

POSITIONAL = (
    *("x", "conv_weight", "conv_state", "raw_gate", "raw_beta"),
    *("a_log", "dt_bias", "state", "state_indices"),
)


@dataclass(frozen=True, kw_only=True)
class Form:
    """What a call looks like. The defaults are Kimi-K3's decode at tensor parallelism 32."""

    rows: int = 3
    heads: int = 3
    activation: torch.dtype = BF16
    state_dtype: torch.dtype = torch.float32
    layout: str = "SD"
    window: int = 3
    # Rows of x, gates and beta: "contiguous", or "wide": odd columns of a projection with an odd row stride.
    inputs: str = "contiguous"
    # q, k and v as three tensors; of their weights [H*D, 1, 4] in this dtype.
    parts: bool = False
    weight_dtype: torch.dtype = torch.float32
    bias: bool = False
    lower_bound: float | None = -5.0
    norm: bool = True
    log_decay: bool = False
    sigmoid_beta: bool = False
    gate_dtype: torch.dtype | None = None
    beta_dtype: torch.dtype | None = None
    leading_one: bool = False
    index_dtype: torch.dtype = torch.int32
    # "rows", "column" ([B, 1]), or column 0 of [B, 8], the rest of it out of range, as [B] ("stride 8") or as
    # [B, 1] ("block table").
    indices: str = "rows"
    null_index: int = 0
    null_rows: tuple[int, ...] = ()
    # Convolution and recurrent state in one page, with nobody's bytes between and behind; or each in its own.
    paged: bool = True
    amplitude: float = 1.0
    state_amplitude: float = 0.1
    scale: float | None = None
    extra_slots: int = 3
    options: dict[str, Any] = field(default_factory=dict)


STATE_DTYPES = (torch.float32, BF16, FP16)

# A call of every kind, by name.
FORMS = {
    "kimi k3": Form(),
    "kimi k3, wide inputs": Form(inputs="wide", leading_one=True),
    "DS": Form(layout="DS"),
    "unbounded": Form(lower_bound=None),
    "no norm": Form(norm=False),
    "unbounded, no norm, DS": Form(lower_bound=None, norm=False, layout="DS", inputs="wide"),
    "bias": Form(bias=True),
    "fp16": Form(activation=FP16, bias=True, inputs="wide"),
    "bf16 state": Form(state_dtype=BF16),
    "bf16 state, DS": Form(state_dtype=BF16, layout="DS", inputs="wide"),
    "fp16 state": Form(state_dtype=FP16),
    "fp16 throughout": Form(activation=FP16, state_dtype=FP16, layout="DS"),
    "fp32 gate and beta": Form(gate_dtype=torch.float32, beta_dtype=torch.float32, inputs="wide"),
    "log decay": Form(log_decay=True),
    "log decay in fp32": Form(log_decay=True, gate_dtype=torch.float32, lower_bound=None),
    "activated beta": Form(sigmoid_beta=True),
    "activated beta in fp32": Form(sigmoid_beta=True, beta_dtype=torch.float32, layout="DS"),
    "three tensors": Form(parts=True),
    "three tensors, DS": Form(parts=True, layout="DS", inputs="wide", bias=True),
    "kimi linear": Form(
        *(),
        parts=True,
        paged=False,
        log_decay=True,
        gate_dtype=torch.float32,
        sigmoid_beta=True,
        beta_dtype=torch.float32,
        norm=False,
        weight_dtype=BF16,
        bias=True,
    ),
    "kimi linear in fp16": Form(
        *(),
        parts=True,
        weight_dtype=FP16,
        activation=FP16,
        lower_bound=None,
        bias=True,
        layout="DS",
    ),
    "own pools": Form(paged=False),
    "window of 4": Form(window=4),
    "window of 4, DS": Form(window=4, layout="DS"),
    "window of 7": Form(window=7, bias=True),
    "window of 7, DS": Form(window=7, layout="DS"),
    "scale": Form(scale=0.7),
    "int64 indices": Form(index_dtype=torch.int64),
    "eps": Form(options={"norm_eps": 0.5}),
    "null rows": Form(rows=8, null_rows=(0, 3, 7)),
    "null rows, DS, bf16 state": Form(rows=5, null_rows=(0, 4), layout="DS", state_dtype=BF16),
    "only null rows": Form(rows=3, null_rows=(0, 1, 2)),
    "slot 0 is real": Form(null_index=-1, extra_slots=0),
    "slot 0 is real, null rows": Form(rows=6, null_index=-1, null_rows=(1, 2), extra_slots=0),
    "small": Form(amplitude=1e-4, state_amplitude=1e-4),
    "large": Form(amplitude=100.0, state_amplitude=100.0),
    "zero state": Form(state_amplitude=0.0),
}


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of one argument."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        yield from value


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Every byte of the tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


class Call:
    """Arguments of one call by name."""

    def __init__(self, args: dict[str, Any]) -> None:
        self.args = args

    def __getitem__(self, name: str) -> Any:
        return self.args[name]

    def run(self, **changes: Any) -> torch.Tensor:
        args = self.args | changes
        return kda_decode(*[args.pop(name) for name in POSITIONAL], **args)

    def reference(self, function: Callable[..., Decoded] = reference.decode, **changes: Any) -> Decoded:
        args = self.args | changes
        args.pop("out", None)
        return function(*[args.pop(name) for name in POSITIONAL], **args)

    def changed(self, **changes: Any) -> Self:
        return type(self)(self.args | changes)

    def storages(self) -> dict[int, torch.Tensor]:
        """Every storage behind the arguments, by address, as bytes."""
        found = [whole(tensor) for value in self.args.values() for tensor in tensors(value)]
        return {memory.data_ptr(): memory for memory in found}

    def copy(self, device: torch.device | str | None = None) -> Self:
        """The same views of copied memory; what shares memory still does."""
        copies = {address: memory.to(device, copy=True) for address, memory in self.storages().items()}

        def moved(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                memory = copies[value.untyped_storage().data_ptr()]
                flat = memory[: memory.numel() // value.element_size() * value.element_size()]
                # Not a view of bytes in autograd's eyes: set_ takes any offset and stride.
                view = torch.empty(0, dtype=value.dtype, device=memory.device)
                view.set_(flat.untyped_storage(), value.storage_offset(), value.shape, value.stride())
                return view
            return [moved(part) for part in value] if isinstance(value, (list, tuple)) else value

        return type(self)({name: moved(value) for name, value in self.args.items()})


def _normal(
    shape: Sequence[int], dtype: torch.dtype, rng: torch.Generator, factor: float = 1.0
) -> torch.Tensor:
    return (torch.randn(tuple(shape), generator=rng) * factor).to(dtype)


def _wide(values: Sequence[torch.Tensor], device: torch.device, rng: torch.Generator) -> list[torch.Tensor]:
    """Views of one projection per dtype: odd row stride, odd first column, random bit patterns in between."""
    rows = values[0].shape[0]
    columns, widths = [], dict.fromkeys((value.dtype for value in values), 1)
    for value in values:
        columns.append(slice(widths[value.dtype], widths[value.dtype] + math.prod(value.shape[1:])))
        widths[value.dtype] = columns[-1].stop + 1
    projections = {dtype: random_patterns((rows, width | 1), dtype, rng) for dtype, width in widths.items()}
    for value, column in zip(values, columns, strict=True):
        projections[value.dtype][:, column] = value.flatten(1)
    moved = {dtype: projection.to(device) for dtype, projection in projections.items()}
    return [
        moved[value.dtype][:, column].unflatten(1, value.shape[1:])
        for value, column in zip(values, columns, strict=True)
    ]


def _random_memory(size: int, device: torch.device, rng: torch.Generator) -> torch.Tensor:
    words = torch.randint(-(2**63), 2**63 - 1, (size // 8 + 1,), dtype=torch.int64, generator=rng)
    return words.view(torch.uint8)[:size].to(device)


def _caches(form: Form, slots: int, device: torch.device, rng: torch.Generator) -> tuple[Any, torch.Tensor]:
    """Convolution and recurrent pools of random bit patterns, NaN and Inf among them."""
    heads, channels = form.heads, form.heads * D
    parts = 3 if form.parts else 1
    width = 3 * channels // parts
    conv_bytes = width * form.window * 2
    inner = (1, width) if form.layout == "SD" else (form.window, 1)
    state_bytes = heads * D * D * form.state_dtype.itemsize
    sizes = [conv_bytes + 16] * parts + [state_bytes + 48]
    page = sum(sizes) if form.paged else None

    shared = _random_memory(slots * page, device, rng) if page else None
    pools, start = [], 0
    for size in sizes:
        memory = shared
        if memory is None:
            memory = _random_memory(slots * size, device, rng)
        is_state = len(pools) == parts
        dtype = form.state_dtype if is_state else form.activation
        shape = (slots, heads, D, D) if is_state else (slots, width, form.window)
        strides = ((page or size) // dtype.itemsize, *((D * D, D, 1) if is_state else inner))
        pool = torch.empty(0, dtype=dtype, device=device)
        pools.append(pool.set_(memory.untyped_storage(), start // dtype.itemsize, shape, strides))
        start += size if page else 0
    return pools[:-1] if form.parts else pools[0], pools[-1]


def _indices(form: Form, slots: int, rng: torch.Generator) -> torch.Tensor:
    first = form.null_index + 1
    values = torch.randperm(slots - first, generator=rng)[: form.rows] + first
    for count, row in enumerate(form.null_rows):
        values[row] = form.null_index - (0, 1, 7)[count % 3]
    return values.to(form.index_dtype)


def _index_view(form: Form, values: torch.Tensor, device: torch.device) -> torch.Tensor:
    rows = form.rows
    if form.indices in {"rows", "column"}:
        values = values.to(device)
        return values if form.indices == "rows" else values.unsqueeze(1)
    table = torch.full((rows, 8), 2**31 - 1, dtype=form.index_dtype)
    table[:, 0] = values
    table = table.to(device)
    return table[:, 0] if form.indices == "stride 8" else table[:, :1]


def make_call(device: torch.device, rng: torch.Generator, form: Form | None = None, **changes: Any) -> Call:
    """A random call: finite where a live row reads, random bit patterns wherever it must not."""
    form = dataclasses.replace(form or Form(), **changes)
    rows, heads, channels = form.rows, form.heads, form.heads * D
    kind, gate_kind, beta_kind = form.activation, form.gate_dtype, form.beta_dtype
    slots = rows + form.extra_slots
    values = _indices(form, slots, rng)
    live = values > form.null_index

    gate = _normal((rows, heads, D), torch.float32, rng, 2.0)
    beta = _normal((rows, heads), torch.float32, rng, 2.0)
    gate = -gate.abs() if form.log_decay else gate
    beta = beta.sigmoid() if form.sigmoid_beta else beta
    activations = [
        _normal((rows, 3 * channels), kind, rng, form.amplitude),
        gate.to(gate_kind or kind),
        beta.to(beta_kind or kind),
        _normal((rows, heads, D), kind, rng, 2.0),
    ]
    # From a zero state, the output is v times k.q: with k equal to q that sum cannot cancel to nothing.
    twins = form.state_amplitude == 0.0
    if twins:
        activations[0][:, channels : 2 * channels] = activations[0][:, :channels]
    for tensor in activations:
        tensor[~live] = math.nan
    if form.parts:
        activations[:1] = activations[0].chunk(3, dim=1)
    if form.inputs == "wide":
        activations = _wide(activations, device, rng)
    else:
        activations = [tensor.contiguous().to(device) for tensor in activations]
    x = activations[:3] if form.parts else activations[0]
    gate, beta, output_gate = activations[-3:]

    weight = _normal((3, 4, channels), form.weight_dtype, rng, 0.5)
    bias = _normal((3 * channels,), form.weight_dtype, rng, 0.5).to(device) if form.bias else None
    if twins:
        weight[1] = weight[0]
        if bias is not None:
            bias[channels : 2 * channels] = bias[:channels]
    if form.parts:
        weight = [part.T.contiguous().unsqueeze(1).to(device) for part in weight]
        bias = bias if bias is None else [part.clone() for part in bias.chunk(3)]
    else:
        weight = weight.to(device)

    conv_state, state = _caches(form, slots, device, rng)
    for slot in values[live].tolist():
        for pool in tensors(conv_state):
            pool[slot].copy_(_normal(pool.shape[1:], kind, rng, form.amplitude))
        if twins:
            pools = list(tensors(conv_state))
            halves = pools if form.parts else pools[0].split(channels, dim=1)
            halves[1][slot].copy_(halves[0][slot])
        state[slot].copy_(_normal(state.shape[1:], state.dtype, rng, form.state_amplitude))

    args = {
        "x": x,
        "conv_weight": weight,
        "conv_state": conv_state,
        "raw_gate": gate.unsqueeze(0) if form.leading_one else gate,
        "raw_beta": beta.unsqueeze(0) if form.leading_one else beta,
        "a_log": None if form.log_decay else (torch.rand(heads, generator=rng) * 15 + 1).log().to(device),
        "dt_bias": None if form.log_decay else _normal((channels,), torch.float32, rng).to(device),
        "state": state,
        "state_indices": _index_view(form, values, device),
        "conv_bias": bias,
        "lower_bound": None if form.log_decay else form.lower_bound,
        "output_gate": output_gate if form.norm else None,
        "norm_weight": (1 + _normal((D,), torch.float32, rng, 0.2)).to(device) if form.norm else None,
        "scale": form.scale,
        "null_index": form.null_index,
        "gate_is_log_decay": form.log_decay,
        "beta_is_sigmoid": form.sigmoid_beta,
    }
    return Call(args | form.options)


def refill(call: Call, rng: torch.Generator) -> None:
    """New random x, gates and beta of every row, in place."""

    def values(tensor: torch.Tensor) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=rng).to(tensor.device)

    for tensor in tensors(call["x"]):
        tensor.copy_(values(tensor))
    gate, beta = 2 * values(call["raw_gate"]), 2 * values(call["raw_beta"])
    call["raw_gate"].copy_(-gate.abs() if call["gate_is_log_decay"] else gate)
    call["raw_beta"].copy_(beta.sigmoid() if call["beta_is_sigmoid"] else beta)
    if call["output_gate"] is not None:
        call["output_gate"].copy_(2 * values(call["output_gate"]))


def poisoned_out(call: Call, *, row_gap: int = 0, offset: int = 0, leading_one: bool = False) -> torch.Tensor:
    """An output full of 0x7F bytes (NaN in bf16), with poison before, between and behind its rows."""
    rows, (heads, width) = call["state_indices"].shape[0], call["state"].shape[1:3]
    dtype = next(tensors(call["x"])).dtype
    stride = heads * width + row_gap
    count = (offset + rows * stride + 256) * dtype.itemsize
    memory = torch.full((count,), POISON, dtype=torch.uint8, device=call["state"].device).view(dtype)
    out = memory.as_strided((rows, heads, width), (stride, width, 1), offset)
    return out.unsqueeze(0) if leading_one else out


def one_step(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Distance of neighbouring values of ``dtype`` at the magnitude of ``x``, as float64."""
    least = torch.finfo(dtype).tiny
    exponent = torch.frexp(x.double().abs().clamp(min=least)).exponent - 1
    return torch.exp2((exponent - _MANTISSA[dtype]).double())


def assert_state_close(got: torch.Tensor, want: torch.Tensor, tolerance: float = STATE_TOLERANCE) -> None:
    """``[n, H, V, K]`` in the state's dtype against float64.

    Each element is within ``tolerance`` of the largest of its head, plus half a step of its dtype if that has
    16 bits; each head's fp32 error is within ``tolerance`` of the head in norm. Rounding is to nearest: of
    16-bit elements at least 99 % are the rounded reference itself.
    """
    if not got.numel():
        return
    assert got.isfinite().all(), "state: not finite"
    error = (got.double() - want).abs()
    allowed = (want.abs().amax((-1, -2), keepdim=True) * tolerance).clamp(min=_TINIEST)
    if got.dtype == torch.float32:
        norms = want.flatten(2).norm(dim=-1)
        worst = (error.flatten(2).norm(dim=-1) / norms.clamp(min=_TINIEST)).max().item()
        assert worst <= tolerance or norms.max() <= _TINIEST, f"state: a head is off by {worst:.2e} in norm"
    else:
        allowed = allowed + one_step(want.abs() + allowed, got.dtype) / 2
        exact = (got == want.to(got.dtype)).double().mean().item()
        assert exact >= 0.99, f"state: only {exact:.4f} of the elements are the rounded reference"
    excess = (error / allowed).max().item()
    assert excess <= 1, f"state: an element is off by {excess:.3g} times what is allowed"


def assert_out_close(got: torch.Tensor, want: torch.Tensor) -> None:
    """``[B, H, D]`` against float64: within a step of its dtype, or ``OUT_TOLERANCE`` of its head's peak."""
    if not got.numel():
        return
    got = got.reshape(want.shape)
    assert got.isfinite().all(), "out: not finite"
    peak = want.abs().amax(-1, keepdim=True) * OUT_TOLERANCE
    excess = ((got.double() - want).abs() / torch.maximum(one_step(want, got.dtype), peak)).max().item()
    assert excess <= 1, f"out: an element is off by {excess:.3g} times what is allowed"


def conv_windows(call: Call) -> list[torch.Tensor]:
    """The first three columns of the q, k and v parts of the pool, ``[slots, H*D, 3]`` views."""
    conv = call["conv_state"]
    parts = conv.chunk(3, dim=1) if isinstance(conv, torch.Tensor) else conv
    return [part[..., :3] for part in parts]


def check(
    call: Call,
    *,
    out: torch.Tensor | None = None,
    allocate: bool = False,
    run: Callable[[], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Run the call (or ``run``) and check its results and every byte of every storage behind its arguments.

    Returns the output. Results are within the tolerances above of the float64 reference, the convolution
    state is right to the bit, null rows are +0.0; nothing else in any storage has changed.
    """
    want = call.reference()
    out = poisoned_out(call) if out is None and not allocate else out
    call = call if out is None else call.changed(out=out)
    before = {address: memory.clone() for address, memory in call.storages().items()}
    got = (run or call.run)()
    if out is None:
        assert got.shape == want.out.shape
        assert got.is_contiguous()
        assert got.dtype == next(tensors(call["x"])).dtype
        assert got.device == call["state"].device
    else:
        assert got is out
    assert_out_close(got, want.out)
    dead = torch.ones(want.out.shape[0], dtype=torch.bool, device=got.device)
    dead[want.rows] = False
    assert not as_bits(got.reshape(want.out.shape))[dead].any(), "out: a null row is not +0.0"
    assert_state_close(call["state"][want.slots], want.state)

    for part, window in enumerate(conv_windows(call)):
        assert_same_bits(window[want.slots], want.conv[:, part], f"conv_state of {'qkv'[part]}")
    _assert_only_results_changed(call, before, want.slots)
    return got


def _assert_only_results_changed(call: Call, before: dict[int, torch.Tensor], slots: torch.Tensor) -> None:
    """Put what was there before into a copy of the results' places: the storages are then as they were."""

    def earlier(view: torch.Tensor) -> torch.Tensor:
        memory = before[view.untyped_storage().data_ptr()]
        old = torch.empty(0, dtype=view.dtype, device=view.device)
        return old.set_(memory.untyped_storage(), view.storage_offset(), view.shape, view.stride())

    after = call.copy()
    places = [(after["state"], call["state"])]
    places += list(zip(conv_windows(after), conv_windows(call), strict=True))
    for copied, original in places:
        as_bits(copied)[slots] = as_bits(earlier(original))[slots]
    if call.args.get("out") is not None:
        as_bits(after["out"]).copy_(as_bits(earlier(call["out"])))
    for name, value in call.args.items():
        for original, copied in zip(tensors(value), tensors(after[name]), strict=True):
            old, new = before.pop(original.untyped_storage().data_ptr(), None), whole(copied)
            if old is not None and not torch.equal(old, new):
                where = (old != new).nonzero().reshape(-1)
                raise AssertionError(
                    f"memory of {name}: {where.numel()} bytes changed that no live row owns, "
                    f"from byte {where[0].item()} of {old.numel()}"
                )


def assert_same_results(left: Call, right: Call, left_out: torch.Tensor, right_out: torch.Tensor) -> None:
    """Two calls left the same bits in outputs and pools of any layout (columns beyond the window aside)."""
    assert_same_bits(left_out, right_out, "out")
    assert_same_bits(left["state"], right["state"], "state")
    for one, other in zip(conv_windows(left), conv_windows(right), strict=True):
        assert_same_bits(one, other, "conv_state")


def check_far_slots(device: torch.device, state_dtype: torch.dtype, rng: torch.Generator) -> None:
    """A pool whose slots are 2^30 elements apart gives the bits of a dense one."""
    near = make_call(device, rng, rows=2, extra_slots=1, state_dtype=state_dtype, paged=False)
    near.args["state_indices"] = torch.tensor([2, 1], dtype=torch.int32, device=device)
    for pool in (near["conv_state"], near["state"]):
        pool.copy_(torch.randn(pool.shape, generator=rng) * 0.1)
    far = near.copy()
    for name in ("conv_state", "state"):
        pool = near[name]
        stride = 2**30 + 64
        memory = torch.empty(2 * stride + pool[0].numel(), dtype=pool.dtype, device=device)
        far.args[name] = memory.as_strided(pool.shape, (stride, *pool.stride()[1:]))
        for slot in range(pool.shape[0]):
            far[name][slot].copy_(pool[slot])
    want = check(near)
    got = far.run()
    assert_same_bits(got, want, "out")
    for name in ("conv_state", "state"):
        for slot in range(3):
            assert_same_bits(far[name][slot], near[name][slot], f"{name} of slot {slot}")
