"""What ``moe_fp4_preamble`` refuses: the message names op and argument; no byte is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import vllm_hotpath
from tests.helpers import BF16, FP16, Output
from tests.moe_router_cases import FP32
from tests.nvfp4_cases import scale_of
from vllm_hotpath import _core
from vllm_hotpath.ops import allocate

if TYPE_CHECKING:
    from collections.abc import Callable

M, E, K = 5, 24, 80


def _call(device: torch.device) -> tuple[dict[str, Any], dict[str, Output]]:
    """A correct call with poisoned outputs, to be spoiled."""
    outputs = {
        "out": Output((M, K // 2), torch.uint8, device),
        "out_scale": Output((8, 8), torch.uint8, device),
        "out_logits": Output((M, E), FP32, device),
    }
    args = {
        "hidden_states": torch.ones(M, K, dtype=BF16, device=device),
        "global_scale": scale_of(2.0, device),
        "gate_weight": torch.ones(E, K, dtype=BF16, device=device),
        "logits_dtype": FP32,
        "routing_bias": torch.zeros(E, device=device),
        "bias_dtype": BF16,
        "layout": "swizzled_8x4",
    }
    return args | {name: output.tensor for name, output in outputs.items()}, outputs


class Bad(NamedTuple):
    name: str
    argument: str
    change: Callable[[Any], Any]
    error: type[Exception] | tuple[type[Exception], ...]
    expected: str


def _rows(x: torch.Tensor, count: int) -> torch.Tensor:
    return x[:1].repeat(count, 1)


CASES = (
    Bad("fp32", "hidden_states", lambda x: x.float(), TypeError, "bfloat16"),
    Bad("fp16", "hidden_states", lambda x: x.to(FP16), TypeError, "bfloat16 with gate_weight"),
    Bad("33 tokens", "hidden_states", lambda x: _rows(x, 33), ValueError, "32 tokens with gate_weight"),
    Bad("odd width", "hidden_states", lambda x: x[:, :-8], ValueError, "a multiple of 16"),
    Bad("one dimension", "hidden_states", lambda x: x[0], ValueError, "dimensions"),
    Bad("transposed", "hidden_states", lambda x: x.mT.contiguous().mT, ValueError, "stride 1"),
    Bad("a list", "hidden_states", lambda x: x.tolist(), TypeError, "expected a tensor"),
    Bad("fp64", "global_scale", lambda s: s.double(), TypeError, "float32"),
    Bad("two scales", "global_scale", lambda s: s.expand(2).clone(), ValueError, "one element"),
    Bad("a number", "global_scale", lambda _: 2.0, TypeError, "expected a tensor"),
    Bad("fp32", "gate_weight", lambda w: w.float(), TypeError, "bfloat16"),
    Bad("another width", "gate_weight", lambda w: w[:, :64], ValueError, f"experts, {K}]"),
    Bad("1025 experts", "gate_weight", lambda w: _rows(w, 1025), ValueError, "1 to 1024 experts"),
    Bad("no experts", "gate_weight", lambda w: w[:0], ValueError, "1 to 1024 experts"),
    Bad("one dimension", "gate_weight", lambda w: w[0], ValueError, "2 dimensions"),
    Bad("no dimension", "gate_weight", lambda w: w[0, 0], ValueError, "2 dimensions"),
    Bad("a list", "gate_weight", lambda w: w.tolist(), TypeError, "expected a tensor"),
    Bad("every second column", "gate_weight", lambda w: w.repeat(1, 2)[:, ::2], ValueError, "stride 1"),
    Bad("fp16", "logits_dtype", lambda _: FP16, TypeError, "torch.bfloat16 or torch.float32"),
    Bad("a list", "logits_dtype", lambda _: [FP32], TypeError, "torch.bfloat16 or torch.float32"),
    Bad("a name", "bias_dtype", lambda _: "bfloat16", TypeError, "torch.float32"),
    Bad("a list", "routing_bias", lambda b: b.tolist(), TypeError, "expected a tensor"),
    Bad("numpy's, to be cast", "routing_bias", lambda b: b.cpu().numpy(), TypeError, "a tensor of torch"),
    Bad("negative bit", "routing_bias", torch._neg_view, ValueError, "resolve_neg"),
    Bad("another", "layout", lambda _: "128x4", ValueError, "swizzled_8x4"),
    Bad("another number", "routing_bias", lambda b: b[:-1], ValueError, f"[{E}]"),
    Bad("two dimensions", "routing_bias", lambda b: b[None], ValueError, f"[{E}]"),
    Bad("integers", "routing_bias", lambda b: b.int(), TypeError, "float32"),
    Bad("fp64", "bias_dtype", lambda _: torch.float64, TypeError, "float32"),
    Bad("int8", "out", lambda x: x.view(torch.int8), TypeError, "uint8"),
    Bad("short", "out", lambda x: x[:, :-1], ValueError, "shape"),
    Bad("rows apart", "out", lambda x: x.repeat(1, 2)[:, : K // 2], ValueError, "contiguous"),
    Bad("linear", "out_scale", lambda s: s[:M, :5].contiguous(), ValueError, "shape"),
    Bad("bf16", "out_logits", lambda x: x.to(BF16), TypeError, "float32"),
    Bad("short", "out_logits", lambda x: x[:, :-1], ValueError, "shape"),
    Bad("one row for all", "out_logits", lambda x: x[:1].expand(x.shape), ValueError, "apart"),
    Bad("transposed", "out_logits", lambda x: x.mT.contiguous().mT, ValueError, "stride 1"),
)


def test_the_unspoiled_call_is_accepted(device: torch.device) -> None:
    vllm_hotpath.moe_fp4_preamble(**_call(device)[0])


@pytest.mark.parametrize("bad", CASES, ids=lambda bad: f"{bad.argument}: {bad.name}")
def test_refused(bad: Bad, device: torch.device) -> None:
    args, outputs = _call(device)
    args[bad.argument] = bad.change(args[bad.argument])
    with pytest.raises(bad.error) as raised:
        vllm_hotpath.moe_fp4_preamble(**args)
    message = str(raised.value)
    assert bad.expected in message
    assert message.startswith(f"moe_fp4_preamble: {bad.argument}: ")
    for name, output in outputs.items():
        if name != bad.argument:
            output.assert_untouched(name)


@pytest.mark.parametrize(("argument", "value"), [("logits_dtype", BF16), ("out_logits", None)])
def test_arguments_that_only_a_gate_has(
    argument: str, value: torch.dtype | None, device: torch.device
) -> None:
    args, outputs = _call(device)
    given = args[argument] if value is None else value
    args |= {"gate_weight": None, "logits_dtype": None, "out_logits": None} | {argument: given}
    with pytest.raises(ValueError, match=f"moe_fp4_preamble: {argument}: expected None without gate_weight"):
        vllm_hotpath.moe_fp4_preamble(**args)
    for name, output in outputs.items():
        output.assert_untouched(name)


@pytest.mark.parametrize(
    ("written", "other"),
    [
        ("out", "hidden_states"),
        ("out", "gate_weight"),
        ("out_logits", "hidden_states"),
        ("out_logits", "gate_weight"),
        ("out_scale", "out_logits"),
        ("out", "out_logits"),
        ("out_scale", "out"),
        ("out", "routing_bias"),
        ("out_logits", "routing_bias"),
    ],
)
def test_outputs_may_not_overlap(written: str, other: str, device: torch.device) -> None:
    args, _ = _call(device)
    out, source = args[written], args[other]
    memory = torch.zeros(out.nbytes + source.nbytes, dtype=torch.uint8, device=device)
    args[written] = memory[: out.nbytes].view(out.dtype).view(out.shape)
    start = out.nbytes - 32
    args[other] = memory[start : start + source.nbytes].view(source.dtype).view(source.shape)
    with pytest.raises(ValueError, match="memory apart from"):
        vllm_hotpath.moe_fp4_preamble(**args)
    assert not memory.any()


@pytest.mark.gpu("moe_fp4_preamble")
@pytest.mark.parametrize(
    "argument",
    ["hidden_states", "global_scale", "gate_weight", "routing_bias", "out", "out_scale", "out_logits"],
)
def test_another_device_is_refused(argument: str) -> None:
    args, _ = _call(torch.device("cuda"))
    args[argument] = args[argument].cpu()
    # What all others are compared with is named for none of them.
    named = "global_scale" if argument == "hidden_states" else argument
    with pytest.raises(ValueError, match=f"moe_fp4_preamble: {named}: expected device .*, got "):
        vllm_hotpath.moe_fp4_preamble(**args)


def test_fake_tensors_do_not_reach_the_extension() -> None:
    with FakeTensorMode():
        x, scale = torch.empty(M, K, dtype=BF16), torch.empty(1)
        with pytest.raises((TypeError, ValueError)):
            _core.moe_fp4_preamble(x, scale, None, None, "linear", None, None, None, allocate)


def test_a_bias_of_numpy_is_handed_on() -> None:
    args, _ = _call(torch.device("cpu"))
    bias = args["routing_bias"].numpy()
    assert vllm_hotpath.moe_fp4_preamble(**args | {"routing_bias": bias, "bias_dtype": None})[3] is bias


@pytest.mark.parametrize(
    ("argument", "value", "expected"),
    [
        ("layout", "128x4", "expected one of linear, "),
        ("hidden_states", torch.ones(K, dtype=BF16), "expected rows of"),
    ],
)
def test_the_dispatcher_names_op_and_argument_too(argument: str, value: object, expected: str) -> None:
    args, _ = _call(torch.device("cpu"))
    args |= {argument: value, "out": None, "out_scale": None}
    expected = f"^moe_fp4_preamble: {argument}: {expected}"
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ValueError, match=expected):
        vllm_hotpath.moe_fp4_preamble(**args)


def test_is_supported_knows_the_limits_of_a_gate() -> None:
    assert vllm_hotpath.is_supported("moe_fp4_preamble", "cpu", tokens=32, experts=384)
    answer = vllm_hotpath.is_supported("moe_fp4_preamble", "cpu", tokens=33)
    assert not answer
    assert answer.reason == "moe_fp4_preamble: tokens: expected 0 to 32, got 33"
