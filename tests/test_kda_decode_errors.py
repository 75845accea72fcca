"""What ``kda_decode`` refuses: the message names op, argument, expected and got, and not one byte is written.

That live rows have distinct slots inside the pool is the caller's duty: no index can be read on the host
without waiting for the device.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.helpers import BF16, FP16
from tests.kda_cases import Call, D, Form, check, make_call, poisoned_out, tensors
from vllm_hotpath import _core
from vllm_hotpath.ops import allocate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

B, H = 3, 2
C = H * D
FORM = Form(rows=B, heads=H, bias=True)
OUTPUTS = ("conv_state", "state", "out")
FP32 = torch.float32


class Bad(NamedTuple):
    name: str
    change: Callable[[dict[str, Any]], Any]
    error: type[Exception] | tuple[type[Exception], ...]
    argument: str
    expected: str
    got: str
    form: Form = FORM


def _replace(argument: str, make: Callable[[Any], Any]) -> Callable[[dict[str, Any]], Any]:
    def change(args: dict[str, Any]) -> None:
        args[argument] = make(args[argument])

    return change


def _third(argument: str, make: Callable[[Any], Any]) -> Callable[[dict[str, Any]], Any]:
    """Replace the last of three tensors."""
    return _replace(argument, lambda parts: [*parts[:2], make(parts[2])])


def _as(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """Zeros of the same shape and strides in another dtype."""

    def make(like: torch.Tensor) -> torch.Tensor:
        last = sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
        raw = torch.zeros((last + 1) * dtype.itemsize, dtype=torch.uint8, device=like.device)
        return raw.view(dtype).as_strided(like.shape, like.stride())

    return make


def _shaped(*shape: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: torch.zeros(shape, dtype=x.dtype, device=x.device)


def _restrided(*strides: int, offset: int = 0) -> Callable[[torch.Tensor], torch.Tensor]:
    def make(x: torch.Tensor) -> torch.Tensor:
        last = sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True))
        memory = torch.zeros(offset + last + 1, dtype=x.dtype, device=x.device)
        return memory.as_strided(x.shape, strides, offset)

    return make


def _sd(x: torch.Tensor) -> torch.Tensor:
    """Zeros in the SD layout of a pool whose shape is wrong elsewhere."""
    return torch.zeros(x.shape[0], x.shape[2], x.shape[1], dtype=x.dtype, device=x.device).transpose(1, 2)


def _aliased(argument: str, part: int | None = None) -> Callable[[dict[str, Any]], Any]:
    """Put ``out`` into the memory of an argument."""

    def change(args: dict[str, Any]) -> None:
        source = args[argument] if part is None else args[argument][part]
        memory = torch.empty(0, dtype=torch.uint8, device=source.device).set_(source.untyped_storage())
        need = B * C * 2
        if memory.numel() < need:
            grown = torch.zeros(need, dtype=torch.uint8, device=source.device)
            moved = torch.empty(0, dtype=source.dtype, device=source.device)
            moved.set_(grown.untyped_storage(), 0, source.shape, source.stride())
            moved.copy_(source)
            args[argument] = (
                moved if part is None else [*args[argument][:part], moved, *args[argument][part + 1 :]]
            )
            memory = grown
        args["out"] = memory[:need].view(BF16).view(B, H, D)

    return change


def _dtype_cases() -> Iterator[Bad]:
    float_arguments = ("x", "conv_weight", "conv_state", "raw_gate", "raw_beta", "a_log", "dt_bias", "state")
    float_arguments += ("conv_bias", "output_gate", "norm_weight", "out")
    allowed = {
        "state": (BF16, FP16, FP32),
        "raw_gate": (BF16, FP32),
        "raw_beta": (BF16, FP32),
        **dict.fromkeys(("a_log", "dt_bias", "norm_weight", "conv_weight", "conv_bias"), (FP32,)),
    }
    wrong = (FP32, BF16, FP16, torch.float64, torch.float8_e4m3fn, torch.uint8, torch.int16, torch.bool)
    for argument in float_arguments:
        for dtype in wrong:
            if dtype in allowed.get(argument, (BF16,)):
                continue
            name = str(dtype).removeprefix("torch.")
            # A fp16 x is legal by itself: what no longer agrees with it is named.
            named = "conv_state|raw_gate" if (argument, dtype) == ("x", FP16) else argument
            got = "" if dtype == torch.int16 or named != argument else name
            expected = "bfloat16|float32|float16"
            yield Bad(
                f"{argument} {name}", _replace(argument, _as(dtype)), TypeError, named, f"({expected})", got
            )
    for dtype in (torch.int16, torch.uint8, torch.float32, torch.bool):
        name = str(dtype).removeprefix("torch.")
        change = _replace("state_indices", _as(dtype))
        got = "" if dtype == torch.int16 else name
        yield Bad(f"state_indices {name}", change, TypeError, "state_indices", "int32 or int64", got)
    parts = Form(rows=B, heads=H, bias=True, parts=True)
    for argument, dtype in (("x", FP16), ("conv_state", FP16), ("conv_weight", BF16), ("conv_bias", BF16)):
        change = _third(argument, _as(dtype))
        yield Bad(f"{argument} of mixed dtypes", change, TypeError, argument, "", "", parts)
    for argument in ("conv_weight", "conv_bias"):
        change = _replace(argument, lambda three: [_as(FP16)(part) for part in three])
        yield Bad(f"three {argument} in another half", change, TypeError, argument, "", "float16", parts)


def _shape_cases() -> Iterator[Bad]:
    slots = B + 3
    for argument, shapes in (
        (
            "x",
            (
                (),
                (B * 3 * C,),
                (B, 3 * C - 1),
                (B, C),
                (B + 1, 3 * C),
                (B - 1, 3 * C),
                (1, B, 3 * C),
                (B, 3, C),
            ),
        ),
        (
            "conv_weight",
            ((3, 4, C - 1), (3, 3, C), (4, 3, C), (12, C), (1, 3, 4, C), (3 * C, 4), (3 * C, 1, 4)),
        ),
        ("conv_state", ((), (slots,), (slots, 3 * C), (slots, C, 3), (slots, 3, 3 * C), (slots, 3, C, 3))),
        ("raw_gate", ((), (B, C), (B, H, D - 1), (B, D, H), (B + 1, H, D), (2, B, H, D), (B, 1, H, D))),
        ("raw_beta", ((), (B * H,), (B, H + 1), (B - 1, H), (B, H, 1), (2, B, H))),
        ("a_log", ((H + 1,), (H - 1,), (0,), (B, H))),
        ("dt_bias", ((C + 1,), (D,), (0,), (B, C))),
        (
            "state",
            ((slots, H, D), (slots, H, D, D, 1), (slots, H, D, 64), (slots, H, 64, D), (slots, H, 256, 256)),
        ),
        ("state", ((slots, 0, D, D), (slots * H, D, D))),
        ("state_indices", ((), (B, 2), (1, B), (B, 1, 1), (B, 0))),
        ("conv_bias", ((C,), (3 * C + 1,), (0,))),
        ("output_gate", ((), (B, C), (B, H, D + 1), (B + 1, H, D), (B, H, D, 1), (H, B, D))),
        ("norm_weight", ((D - 1,), (C,), (0,), (1,))),
        (
            "out",
            ((), (B, C), (B, H, D - 1), (B - 1, H, D), (B + 1, H, D), (H, B, D), (2, B, H, D), (B, H, D, 1)),
        ),
    ):
        for shape in shapes:
            yield Bad(
                f"{argument} {shape}", _replace(argument, _shaped(*shape)), ValueError, argument, "", "shape"
            )
    other = _replace("state", _shaped(slots, H + 1, D, D))
    yield Bad("state of other heads", other, ValueError, "x|conv_weight", "", "")
    fewer = _replace("state_indices", lambda x: x[:-1])
    yield Bad("fewer indices than rows", fewer, ValueError, "x", "", "")
    narrow = _replace("conv_state", lambda x: _sd(x[..., :2]))
    yield Bad("conv_state of two columns", narrow, ValueError, "conv_state", "3", "2")
    parts = Form(rows=B, heads=H, bias=True, parts=True)
    for argument, shape in (
        ("x", (B, C + 1)), ("x", (B - 1, C)), ("conv_weight", (C, 3)), ("conv_weight", (4, C)),
        ("conv_weight", (C + 1, 1, 4)), ("conv_bias", (C - 1,)),
    ):  # fmt: skip
        change = _third(argument, _shaped(*shape))
        yield Bad(f"third {argument} {shape}", change, ValueError, argument, "", "", parts)
    change = _third("conv_state", lambda x: _sd(x[:, :-8]))
    yield Bad("third conv_state narrower", change, ValueError, "conv_state", "", "", parts)
    for argument in ("x", "conv_weight", "conv_state", "conv_bias"):
        for count in (0, 1, 2, 4):
            change = _replace(argument, lambda three, count=count: [three[0]] * count)
            expected = "one tensor, or three"
            yield Bad(
                f"{argument} of {count} tensors", change, ValueError, argument, expected, str(count), parts
            )


def _stride_cases() -> Iterator[Bad]:
    for argument, strides, expected in (
        ("x", (6 * C, 2), "stride 1"),
        ("x", (1, B), "stride 1"),
        ("conv_weight", (4 * C, 1, 4), "contiguous"),
        ("conv_weight", (5 * C, C, 1), "contiguous"),
        ("raw_gate", (2 * C, 2 * D, 1), "contiguous"),
        ("raw_gate", (2 * C, 2 * D, 2), "contiguous"),
        ("raw_gate", (C, 1, H), "contiguous"),
        ("raw_beta", (2 * H, 2), "contiguous|stride 1"),
        ("raw_beta", (1, B), "contiguous|stride 1"),
        ("a_log", (2,), "contiguous"),
        ("dt_bias", (2,), "contiguous"),
        ("conv_bias", (2,), "contiguous"),
        ("norm_weight", (0,), "contiguous"),
        ("output_gate", (C, 1, H), "contiguous"),
        ("output_gate", (2 * C, 2 * D, 1), "contiguous"),
        ("state", (H * D * D, D * D, 1, D), "contiguous"),
        ("state", (2 * H * D * D, 2 * D * D, D, 1), "contiguous"),
        ("state", (H * D * D, D, H * D, 1), "contiguous"),
        ("state", (H * D * D * 2, 2 * D * D, 2 * D, 2), "contiguous"),
        ("state", (H * D * D + 2, D * D, D, 1), "16"),
        ("state", (H * D * D + 1, D * D, D, 1), "16"),
        ("out", (C, 1, H), "contiguous"),
        ("out", (2 * C, 2 * D, 1), "contiguous"),
        ("out", (2 * C, 2 * D, 2), "contiguous"),
    ):
        name = f"{argument} strides {strides}"
        yield Bad(name, _replace(argument, _restrided(*strides)), ValueError, argument, f"({expected})", "")
    for offset in (1, 2):
        moved = _restrided(H * D * D, D * D, D, 1, offset=offset)
        yield Bad(f"state base off by {offset}", _replace("state", moved), ValueError, "state", "16", "")
    for strides, offset in (
        ((3 * C * 3 + 4, 1, 3 * C), 0),
        ((3 * C * 3, 3, 1), 4),
        ((3 * C * 3 + 1, 3, 1), 0),
    ):
        change = _replace("conv_state", _restrided(*strides, offset=offset))
        yield Bad(f"conv_state {strides} from {offset}", change, ValueError, "conv_state", "16", "")
    for strides in ((0, D, 1), (1, D, 1), (C - 1, D, 1)):
        change = _replace("out", _restrided(*strides))
        yield Bad(f"out rows {strides} overlap", change, ValueError, "out", "", "")
    parts = Form(rows=B, heads=H, parts=True, layout="DS", paged=False)
    change = _third("conv_state", _restrided(C * 3, 1, C))
    yield Bad("conv_state of mixed layouts", change, ValueError, "conv_state", "strides", "", parts)
    half = Form(rows=B, heads=H, state_dtype=BF16)
    odd = _replace("state", _restrided(H * D * D + 4, D * D, D, 1))
    yield Bad("bf16 state slots 8 bytes off", odd, ValueError, "state", "16", "", half)


def _option_cases() -> Iterator[Bad]:
    for present, missing in (("output_gate", "norm_weight"), ("norm_weight", "output_gate")):
        change = _replace(missing, lambda _: None)
        yield Bad(f"{present} alone", change, ValueError, missing, present, "None")
    for argument in ("a_log", "dt_bias"):
        change = _replace(argument, lambda _: None)
        yield Bad(f"no {argument}", change, ValueError, argument, "gate_is_log_decay", "None")
    for argument in (
        "x",
        "conv_weight",
        "conv_state",
        "raw_gate",
        "raw_beta",
        "state",
        "state_indices",
        "norm_weight",
    ):
        for value in (None, 1.0, "x", np, torch.Tensor):
            if argument == "norm_weight" and value is None:
                continue
            change = _replace(argument, lambda _, value=value: value)
            yield Bad(f"{argument} is {value!r:.20}", change, TypeError, argument, "", "")
    yield Bad("x of numbers", _replace("x", lambda _: [1.0, 2.0, 3.0]), TypeError, "x", "", "")
    yield Bad("out is a list", _replace("out", lambda _: []), TypeError, "out", "", "list")
    refused = (ValueError, TypeError)
    everywhere = ("x", "conv_weight", "conv_state", "raw_gate", "raw_beta", "a_log", "dt_bias", "state")
    fp16 = Form(rows=B, heads=H, bias=True, activation=FP16)
    for argument in (*everywhere, "state_indices", "conv_bias", "output_gate", "norm_weight", "out"):
        meta = _replace(argument, lambda x: x.to("meta"))
        yield Bad(f"{argument} on meta", meta, refused, argument, "", "")
        if argument != "state_indices":
            negated = _replace(argument, torch._neg_view)
            yield Bad(f"{argument} negated", negated, refused, argument, "negative bit", "", fp16)
    sparse = _replace("a_log", lambda x: x.to_sparse())
    yield Bad("a_log sparse", sparse, refused, "a_log", "", "")


def _overlap_cases() -> Iterator[Bad]:
    arguments = ("x", "conv_weight", "conv_state", "raw_gate", "raw_beta", "a_log", "dt_bias", "state")
    for argument in (*arguments, "state_indices", "conv_bias", "output_gate", "norm_weight"):
        yield Bad(f"out overlaps {argument}", _aliased(argument), ValueError, "out", argument, "")
    parts = Form(rows=B, heads=H, bias=True, parts=True, paged=False)
    for argument in ("x", "conv_weight", "conv_state", "conv_bias"):
        change = _aliased(argument, 2)
        yield Bad(f"out overlaps the third {argument}", change, ValueError, "out", argument, "", parts)


CASES = [
    *_dtype_cases(),
    *_shape_cases(),
    *_stride_cases(),
    *_option_cases(),
    *_overlap_cases(),
]


def _bad_call(device: torch.device, rng: torch.Generator, form: Form) -> Call:
    call = make_call(device, rng, form)
    return call.changed(out=poisoned_out(call))


def _contents(call: Call) -> list[torch.Tensor]:
    real = {
        name: [
            tensor
            for tensor in tensors(value)
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and not tensor.is_meta
        ]
        for name, value in call.args.items()
    }
    return [memory.clone() for memory in Call(real).storages().values()]


@pytest.mark.parametrize("bad", [pytest.param(bad, id=bad.name) for bad in CASES])
def test_bad_argument_is_named_and_nothing_is_written(
    bad: Bad, device: torch.device, rng: torch.Generator
) -> None:
    call = _bad_call(device, rng, bad.form)
    good = call.copy()
    bad.change(call.args)
    before, untouched = _contents(call), _contents(good)
    with pytest.raises(bad.error) as caught:
        call.run()
    pattern = rf"kda_decode: ({bad.argument}): expected .*{bad.expected}.*, got .*{bad.got}"
    assert re.search(pattern, str(caught.value), re.DOTALL), f"{caught.value!s} does not match {pattern!r}"
    for old, new in zip(before, _contents(call), strict=True):
        assert torch.equal(old, new)
    if bad.argument != "out":
        with pytest.raises(bad.error):
            call.run(out=None)
    for old, new in zip(untouched, _contents(good), strict=True):
        assert torch.equal(old, new)
    good.run()


@pytest.mark.gpu
@pytest.mark.parametrize("home", ["cpu", "cuda"])
def test_one_argument_on_another_device_is_refused(home: str, rng: torch.Generator) -> None:
    away = "cuda" if home == "cpu" else "cpu"
    call = _bad_call(torch.device(home), rng, Form(rows=B, heads=H, bias=True, paged=False))
    before = _contents(call)
    for argument, value in call.args.items():
        if isinstance(value, torch.Tensor):
            with pytest.raises(ValueError, match=r"kda_decode: .*: expected device .*, got .*"):
                call.run(**{argument: value.to(away)})
    for old, new in zip(before, _contents(call), strict=True):
        assert torch.equal(old, new)
    check(call, out=call["out"])
    check(make_call(torch.device("cuda"), rng))


def _raw(args: dict[str, Any]) -> Any:
    recurrence = ("x", "conv_weight", "conv_state", "raw_gate", "raw_beta", "a_log", "dt_bias", "state")
    epilogue = ("conv_bias", "lower_bound", "output_gate", "norm_weight")
    flags = ("scale", "null_index", "gate_is_log_decay", "beta_is_sigmoid", "out")
    return _core.kda_decode(
        *[args[name] for name in (*recurrence, "state_indices")],
        None,
        *[args[name] for name in epilogue],
        1e-5,
        *[args[name] for name in flags],
        allocate,
    )


@pytest.mark.parametrize("argument", ["state", "x", "conv_state", "raw_gate", "state_indices", "out"])
def test_fake_tensor_on_the_raw_path_is_an_error(
    argument: str, device: torch.device, rng: torch.Generator
) -> None:
    call = _bad_call(device, rng, FORM)
    before = _contents(call)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(call[argument])
    # A view behind the start of its storage has an address that is not null.
    assert argument != "state" or fake.storage_offset()
    with pytest.raises((ValueError, TypeError), match=f"kda_decode: {argument}: expected .*, got "):
        _raw(call.args | {argument: fake})
    for old, new in zip(before, _contents(call), strict=True):
        assert torch.equal(old, new)
    assert _raw(call.args) is call["out"]


@pytest.mark.parametrize(
    ("option", "value"),
    [("norm_eps", "1"), ("scale", "1"), ("lower_bound", "-5"), ("null_index", 0.5), ("null_index", None)],
)
def test_options_are_numbers(option: str, value: Any, device: torch.device, rng: torch.Generator) -> None:
    call = _bad_call(device, rng, FORM)
    before = _contents(call)
    with pytest.raises(TypeError, match=option):
        call.run(**{option: value})
    for old, new in zip(before, _contents(call), strict=True):
        assert torch.equal(old, new)


def test_read_only_caches_and_outputs_are_refused(rng: torch.Generator) -> None:
    call = _bad_call(
        torch.device("cpu"), rng, Form(rows=B, heads=H, paged=False, activation=FP16, layout="DS")
    )
    for argument in OUTPUTS:
        array = np.zeros(call[argument].shape, np.float32 if argument == "state" else np.float16)
        array.flags.writeable = False
        with pytest.raises((ValueError, TypeError), match=rf"kda_decode: {argument}: expected .*, got "):
            call.run(**{argument: array})
        assert not array.any()
