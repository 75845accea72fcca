"""The registered torch ops: schemas, fakes, opcheck, torch.compile, and registering twice."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import vllm_hotpath
from tests.helpers import BF16, DTYPES, E4M3, Output, assert_same_bits
from tests.pack_cases import make_heads, make_inputs, make_rows, make_scale
from tests.reference import mla_kv_pack as reference
from vllm_hotpath.ops import mla_kv_pack

if TYPE_CHECKING:
    from collections.abc import Callable

OPS = torch.ops.vllm_hotpath
CPU = torch.device("cpu")
WIDTHS = (16, 8, 24)

SCHEMAS = {
    OPS.mla_kv_concat.default: "vllm_hotpath::mla_kv_concat(Tensor k_nope, Tensor k_pe) -> Tensor",
    OPS.mla_kv_concat.out: (
        "vllm_hotpath::mla_kv_concat.out(Tensor k_nope, Tensor k_pe, *, Tensor(a!) out) -> ()"
    ),
    OPS.mla_kv_concat_quant_fp8.default: (
        "vllm_hotpath::mla_kv_concat_quant_fp8(Tensor k_nope, Tensor k_pe, Tensor v, *, Tensor? k_scale=None,"
        " Tensor? v_scale=None, SymInt? v_pad_to=None) -> (Tensor, Tensor)"
    ),
    OPS.mla_kv_concat_quant_fp8.out: (
        "vllm_hotpath::mla_kv_concat_quant_fp8.out(Tensor k_nope, Tensor k_pe, Tensor v, *,"
        " Tensor? k_scale=None, Tensor? v_scale=None, SymInt? v_pad_to=None,"
        " Tensor(a!) k_out, Tensor(b!) v_out) -> ()"
    ),
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("op", list(SCHEMAS), ids=str)
def test_schema_is_pinned(op: torch._ops.OpOverload) -> None:
    assert str(op._schema) == SCHEMAS[op]


def test_no_other_overload_is_registered() -> None:
    for name in ("mla_kv_concat", "mla_kv_concat_quant_fp8"):
        assert sorted(getattr(OPS, name).overloads()) == ["default", "out"]


def _concat_calls(device: torch.device, rng: torch.Generator) -> list[tuple[Any, ...]]:
    calls = []
    for tokens, layout in ((5, "contiguous"), (0, "contiguous"), (5, "odd base and strides")):
        k_nope = make_heads(layout, (tokens, 3, WIDTHS[0]), BF16, device, rng)
        for three_dims in (False, True):
            k_pe = make_rows("odd stride", (tokens, WIDTHS[1]), BF16, device, rng, three_dims=three_dims)
            calls.append((k_nope, k_pe))
    calls.append((k_nope, k_pe[..., :0]))
    return calls


def _quant_calls(device: torch.device, rng: torch.Generator) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    calls = []
    scales = {"k_scale": make_scale(0.5, device), "v_scale": make_scale(3.0, device, (1,))}
    for tokens, layout in ((5, "contiguous"), (0, "contiguous"), (5, "second half of kv")):
        k_nope = make_heads(layout, (tokens, 3, WIDTHS[0]), BF16, device, rng)
        rows = "tail of the latent row" if tokens else "contiguous"
        k_pe = make_rows(rows, (tokens, WIDTHS[1]), BF16, device, rng)
        v = make_heads(layout, (tokens, 3, WIDTHS[2]), BF16, device, rng)
        calls += [((k_nope, k_pe, v), options) for options in ({}, {"v_pad_to": 32}, scales)]
    calls.append(((k_nope, k_pe, v), scales | {"v_pad_to": 32}))
    return calls


def _outputs(op: str, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, torch.Tensor]:
    if op == "mla_kv_concat":
        return {"out": torch.zeros_like(getattr(OPS, op)(*args))}
    k, v = getattr(OPS, op)(*args, **options)
    return {"k_out": torch.zeros_like(k), "v_out": torch.zeros_like(v)}


@pytest.mark.parametrize("out", [False, True], ids=["default", "out"])
@pytest.mark.parametrize("op", ["mla_kv_concat", "mla_kv_concat_quant_fp8"])
def test_opcheck_is_clean(op: str, out: bool, device: torch.device, rng: torch.Generator) -> None:
    calls = (
        [(args, {}) for args in _concat_calls(device, rng)]
        if op == "mla_kv_concat"
        else _quant_calls(device, rng)
    )
    # Its schema test compares every tensor in a way that torch does not have for e4m3.
    tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if not (out and op == "mla_kv_concat_quant_fp8"):
        tests.append("test_schema")
    for args, options in calls:
        for tensor in args:
            tensor.masked_fill_(~torch.isfinite(tensor), 1.0)
        outputs = _outputs(op, args, options) if out else {}
        overload = getattr(OPS, op).out if out else getattr(OPS, op).default
        torch.library.opcheck(overload, args, options | outputs, test_utils=tests)


def _concat(k_nope: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
    return vllm_hotpath.mla_kv_concat(k_nope, k_pe)


def _quant(
    k_nope: torch.Tensor, k_pe: torch.Tensor, v: torch.Tensor, k_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return vllm_hotpath.mla_kv_concat_quant_fp8(k_nope, k_pe, v, k_scale=k_scale, v_pad_to=32)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_calls_equal_eager_ones(
    backend: str, dynamic: bool, device: torch.device, rng: torch.Generator
) -> None:
    concat = torch.compile(_concat, fullgraph=True, backend=backend, dynamic=dynamic)
    quant = torch.compile(_quant, fullgraph=True, backend=backend, dynamic=dynamic)
    scale = make_scale(0.3, device)
    for tokens in (5, 7):
        inputs = make_inputs(tokens, 3, WIDTHS, device, rng)
        assert_same_bits(concat(*inputs[:2]), _concat(*inputs[:2]))
        for got, want in zip(quant(*inputs, scale), _quant(*inputs, scale), strict=True):
            assert_same_bits(got, want)


def _shifted_into(
    k_nope: torch.Tensor, k_pe: torch.Tensor, v: torch.Tensor, outs: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """Both ops between torch ops, results only in the given outputs."""
    vllm_hotpath.mla_kv_concat(k_nope + 1, k_pe, out=outs[0])
    vllm_hotpath.mla_kv_concat_quant_fp8(k_nope - 1, k_pe, v, k_out=outs[1], v_out=outs[2])
    return outs[0] * 2


def _make_outputs(device: torch.device) -> list[Output]:
    return [
        Output((5, 3, WIDTHS[0] + WIDTHS[1]), BF16, device),
        Output((5, 3, WIDTHS[0] + WIDTHS[1]), E4M3, device),
        Output((5, 3, WIDTHS[2]), E4M3, device),
    ]


def _check_outputs_are_mutated(
    function: Callable[..., Any], device: torch.device, rng: torch.Generator
) -> None:
    inputs = make_inputs(5, 3, WIDTHS, device, rng)
    inputs = tuple(torch.nan_to_num(tensor.float(), 0.5, 3.0, -3.0).to(BF16) for tensor in inputs)
    want, got = _make_outputs(device), _make_outputs(device)
    want_result = _shifted_into(*inputs, tuple(output.tensor for output in want))
    got_result = function(*inputs, tuple(output.tensor for output in got))
    assert_same_bits(got_result, want_result)
    for left, right in zip(got, want, strict=True):
        left.assert_guards_intact()
        assert_same_bits(left.tensor, right.tensor, "output")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_outputs_are_written_and_not_dropped(
    backend: str, device: torch.device, rng: torch.Generator
) -> None:
    _check_outputs_are_mutated(torch.compile(_shifted_into, fullgraph=True, backend=backend), device, rng)


def test_inductor_keeps_values_and_mutations(device: torch.device, rng: torch.Generator) -> None:
    _check_outputs_are_mutated(torch.compile(_shifted_into, fullgraph=True), device, rng)


def test_one_given_output_is_enough_when_compiled(device: torch.device, rng: torch.Generator) -> None:
    def half(k_nope: torch.Tensor, k_pe: torch.Tensor, v: torch.Tensor, k_out: torch.Tensor) -> torch.Tensor:
        return vllm_hotpath.mla_kv_concat_quant_fp8(k_nope, k_pe, v, k_out=k_out)[1]

    inputs = make_inputs(5, 3, WIDTHS, device, rng)
    want = vllm_hotpath.mla_kv_concat_quant_fp8(*inputs)
    for function in (half, torch.compile(half, fullgraph=True, backend="aot_eager")):
        k_out = Output((5, 3, 24), E4M3, device)
        assert_same_bits(function(*inputs, k_out.tensor), want[1], "v_out")
        assert_same_bits(k_out.tensor, want[0], "k_out")


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_fake_tensors_get_shapes_dtypes_strides_and_devices(kind: str, rng: torch.Generator) -> None:
    with FakeTensorMode():
        kv = torch.empty(5, 3, 64, dtype=BF16, device=kind)
        k_pe = torch.empty(5, 1, 8, dtype=BF16, device=kind)
        k_nope, v = kv[..., :16], kv[..., 16:40]
        out = vllm_hotpath.mla_kv_concat(k_nope, k_pe)
        k, values = vllm_hotpath.mla_kv_concat_quant_fp8(k_nope, k_pe, v)
        _, padded = vllm_hotpath.mla_kv_concat_quant_fp8(k_nope, k_pe, v, v_pad_to=32)
        given = torch.empty(5, 3, 24, dtype=BF16, device=kind)
        assert vllm_hotpath.mla_kv_concat(k_nope, k_pe, out=given) is given
    for tensor, width, dtype in ((out, 24, BF16), (k, 24, E4M3), (values, 24, E4M3), (padded, 32, E4M3)):
        assert tensor.shape == (5, 3, width)
        assert tensor.stride() == (3 * width, width, 1)
        assert tensor.dtype == dtype
        assert tensor.device.type == kind


def test_make_fx_traces_one_op(rng: torch.Generator) -> None:
    inputs = make_inputs(5, 3, WIDTHS, CPU, rng)
    traced = make_fx(_quant, tracing_mode="symbolic")(*inputs, make_scale(0.5, CPU))
    calls = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert calls.count(OPS.mla_kv_concat_quant_fp8.default) == 1
    other, scale = make_inputs(9, 3, WIDTHS, CPU, rng), make_scale(0.25, CPU)
    for got, want in zip(traced(*other, scale), _quant(*other, scale), strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_ops_equal_the_reference(
    dtype: torch.dtype, device: torch.device, rng: torch.Generator
) -> None:
    k_nope, k_pe, v = make_inputs(5, 3, WIDTHS, device, rng, dtypes=(dtype,) * 3)
    assert_same_bits(OPS.mla_kv_concat(k_nope, k_pe), reference.concat(k_nope, k_pe))
    scale = make_scale(0.3, device)
    wants = reference.concat_quant_fp8(k_nope, k_pe, v, v_scale=scale, v_pad_to=40)
    for got, want in zip(
        OPS.mla_kv_concat_quant_fp8(k_nope, k_pe, v, v_scale=scale, v_pad_to=40), wants, strict=True
    ):
        assert_same_bits(got, want)


def test_bad_input_raises_through_the_torch_op_too(device: torch.device, rng: torch.Generator) -> None:
    k_nope, k_pe, _ = make_inputs(5, 3, WIDTHS, device, rng)
    with pytest.raises(ValueError, match=r"mla_kv_concat: k_pe: expected .*, got "):
        OPS.mla_kv_concat(k_nope, k_pe[:4])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda k_nope, k_pe: (k_nope.float(), k_pe), TypeError),
        (lambda k_nope, k_pe: (k_nope, k_pe[:4]), ValueError),
        (lambda k_nope, k_pe: (k_nope[..., :12], k_pe), ValueError),
    ],
    ids=["dtype", "token count", "width"],
)
def test_bad_input_raises_when_compiled(
    change: Callable[..., Any], error: type[Exception], rng: torch.Generator
) -> None:
    inputs = change(*make_inputs(5, 3, WIDTHS, CPU, rng)[:2])
    with pytest.raises(error, match=r"mla_kv_concat: .*: expected .*, got "):
        torch.compile(_concat, backend="aot_eager")(*inputs)


def test_registering_twice_changes_nothing(rng: torch.Generator) -> None:
    before = {name: getattr(OPS, name) for name in ("mla_kv_concat", "mla_kv_concat_quant_fp8")}
    importlib.reload(mla_kv_pack)
    assert {name: getattr(OPS, name) for name in before} == before
    for op, schema in SCHEMAS.items():
        assert str(op._schema) == schema
    k_nope, k_pe, _ = make_inputs(5, 3, WIDTHS, CPU, rng)
    assert_same_bits(OPS.mla_kv_concat(k_nope, k_pe), reference.concat(k_nope, k_pe))
