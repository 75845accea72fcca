"""What ``moe_router`` refuses: the message names op, argument, expected and got, and no byte is written."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import vllm_hotpath
from tests.helpers import BF16, FP16, assert_same_bits
from tests.moe_router_cases import FP32, NAN, Call, Form, check, make_call, workspace_elements
from vllm_hotpath import _core
from vllm_hotpath.ops import allocate

if TYPE_CHECKING:
    from collections.abc import Iterator

M, E, K, TOP = 3, 16, 32, 4
FORM = Form(tokens=M, experts=E, hidden=K, top_k=TOP)
OUTPUTS = ("out_logits", "topk_weights", "topk_ids", "workspace")
INPUTS = ("hidden_states", "gate_weight", "bias")
WORKSPACE = workspace_elements(M, E)
INT32, INT64 = torch.int32, torch.int64


class Bad(NamedTuple):
    name: str
    changes: dict[str, Any]
    error: type[Exception] | tuple[type[Exception], ...]
    argument: str
    expected: str
    got: str


def _good_call(device: torch.device | str, rng: torch.Generator) -> Call:
    call = make_call(device, rng, FORM)
    outputs = {
        "out_logits": torch.full((M, E), -7.0, dtype=BF16, device=device),
        "topk_weights": torch.full((M, TOP), -7.0, device=device),
        "topk_ids": torch.full((M, TOP), -7, dtype=INT32, device=device),
        "workspace": torch.full((WORKSPACE,), -7, dtype=INT64, device=device),
    }
    return call.changed(**outputs)


SHAPES = {
    "hidden_states": ((M, K), BF16),
    "gate_weight": ((E, K), BF16),
    "bias": ((E,), FP32),
    "out_logits": ((M, E), BF16),
    "topk_weights": ((M, TOP), FP32),
    "topk_ids": ((M, TOP), INT32),
    "workspace": ((WORKSPACE,), INT64),
}


def _tensor(shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...] | None = None) -> Any:
    """Made on the device of the call."""

    def make(device: torch.device) -> torch.Tensor:
        if strides is None:
            return torch.zeros(shape, dtype=dtype, device=device)
        last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        return torch.zeros(last + 1, dtype=dtype, device=device).as_strided(shape, strides)

    return make


def _bad(
    argument: str,
    what: str,
    value: Any,
    error: type[Exception] | tuple[type[Exception], ...],
    expected: str = "",
    got: str = "",
) -> Bad:
    return Bad(f"{argument} {what}", {argument: value}, error, argument, expected, got)


def _dtype_cases() -> Iterator[Bad]:
    every = (BF16, FP16, FP32, torch.float64, torch.float8_e4m3fn, torch.uint8, INT32, INT64, torch.bool)
    allowed = {"gate_weight": (BF16, FP32)}
    for argument, (shape, right) in SHAPES.items():
        for dtype in every:
            if dtype not in allowed.get(argument, (right,)):
                name = str(dtype).removeprefix("torch.")
                yield _bad(argument, name, _tensor(shape, dtype), TypeError, "dtype ", name)
    for given, other in ((FP32, BF16), (BF16, FP32)):
        name = f"logits into {given}"
        changes = {"logits_dtype": other, "out_logits": _tensor((M, E), given)}
        yield Bad(name, changes, TypeError, "out_logits", "dtype ", "")
    for dtype in (FP16, INT32, "float32", 1):
        yield _bad("logits_dtype", f"{dtype}", dtype, TypeError, "torch.bfloat16 or torch.float32", "")


def _shape_cases() -> Iterator[Bad]:
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {
        "hidden_states": ((), (K,), (M, 1, K), (1, M, K), (33, K), (M, 0), (M, 4), (M, 36)),
        "gate_weight": ((), (K,), (1, E, K), (E, K + 8), (K, E), (E, 0), (7, K), (0, K), (1025, K)),
        "bias": ((), (1,), (E + 1,), (E - 1,), (1, E), (E, 1), (0,)),
        "out_logits": ((), (M * E,), (M, E + 1), (M + 1, E), (M - 1, E), (1, M, E), (E, M), (0, E)),
        "topk_weights": ((), (M * TOP,), (M, TOP + 1), (M + 1, TOP), (M - 1, TOP), (M, TOP, 1), (0, TOP)),
        "topk_ids": ((), (M * TOP,), (M, TOP + 1), (M + 1, TOP), (M - 1, TOP), (M, TOP, 1), (0, TOP)),
        "workspace": ((), (0,), (WORKSPACE - 1,), (M, E)),
    }
    for argument, wrong in shapes.items():
        for shape in wrong:
            value = _tensor(shape, SHAPES[argument][1])
            yield _bad(argument, f"{shape}", value, ValueError, "", "")
    yield _bad("hidden_states", "of another size", _tensor((M, K + 8), BF16), ValueError)._replace(
        argument="gate_weight", expected=f"{K + 8}"
    )
    yield _bad("hidden_states", "too wide", _tensor((M, 2**30 + 8), BF16, (0, 0)), ValueError, f"{2**30}")
    yield _bad("hidden_states", "33 tokens", _tensor((33, K), BF16), ValueError, "at most 32 tokens", "33")


def _stride_cases() -> Iterator[Bad]:
    for argument, strides, expected in (
        ("hidden_states", (2 * K, 2), "stride 1"),
        ("hidden_states", (1, M), "stride 1"),
        ("hidden_states", (K, 0), "stride 1"),
        ("gate_weight", (2 * K, 2), "stride 1"),
        ("gate_weight", (1, E), "stride 1"),
        ("bias", (2,), "contiguous"),
        ("bias", (0,), "contiguous"),
        ("out_logits", (2 * E, 2), "stride 1"),
        ("out_logits", (1, M), "stride 1"),
        ("out_logits", (0, 1), "rows apart"),
        ("out_logits", (E - 1, 1), "rows apart"),
        ("topk_weights", (TOP + 1, 1), "contiguous"),
        ("topk_weights", (1, M), "contiguous"),
        ("topk_ids", (TOP + 1, 1), "contiguous"),
        ("topk_ids", (0, 1), "contiguous"),
        ("workspace", (2,), "contiguous"),
    ):
        shape, dtype = SHAPES[argument]
        value = _tensor(shape, dtype, strides)
        yield _bad(argument, f"strides {strides}", value, ValueError, f"{expected}")


def _option_cases() -> Iterator[Bad]:
    for option, values, expected in (
        ("top_k", (0, -1, 33, E + 1, 2**40), "from 1 to 16"),
        ("n_group", (0, -1, 3, 5, 33, 2**40), "from 1 to 32 and a divisor of the 16 experts"),
        ("topk_group", (0, -1, 2, 2**40), "from 1 to n_group"),
        ("scoring", ("", "sqrtsoftplus", "Sigmoid", "none"), "'sigmoid' or 'softmax'"),
        ("routed_scaling_factor", (NAN, float("inf"), -float("inf")), "a finite number"),
    ):
        for value in values:
            yield _bad(option, f"{value}", value, ValueError, expected, "")
    yield Bad("more than the groups have", {"top_k": 5, "n_group": 8, "topk_group": 2}, ValueError, "top_k",
              "from 1 to 4", "5")  # fmt: skip
    for argument, (shape, dtype) in SHAPES.items():
        for value in (None, 1.0, "x", [1.0], np, torch.Tensor):
            if value is None and argument not in ("hidden_states", "gate_weight"):
                continue
            yield _bad(argument, f"is {value!r:.20}", value, TypeError)

        def meta(device: object, shape: tuple[int, ...] = shape, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device="meta")

        yield _bad(argument, "on meta", meta, (ValueError, TypeError))

        def sparse(
            device: torch.device, shape: tuple[int, ...] = shape, dtype: torch.dtype = dtype
        ) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device).to_sparse()

        yield _bad(argument, "sparse", sparse, (ValueError, TypeError))
        # There is no complex type whose imaginary part is bf16.
        if dtype == FP32:

            def negated(
                device: torch.device, shape: tuple[int, ...] = shape, dtype: torch.dtype = dtype
            ) -> torch.Tensor:
                return torch._neg_view(torch.zeros(shape, dtype=dtype, device=device))

            yield _bad(argument, "negated", negated, (ValueError, TypeError), "negative bit")


CASES = [*_dtype_cases(), *_shape_cases(), *_stride_cases(), *_option_cases()]


def _contents(call: Call) -> list[torch.Tensor]:
    """The bytes of every storage."""
    real = [
        value
        for value in call.args.values()
        if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_meta
    ]
    return [
        torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage()) for value in real
    ]


def _assert_refused(call: Call, error: Any, pattern: str) -> None:
    before = [memory.clone() for memory in _contents(call)]
    with pytest.raises(error) as caught:
        call.run()
    assert re.search(pattern, str(caught.value), re.DOTALL), f"{caught.value!s} does not match {pattern!r}"
    for old, new in zip(before, _contents(call), strict=True):
        assert torch.equal(old, new)


@pytest.mark.parametrize("bad", [pytest.param(bad, id=bad.name) for bad in CASES])
def test_bad_argument_is_named_and_nothing_is_written(
    bad: Bad, device: torch.device, rng: torch.Generator
) -> None:
    good = _good_call(device, rng)
    changes = {
        name: value(device) if callable(value) and not isinstance(value, type) else value
        for name, value in bad.changes.items()
    }
    pattern = rf"moe_router: {bad.argument}: expected .*{re.escape(bad.expected)}.*, got .*{bad.got}"
    _assert_refused(good.changed(**changes), bad.error, pattern)
    if bad.argument not in OUTPUTS:
        allocating = good.changed(**dict.fromkeys(OUTPUTS)).changed(**changes)
        _assert_refused(allocating, bad.error, pattern)
    good.run()
    assert (good["topk_ids"] >= 0).all()


@pytest.mark.parametrize(
    ("out", "other"), [(out, other) for out in OUTPUTS for other in SHAPES if other != out]
)
def test_an_output_that_overlaps_another_argument_is_refused(
    out: str, other: str, device: torch.device, rng: torch.Generator
) -> None:
    good = _good_call(device, rng)
    memory = torch.zeros(4096, dtype=torch.uint8, device=device)
    views = {}
    for name, start in ((other, 0), (out, 32)):
        shape, dtype = SHAPES[name]
        size = dtype.itemsize * int(np.prod(shape))
        views[name] = memory[start : start + size].view(dtype).view(shape)
        views[name].copy_(good[name])
    pair = f"{out}: expected memory apart from {other}|{other}: expected memory apart from {out}"
    pattern = rf"moe_router: ({pair}), got "
    _assert_refused(good.changed(**views), ValueError, pattern)


def test_adjacent_memory_is_no_overlap(device: torch.device, rng: torch.Generator) -> None:
    good = _good_call(device, rng)
    memory = torch.zeros(8192, dtype=torch.uint8, device=device)
    views, start = {}, 0
    for name in sorted(SHAPES, key=lambda name: -SHAPES[name][1].itemsize):
        shape, dtype = SHAPES[name]
        size = dtype.itemsize * int(np.prod(shape))
        views[name] = memory[start : start + size].view(dtype).view(shape)
        views[name].copy_(good[name])
        start += size
    want = good.run()
    got = good.changed(**views).run()
    for one, expected in zip(got, want, strict=True):
        assert_same_bits(one, expected)


def test_a_misaligned_base_is_refused(rng: torch.Generator) -> None:
    """numpy arrays may start at any byte, torch tensors cannot."""
    good = _good_call("cpu", rng)
    for name, numpy_dtype in (
        ("bias", np.float32),
        ("topk_weights", np.float32),
        ("topk_ids", np.int32),
        ("workspace", np.int64),
    ):
        shape, dtype = SHAPES[name]
        count = int(np.prod(shape))
        raw = np.zeros(count * dtype.itemsize + 1, np.uint8)
        array = np.ndarray(shape, numpy_dtype, raw, offset=1)
        with pytest.raises(
            ValueError, match=rf"moe_router: {name}: expected a base aligned to .*, got address"
        ):
            good.run(**{name: array})
        assert not raw.any()


def test_read_only_outputs_are_refused(rng: torch.Generator) -> None:
    good = _good_call("cpu", rng).changed(logits_dtype=FP32)
    for name, numpy_dtype in (
        ("out_logits", np.float32),
        ("topk_weights", np.float32),
        ("topk_ids", np.int32),
        ("workspace", np.int64),
    ):
        array = np.zeros(SHAPES[name][0], numpy_dtype)
        array.flags.writeable = False
        with pytest.raises((ValueError, TypeError), match=rf"moe_router: {name}: expected .*, got "):
            good.run(**({"out_logits": None} | {name: array}))
        assert not array.any()


@pytest.mark.gpu
@pytest.mark.parametrize("home", ["cpu", "cuda"])
def test_one_argument_on_another_device_is_refused(home: str, rng: torch.Generator) -> None:
    away = "cuda" if home == "cpu" else "cpu"
    good = _good_call(home, rng)
    for name in SHAPES:
        pattern = r"moe_router: .*: expected device .*, got "
        _assert_refused(good.changed(**{name: good[name].to(away)}), ValueError, pattern)
    check(make_call("cuda", rng))


def _raw(args: dict[str, Any]) -> Any:
    names = (
        "hidden_states",
        "gate_weight",
        "top_k",
        "bias",
        "n_group",
        "topk_group",
        "scoring",
        "renormalize",
    )
    rest = ("out_logits", "topk_weights", "topk_ids", "workspace")
    return _core.moe_router(
        *[args[name] for name in names],
        args["routed_scaling_factor"],
        None,
        *[args[name] for name in rest],
        allocate,
    )


@pytest.mark.parametrize("argument", list(SHAPES))
def test_fake_tensor_on_the_raw_path_is_an_error(
    argument: str, device: torch.device, rng: torch.Generator
) -> None:
    good = _good_call(device, rng)
    before = [memory.clone() for memory in _contents(good)]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(good[argument])
    with pytest.raises((ValueError, TypeError), match=f"moe_router: {argument}: expected .*, got "):
        _raw(good.args | {argument: fake})
    for old, new in zip(before, _contents(good), strict=True):
        assert torch.equal(old, new)
    assert _raw(good.args)[1] is good["topk_ids"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("top_k", 2.5),
        ("top_k", "4"),
        ("top_k", None),
        ("n_group", 1.5),
        ("topk_group", None),
        ("scoring", 1),
        ("renormalize", "yes"),
        ("routed_scaling_factor", "1"),
    ],
)
def test_options_have_their_types(
    option: str, value: Any, device: torch.device, rng: torch.Generator
) -> None:
    call = _good_call(device, rng)
    before = [memory.clone() for memory in _contents(call)]
    with pytest.raises(TypeError, match=option):
        call.run(**{option: value})
    for old, new in zip(before, _contents(call), strict=True):
        assert torch.equal(old, new)


def test_a_refused_call_leaves_the_op_usable(device: torch.device, rng: torch.Generator) -> None:
    call = make_call(device, rng, FORM)
    for _ in range(3):
        with pytest.raises(ValueError, match="top_k"):
            call.run(top_k=17)
        check(call)
    with pytest.raises(ValueError, match="hidden_states: expected at most 32 tokens"):
        vllm_hotpath.moe_router(
            call["hidden_states"].expand(11, M, K).reshape(33, K), call["gate_weight"], top_k=2
        )
