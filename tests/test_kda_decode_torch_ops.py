"""The registered torch op of ``kda_decode``: schema, opcheck, fakes, torch.compile with caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.helpers import BF16, assert_same_bits
from tests.kda_cases import (
    POSITIONAL,
    Call,
    D,
    Form,
    assert_same_results,
    check,
    make_call,
    poisoned_out,
    tensors,
)
from vllm_hotpath.ops.kda_decode import kda_decode

OPS = torch.ops.vllm_hotpath
SCHEMA = (
    "vllm_hotpath::kda_decode(Tensor[] x, Tensor[] conv_weight, Tensor(a!)[] conv_state, "
    "Tensor raw_gate, Tensor raw_beta, Tensor? a_log, Tensor? dt_bias, Tensor(b!) state, "
    "Tensor state_indices, Tensor(c!) out, Tensor[] conv_bias, float? lower_bound, Tensor? output_gate, "
    "Tensor? norm_weight, float norm_eps, float? scale, int null_index, bool gate_is_log_decay, "
    "bool beta_is_sigmoid) -> ()"
)
LISTS = ("x", "conv_weight", "conv_state", "conv_bias")
FORMS = {
    "kimi k3": Form(paged=False, inputs="wide", null_rows=(1,)),
    "DS with bias": Form(paged=False, layout="DS", bias=True, indices="column"),
    "kimi linear": Form(parts=True, paged=False, log_decay=True, sigmoid_beta=True, norm=False),
    "no rows": Form(paged=False, rows=0),
    "shared pages": Form(),
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def _finite_call(device: torch.device, rng: torch.Generator, form: Form) -> Call:
    """A call without NaN anywhere, which comparisons by value would stumble over."""
    call = make_call(device, rng, form)
    for value in call.args.values():
        for tensor in tensors(value):
            if tensor.is_floating_point():
                tensor.masked_fill_(~torch.isfinite(tensor), 0.5)
                tensor.clamp_(-100, 100)
    return call


def _op_arguments(call: Call, out: torch.Tensor) -> tuple[Any, ...]:
    args = {"norm_eps": 1e-5, "out": out} | call.args
    args |= {name: list(tensors(args[name])) for name in LISTS}
    names = [argument.name for argument in OPS.kda_decode.default._schema.arguments]
    return tuple(args[name] for name in names)


def test_schema_is_pinned() -> None:
    assert str(OPS.kda_decode.default._schema) == SCHEMA
    assert OPS.kda_decode.overloads() == ["default"]


@pytest.mark.parametrize("name", list(FORMS))
def test_opcheck_is_clean(name: str, device: torch.device, rng: torch.Generator) -> None:
    call = _finite_call(device, rng, FORMS[name])
    out = torch.zeros(FORMS[name].rows, 3, D, dtype=BF16, device=device)
    torch.library.opcheck(OPS.kda_decode.default, _op_arguments(call, out))


@pytest.mark.parametrize("name", list(FORMS))
def test_the_torch_op_equals_the_function(name: str, device: torch.device, rng: torch.Generator) -> None:
    call = make_call(device, rng, FORMS[name])
    twin, out = call.copy(), poisoned_out(call)
    OPS.kda_decode(*_op_arguments(twin, out))
    assert_same_results(call, twin, check(call), out)


def _between_torch_ops(x: Any, state: torch.Tensor, args: dict[str, Any]) -> torch.Tensor:
    doubled = [part * 2 for part in x] if isinstance(x, list) else x * 2
    args = args | {"x": doubled, "state": state}
    return kda_decode(*[args.pop(name) for name in POSITIONAL], **args) + 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("given", [False, True], ids=["allocated", "out"])
# Not with shared pages: AOTAutograd refuses graph inputs that are views of one storage in different dtypes.
@pytest.mark.parametrize("name", ["kimi k3", "kimi linear"])
def test_compiled_calls_keep_values_and_mutations(
    name: str, given: bool, backend: str, device: torch.device, rng: torch.Generator
) -> None:
    if backend == "inductor" and (name != "kimi k3" or not given):
        pytest.skip("one inductor compilation is enough")
    call = _finite_call(device, rng, FORMS[name])
    if given:
        call.args["out"] = poisoned_out(call)
    twin = call.copy()
    compiled = torch.compile(_between_torch_ops, fullgraph=True, backend=backend)
    for _ in range(2):
        want = _between_torch_ops(call["x"], call["state"], call.args)
        got = compiled(twin["x"], twin["state"], twin.args)
        assert_same_results(call, twin, want, got)
        if given:
            assert_same_bits(twin["out"], call["out"], "out")


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_fake_tensors_get_shape_dtype_and_device(kind: str) -> None:
    with FakeTensorMode():
        rows, heads, slots = 5, 2, 9

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=kind)

        args = (
            empty(rows, 3 * heads * D, dtype=BF16),
            empty(3, 4, heads * D),
            empty(slots, 3, 3 * heads * D, dtype=BF16).transpose(1, 2),
            empty(rows, heads, D, dtype=BF16),
            empty(rows, heads, dtype=BF16),
            empty(heads),
            empty(heads * D),
            empty(slots, heads, D, D),
            empty(rows, dtype=torch.int32),
        )
        out = kda_decode(*args)
        given = empty(rows, heads, D, dtype=BF16)
        assert kda_decode(*args, out=given) is given
    assert out.shape == (rows, heads, D)
    assert out.is_contiguous()
    assert out.dtype == BF16
    assert out.device.type == kind


def test_bad_input_raises_through_the_torch_op_too(device: torch.device, rng: torch.Generator) -> None:
    call = make_call(device, rng)
    bad = call.changed(raw_beta=call["raw_beta"][:, :2])
    with pytest.raises(ValueError, match=r"kda_decode: raw_beta: expected .*, got "):
        OPS.kda_decode(*_op_arguments(bad, poisoned_out(call)))


def test_bad_input_raises_when_compiled(rng: torch.Generator) -> None:
    call = _finite_call(torch.device("cpu"), rng, FORMS["kimi k3"])
    bad = call.args | {"raw_gate": call["raw_gate"].double()}
    with pytest.raises(TypeError, match=r"kda_decode: raw_gate: expected .*, got "):
        torch.compile(_between_torch_ops, backend="aot_eager")(call["x"], call["state"], bad)
