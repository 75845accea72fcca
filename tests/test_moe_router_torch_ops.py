"""The registered torch op of ``moe_router``: schema, opcheck, fakes, torch.compile with given outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.helpers import BF16, assert_same_bits
from tests.moe_router_cases import FORMS, FP32, Call, Form, check, make_call, workspace_elements
from vllm_hotpath.ops.moe_router import moe_router

OPS = torch.ops.vllm_hotpath
SCHEMA = (
    "vllm_hotpath::moe_router(Tensor hidden_states, Tensor gate_weight, Tensor(a!) topk_weights, "
    "Tensor(b!) topk_ids, int top_k, Tensor? bias, int n_group, int topk_group, str scoring, "
    "bool renormalize, float routed_scaling_factor, ScalarType? logits_dtype, Tensor(c!)? out_logits, "
    "Tensor(d!)? workspace) -> ()"
)
NAMES = ("few", "deepseek v3", "many with bf16 logits", "fp32 weight", "softmax", "odd sizes", "no tokens")
SMALL = {
    **{name: FORMS[name] for name in NAMES if name in FORMS},
    "few": Form(scaling=2.827),
    "deepseek v3": Form(experts=256, n_group=8, topk_group=4, scaling=2.5),
    "no tokens": Form(tokens=0),
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def _with_outputs(call: Call, *, workspace: bool = False) -> Call:
    tokens, experts = call.shape
    device = call["hidden_states"].device
    outputs = {
        "out_logits": torch.full((tokens, experts), -7.0, dtype=call.logits_dtype, device=device),
        "topk_weights": torch.full((tokens, call["top_k"]), -7.0, device=device),
        "topk_ids": torch.full((tokens, call["top_k"]), -7, dtype=torch.int32, device=device),
        "workspace": torch.full((workspace_elements(tokens, experts),), -7, device=device)
        if workspace
        else None,
    }
    return call.changed(**outputs)


def _op_arguments(call: Call) -> tuple[Any, ...]:
    return tuple(call[argument.name] for argument in OPS.moe_router.default._schema.arguments)


def _assert_same_outputs(got: Call, want: Call) -> None:
    for name in ("out_logits", "topk_weights", "topk_ids"):
        assert_same_bits(got[name], want[name], name)


def test_schema_is_pinned() -> None:
    assert str(OPS.moe_router.default._schema) == SCHEMA
    assert OPS.moe_router.overloads() == ["default"]


@pytest.mark.parametrize("name", NAMES)
def test_opcheck_is_clean(name: str, device: torch.device, rng: torch.Generator) -> None:
    # What a call leaves in the workspace is no result, and on the CPU it leaves it alone.
    call = _with_outputs(make_call(device, rng, SMALL[name]))
    torch.library.opcheck(OPS.moe_router.default, _op_arguments(call))


@pytest.mark.parametrize("name", NAMES)
def test_the_torch_op_equals_the_function(name: str, device: torch.device, rng: torch.Generator) -> None:
    call = make_call(device, rng, SMALL[name])
    want = check(call)
    through = _with_outputs(call, workspace=True)
    assert OPS.moe_router(*_op_arguments(through)) is None
    assert_same_bits(through["topk_weights"], want[0], "weights")
    assert_same_bits(through["topk_ids"], want[1], "ids")


def _between_torch_ops(hidden: torch.Tensor, args: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    args = dict(args)
    args.pop("hidden_states")
    weights, ids = moe_router(hidden * 2, args.pop("gate_weight"), **args)
    return weights + 1, ids * 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("given", [False, True], ids=["allocated", "given outputs"])
@pytest.mark.parametrize("name", ["deepseek v3", "many with bf16 logits"])
def test_compiled_calls_keep_values_and_mutations(
    name: str, given: bool, backend: str, device: torch.device, rng: torch.Generator
) -> None:
    if backend == "inductor" and (name != "deepseek v3" or not given):
        pytest.skip("one inductor compilation is enough")
    call = make_call(device, rng, SMALL[name])
    one, other = (_with_outputs(call, workspace=True) if given else call for _ in range(2))
    compiled = torch.compile(_between_torch_ops, fullgraph=True, backend=backend)
    for _ in range(2):
        want = _between_torch_ops(one["hidden_states"], one.args)
        got = compiled(other["hidden_states"], other.args)
        for mine, theirs in zip(got, want, strict=True):
            assert_same_bits(mine, theirs)
        if given:
            _assert_same_outputs(other, one)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_fake_tensors_get_shape_dtype_and_device(kind: str) -> None:
    with FakeTensorMode():
        hidden = torch.empty(5, 64, dtype=BF16, device=kind)
        weight = torch.empty(128, 64, dtype=BF16, device=kind)
        bias = torch.empty(128, device=kind)
        weights, ids = moe_router(hidden, weight, top_k=6, bias=bias)
        given = torch.empty(5, 6, device=kind), torch.empty(5, 6, dtype=torch.int32, device=kind)
        again = moe_router(hidden, weight, top_k=6, topk_weights=given[0], topk_ids=given[1])
        assert again[0] is given[0]
        assert again[1] is given[1]
    for tensor, dtype in ((weights, FP32), (ids, torch.int32)):
        assert tensor.shape == (5, 6)
        assert tensor.is_contiguous()
        assert tensor.dtype == dtype
        assert tensor.device.type == kind


def test_bad_input_raises_through_the_torch_op_too(device: torch.device, rng: torch.Generator) -> None:
    call = _with_outputs(make_call(device, rng))
    with pytest.raises(ValueError, match=r"moe_router: bias: expected .*, got "):
        OPS.moe_router(*_op_arguments(call.changed(bias=call["bias"][:5])))
    assert (call["topk_ids"] == -7).all()


def test_bad_input_raises_when_compiled(rng: torch.Generator) -> None:
    call = make_call("cpu", rng)
    bad = call.args | {"bias": call["bias"].double()}
    with pytest.raises(TypeError, match=r"moe_router: bias: expected .*, got "):
        torch.compile(_between_torch_ops, backend="aot_eager")(call["hidden_states"], bad)
