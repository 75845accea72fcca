"""The registered torch op of ``kda_decode_spec``: schema, opcheck, torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.helpers import assert_same_bits
from tests.kda_cases import D, Form, tensors
from tests.kda_spec_cases import (
    SPEC_POSITIONAL,
    SpecCall,
    SpecForm,
    assert_same_caches,
    make_spec_call,
    spec_out,
)
from vllm_hotpath.ops.kda_decode import kda_decode_spec

OPS = torch.ops.vllm_hotpath
SCHEMA = (
    "vllm_hotpath::kda_decode_spec(Tensor[] x, Tensor[] conv_weight, Tensor(a!)[] conv_state, "
    "Tensor raw_gate, Tensor raw_beta, Tensor? a_log, Tensor? dt_bias, Tensor(b!) state, "
    "Tensor state_indices, Tensor query_start_loc, Tensor num_accepted_tokens, Tensor(c!) out, "
    "Tensor[] conv_bias, float? lower_bound, Tensor? output_gate, Tensor? norm_weight, float norm_eps, "
    "float? scale, int null_index, bool gate_is_log_decay, bool beta_is_sigmoid) -> ()"
)
LISTS = ("x", "conv_weight", "conv_state", "conv_bias")
FORMS = {
    "kimi k3": SpecForm(form=Form(paged=False, inputs="wide"), tail=1),
    "DS with bias": SpecForm(null=((0, 0),), form=Form(paged=False, layout="DS", bias=True)),
    "kimi linear": SpecForm(
        form=Form(parts=True, paged=False, log_decay=True, sigmoid_beta=True, norm=False)
    ),
    "shared pages": SpecForm(),
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def _finite_call(device: torch.device, rng: torch.Generator, form: SpecForm) -> SpecCall:
    """A call without NaN anywhere, which comparisons by value would stumble over."""
    call = make_spec_call(device, rng, form)
    for value in call.args.values():
        for tensor in tensors(value):
            if tensor.is_floating_point():
                tensor.masked_fill_(~torch.isfinite(tensor), 0.5)
                tensor.clamp_(-100, 100)
    return call


def _op_arguments(call: SpecCall) -> tuple[Any, ...]:
    out = torch.zeros(
        call.tokens(), *call["state"].shape[1:3], dtype=torch.bfloat16, device=call["state"].device
    )
    args = {"norm_eps": 1e-5, "out": out} | call.args
    args |= {name: list(tensors(args[name])) for name in LISTS}
    return tuple(args[argument.name] for argument in OPS.kda_decode_spec.default._schema.arguments)


def test_schema_is_pinned() -> None:
    assert str(OPS.kda_decode_spec.default._schema) == SCHEMA
    assert OPS.kda_decode_spec.overloads() == ["default"]


@pytest.mark.parametrize("name", list(FORMS))
def test_opcheck_is_clean(name: str, device: torch.device, rng: torch.Generator) -> None:
    torch.library.opcheck(OPS.kda_decode_spec.default, _op_arguments(_finite_call(device, rng, FORMS[name])))


@pytest.mark.parametrize("name", list(FORMS))
def test_the_torch_op_equals_the_function(name: str, device: torch.device, rng: torch.Generator) -> None:
    call = make_spec_call(device, rng, FORMS[name])
    call.args["out"] = spec_out(call)
    twin = call.copy()
    want = call.run()
    OPS.kda_decode_spec(*_op_arguments(twin))
    assert_same_bits(twin["out"], want, "out")
    assert_same_caches(twin, call)


# Not with shared pages: AOTAutograd refuses graph inputs that are views of one storage in different dtypes.
@pytest.mark.parametrize("name", [name for name in FORMS if name != "shared pages"])
def test_compiled_calls_equal_eager_ones(name: str, device: torch.device, rng: torch.Generator) -> None:
    call = _finite_call(device, rng, FORMS[name])
    twin = call.copy()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(args: dict[str, Any]) -> torch.Tensor:
        args = dict(args)
        return kda_decode_spec(*[args.pop(name) for name in SPEC_POSITIONAL], **args) * 2

    want = call.run() * 2
    assert_same_bits(step(twin.args), want, "out")
    assert_same_caches(twin, call)


def test_fake_tensors_get_a_fake_result(device: torch.device, rng: torch.Generator) -> None:
    call = make_spec_call(device, rng, FORMS["kimi k3"])
    with FakeTensorMode() as mode:
        fake = {
            name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
            for name, value in call.args.items()
        }
        out = kda_decode_spec(*[fake.pop(name) for name in SPEC_POSITIONAL], **fake)
    assert out.shape == (call.tokens(), 3, D)
    assert out.dtype == torch.bfloat16
