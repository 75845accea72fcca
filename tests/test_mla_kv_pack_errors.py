"""What both ops refuse: the message names op, argument, expected and got, and not one byte is written."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import vllm_hotpath
from tests.helpers import BF16, E4M3, FP16, Output
from tests.pack_cases import check_concat, check_quant, make_inputs, make_scale
from vllm_hotpath import _core
from vllm_hotpath.ops import allocate

if TYPE_CHECKING:
    from collections.abc import Callable

T, H, P, R, V = 3, 2, 16, 8, 24
CONCAT, QUANT = "mla_kv_concat", "mla_kv_concat_quant_fp8"
Args = dict[str, Any]


class Call:
    """A correct call with poisoned outputs, to be spoiled."""

    def __init__(self, op: str, device: torch.device, rng: torch.Generator) -> None:
        self.op = op
        k_nope, k_pe, v = make_inputs(T, H, (P, R, V), device, rng)
        self.args: Args = {"k_nope": k_nope, "k_pe": k_pe}
        if op == CONCAT:
            self.outputs = {"out": Output((T, H, P + R), BF16, device)}
        else:
            self.args |= {"v": v, "k_scale": make_scale(0.5, device), "v_scale": make_scale(2.0, device)}
            self.outputs = {
                "k_out": Output((T, H, P + R), E4M3, device),
                "v_out": Output((T, H, V), E4M3, device),
            }
        self.args |= {name: output.tensor for name, output in self.outputs.items()}

    def run(self, **changes: Any) -> Any:
        args = self.args | changes
        positional = [args.pop(name) for name in ("k_nope", "k_pe", "v") if name in args]
        return getattr(vllm_hotpath, self.op)(*positional, **args)

    def storage_bytes(self) -> list[torch.Tensor]:
        storages = []
        for value in self.args.values():
            if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_meta:
                empty = torch.empty(0, dtype=torch.uint8, device=value.device)
                storages.append(empty.set_(value.untyped_storage()).clone())
        return storages


class Bad(NamedTuple):
    name: str
    ops: tuple[str, ...]
    change: Callable[[Args], Any]
    error: type[Exception] | tuple[type[Exception], ...]
    argument: str
    expected: str
    got: str


BOTH = (CONCAT, QUANT)


def _with_dtype(argument: str, dtype: torch.dtype) -> Callable[[Args], Any]:
    def change(args: Args) -> None:
        like = args[argument]
        raw = torch.zeros(like.numel() * dtype.itemsize, dtype=torch.uint8, device=like.device)
        args[argument] = raw.view(dtype).view(like.shape)

    return change


def _replace(argument: str, make: Callable[[Any], Any]) -> Callable[[Args], Any]:
    def change(args: Args) -> None:
        args[argument] = make(args[argument])

    return change


def _empty(argument: str, *shape: int) -> Callable[[Args], Any]:
    return _replace(argument, lambda x: torch.empty(shape, dtype=x.dtype, device=x.device))


def _misaligned(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape)


def _half_aligned(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(x.numel() + 4, dtype=x.dtype, device=x.device)[4:].view(x.shape)


def _padded(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(T, H, x.shape[-1] + 8, dtype=x.dtype, device=x.device)[..., : x.shape[-1]]


def _every_second(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype, device=x.device)[..., ::2]


def _on_meta(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


def _negated(x: torch.Tensor) -> torch.Tensor:
    return torch._neg_view(x if x.dtype == torch.float32 else x.half())


def _overlap(output: str, source: str, at: int) -> Callable[[Args], Any]:
    """Put ``source`` into the memory of ``output``, ``at`` elements of ``source`` behind its start."""

    def change(args: Args) -> None:
        out, tensor = args[output], args[source]
        need = max(out.numel() * out.element_size(), (at + tensor.numel()) * tensor.element_size())
        memory = torch.zeros(need, dtype=torch.uint8, device=out.device)
        args[output] = memory[: out.numel() * out.element_size()].view(out.dtype).view(out.shape)
        start = at * tensor.element_size()
        body = memory[start : start + tensor.numel() * tensor.element_size()]
        args[source] = body.view(tensor.dtype).view(tensor.shape)

    return change


def _cases() -> list[Bad]:
    cases = []
    wrong = [torch.float32, torch.float64, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.int8, torch.uint8]
    wrong += [torch.bool, torch.int16, torch.complex64]
    for argument, ops in (("k_nope", BOTH), ("k_pe", (QUANT,)), ("v", (QUANT,))):
        for dtype in wrong:
            name = str(dtype).removeprefix("torch.")
            got = "complex" if dtype.is_complex else name if dtype != torch.int16 else ""
            cases.append(
                Bad(
                    f"{argument} {name}",
                    ops,
                    _with_dtype(argument, dtype),
                    TypeError,
                    argument,
                    "bfloat16",
                    got,
                )
            )
    for dtype in (FP16, E4M3, torch.float32, torch.uint8):
        name = str(dtype).removeprefix("torch.")
        cases += [
            Bad(f"k_pe {name}", (CONCAT,), _with_dtype("k_pe", dtype), TypeError, "k_pe", "bfloat16", name),
            Bad(f"out {name}", (CONCAT,), _with_dtype("out", dtype), TypeError, "out", "bfloat16", name),
        ]
    for output in ("k_out", "v_out"):
        for dtype in (BF16, torch.uint8, torch.float8_e4m3fnuz, torch.float8_e5m2):
            name = str(dtype).removeprefix("torch.")
            change = _with_dtype(output, dtype)
            cases.append(Bad(f"{output} {name}", (QUANT,), change, TypeError, output, "e4m3fn", name))

    for argument, ops, shapes in (
        ("k_nope", BOTH, ((), (H * P,), (T, H * P), (1, T, H, P), (1, 1, 1, T, H, P))),
        (
            "k_pe",
            BOTH,
            ((), (R,), (T, 1, 1, R), (1, 1, 1, 1, T, R), (T, 0, R), (T, 2, R), (T + 1, R), (T - 1, R)),
        ),
        (
            "v",
            (QUANT,),
            ((), (V,), (T, H * V), (T, H, 1, V), (T, H + 1, V), (T, H - 1, V), (T + 1, H, V), (0, H, V)),
        ),
        ("k_nope", BOTH, ((T, 0, P), (T, H, P + 4), (T, H, 1), (T, H, P - 1))),
        ("k_pe", BOTH, ((T, R - 4), (T, 1, R + 1))),
        ("v", (QUANT,), ((T, H, V + 4), (T, H, 3))),
        (
            "out",
            (CONCAT,),
            ((T - 1, H, P + R), (T + 1, H, P + R), (T, H, P), (T, H, P + R + 8), (T, H * (P + R))),
        ),
        (
            "k_out",
            (QUANT,),
            ((T - 1, H, P + R), (T + 1, H, P + R), (T, H, P), (T, H + 1, P + R), (0, H, P + R)),
        ),
        ("v_out", (QUANT,), ((T - 1, H, V), (T, H, V - 8), (T, H, V + 8), (T, 1, V))),
        ("k_scale", (QUANT,), ((2,), (0,), (T, 1))),
        ("v_scale", (QUANT,), ((2,), (0,), (1, H))),
    ):
        for shape in shapes:
            change = _empty(argument, *shape)
            cases.append(Bad(f"{argument} shape {shape}", ops, change, ValueError, argument, "", ""))

    for argument, ops in (("k_nope", BOTH), ("k_pe", BOTH), ("v", (QUANT,))):
        change = _replace(argument, _every_second)
        cases.append(
            Bad(f"{argument} last stride 2", ops, change, ValueError, argument, "stride 1", "strides")
        )
    for output, ops in (("out", (CONCAT,)), ("k_out", (QUANT,)), ("v_out", (QUANT,))):
        for name, spoil, expected in (
            ("padded rows", _padded, "contiguous"),
            ("element stride 2", _every_second, "contiguous"),
            (
                "heads first",
                lambda x: torch.zeros(H, T, x.shape[-1], device=x.device).to(x.dtype).transpose(0, 1),
                "contiguous",
            ),
            ("expanded", lambda x: x[:1].expand(x.shape), "contiguous"),
            ("base off by one", _misaligned, "aligned"),
            ("base off by four", _half_aligned, "aligned"),
        ):
            cases.append(
                Bad(f"{output} {name}", ops, _replace(output, spoil), ValueError, output, expected, "")
            )
    for output, source, ops in (
        ("out", "k_nope", (CONCAT,)),
        ("out", "k_pe", (CONCAT,)),
        ("k_out", "k_nope", (QUANT,)),
        ("k_out", "k_pe", (QUANT,)),
        ("k_out", "v", (QUANT,)),
        ("v_out", "k_nope", (QUANT,)),
        ("v_out", "k_pe", (QUANT,)),
        ("v_out", "v", (QUANT,)),
        ("k_out", "k_scale", (QUANT,)),
        ("v_out", "k_scale", (QUANT,)),
        ("k_out", "v_scale", (QUANT,)),
        ("v_out", "v_scale", (QUANT,)),
    ):
        for at in (0, 4):
            name = f"{output} overlaps {source} from {at}"
            cases.append(Bad(name, ops, _overlap(output, source, at), ValueError, output, source, ""))
    cases.append(
        Bad(
            "outputs overlap", (QUANT,), _overlap("k_out", "v_out", 8), ValueError, "[kv]_out", "[kv]_out", ""
        )
    )

    for argument in ("k_scale", "v_scale"):
        for dtype in (torch.float64, BF16, FP16, torch.int32):
            name = str(dtype).removeprefix("torch.")
            change = _with_dtype(argument, dtype)
            cases.append(Bad(f"{argument} {name}", (QUANT,), change, TypeError, argument, "float32", name))
        cases.append(
            Bad(
                f"{argument} number",
                (QUANT,),
                _replace(argument, lambda _: 0.5),
                TypeError,
                argument,
                "",
                "float",
            )
        )

    for v_pad_to in (V - 8, V + 4, 0, -8, 2**61):

        def pad(args: Args, v_pad_to: int = v_pad_to) -> None:
            args["v_pad_to"] = v_pad_to

        cases.append(Bad(f"v_pad_to {v_pad_to}", (QUANT,), pad, ValueError, "v_pad_to|v_out", "", ""))

    for argument, ops in (("k_nope", BOTH), ("k_pe", BOTH), ("v", (QUANT,))):
        for value in (None, [1.0], 1.0, "x", np, torch.Tensor):
            change = _replace(argument, lambda _, value=value: value)
            cases.append(Bad(f"{argument} is {value!r:.20}", ops, change, TypeError, argument, "", ""))
    for argument, ops in (("out", (CONCAT,)), ("k_out", (QUANT,)), ("v_out", (QUANT,))):
        cases.append(
            Bad(
                f"{argument} is a list",
                ops,
                _replace(argument, lambda _: []),
                TypeError,
                argument,
                "",
                "list",
            )
        )

    everywhere = (
        ("k_nope", BOTH),
        ("k_pe", BOTH),
        ("v", (QUANT,)),
        ("k_scale", (QUANT,)),
        ("v_scale", (QUANT,)),
    )
    everywhere += (("out", (CONCAT,)), ("k_out", (QUANT,)), ("v_out", (QUANT,)))
    refused = (ValueError, TypeError)
    for argument, ops in everywhere:
        cases.append(Bad(f"{argument} on meta", ops, _replace(argument, _on_meta), refused, argument, "", ""))
        sparse = _replace(argument, lambda x: torch.zeros(x.shape, device=x.device).to(x.dtype).to_sparse())
        if argument not in {"k_out", "v_out"}:
            cases.append(Bad(f"{argument} sparse", ops, sparse, refused, argument, "", ""))
        if argument in {"k_nope", "k_pe", "v", "out", "k_scale"}:
            cases.append(
                Bad(f"{argument} negated", ops, _replace(argument, _negated), refused, argument, "", "")
            )
    conjugate = _replace(
        "k_pe", lambda x: torch.zeros(x.shape, dtype=torch.complex64, device=x.device).conj()
    )
    cases.append(Bad("k_pe conjugated", BOTH, conjugate, refused, "k_pe", "", ""))
    return cases


_PARAMETERS = [pytest.param(op, bad, id=f"{op}: {bad.name}") for bad in _cases() for op in bad.ops]


@pytest.mark.parametrize(("op", "bad"), _PARAMETERS)
def test_bad_argument_is_named_and_nothing_is_written(
    op: str, bad: Bad, device: torch.device, rng: torch.Generator
) -> None:
    call = Call(op, device, rng)
    bad.change(call.args)
    before = call.storage_bytes()
    with pytest.raises(bad.error) as caught:
        call.run()
    pattern = rf"{op}: ({bad.argument}): expected .*{bad.expected}.*, got .*{bad.got}"
    assert re.search(pattern, str(caught.value), re.DOTALL), f"{caught.value!s} does not match {pattern!r}"
    for output in call.outputs.values():
        output.assert_untouched()
    for old, new in zip(before, call.storage_bytes(), strict=True):
        assert torch.equal(old, new)
    if "out" not in bad.argument:
        with pytest.raises(bad.error):
            call.run(**dict.fromkeys(call.outputs))
    good = make_inputs(T, H, (P, R, V), device, rng)
    check_quant(*good)
    check_concat(*good[:2])


@pytest.mark.gpu
@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("home", ["cpu", "cuda"])
def test_one_argument_on_another_device_is_refused(op: str, home: str, rng: torch.Generator) -> None:
    away = "cuda" if home == "cpu" else "cpu"
    call = Call(op, torch.device(home), rng)
    for argument, tensor in list(call.args.items()):
        with pytest.raises(ValueError, match=rf"{op}: .*: expected device .*, got .*"):
            call.run(**{argument: tensor.to(away)})
        for output in call.outputs.values():
            output.assert_untouched()
    call.run()
    good = make_inputs(T, H, (P, R, V), torch.device("cuda"), rng)
    check_quant(*good)


@pytest.mark.parametrize("op", BOTH)
def test_fake_tensor_on_the_raw_path_is_an_error(op: str, device: torch.device, rng: torch.Generator) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        inputs = [
            mode.from_tensor(tensor) for tensor in make_inputs(T, H, (P, R, V), torch.device("cpu"), rng)
        ]
    trailing = (None, allocate) if op == CONCAT else (None, None, None, None, None, allocate)
    arguments = inputs[:2] if op == CONCAT else inputs
    with pytest.raises((ValueError, TypeError), match=f"{op}: k_nope: expected .*, got "):
        getattr(_core, op)(*arguments, *trailing)
    check_quant(*make_inputs(T, H, (P, R, V), device, rng))


@pytest.mark.parametrize("op", BOTH)
def test_fake_tensor_beside_real_ones_is_refused_by_torch(
    op: str, device: torch.device, rng: torch.Generator
) -> None:
    call = Call(op, device, rng)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(call.args["k_pe"])
    with pytest.raises(AssertionError, match=f"FakeTensor.*vllm_hotpath.{op}"):
        call.run(k_pe=fake)
    for output in call.outputs.values():
        output.assert_untouched()


@pytest.mark.parametrize("op", BOTH)
def test_read_only_array_is_no_output(op: str, rng: torch.Generator) -> None:
    call = Call(op, torch.device("cpu"), rng)
    name = "out" if op == CONCAT else "v_out"
    array = np.zeros(call.args[name].shape, dtype=np.float16)
    array.flags.writeable = False
    if op == CONCAT:
        call.args |= {key: call.args[key].half() for key in ("k_nope", "k_pe")}
    with pytest.raises((ValueError, TypeError), match=rf"{op}: {name}: expected .*, got "):
        call.run(**{name: array})
    assert not array.any()


@pytest.mark.parametrize("v_pad_to", ["192", 192.5, [192]])
def test_v_pad_to_is_an_integer(v_pad_to: Any, device: torch.device, rng: torch.Generator) -> None:
    call = Call(QUANT, device, rng)
    with pytest.raises(TypeError, match="v_pad_to"):
        call.run(v_pad_to=v_pad_to)
    for output in call.outputs.values():
        output.assert_untouched()


def test_is_supported_answers_with_a_reason() -> None:
    assert vllm_hotpath.is_supported(CONCAT, "cpu") == (True, "")
    assert vllm_hotpath.is_supported(QUANT, torch.device("cpu"))
    answer = vllm_hotpath.is_supported(CONCAT, "meta")
    assert not answer
    assert "meta" in answer.reason
    missing = vllm_hotpath.is_supported(CONCAT, 4096)
    assert not missing
    assert missing.reason
    with pytest.raises(
        ValueError, match=r"is_supported: op: expected one of .*mla_kv_concat.*, got 'nonsense'"
    ):
        vllm_hotpath.is_supported("nonsense")
