"""CUDA behaviour of ``moe_fp4_preamble``: parity with its parts, one launch, capture, streams, far rows."""

from __future__ import annotations

import threading
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

import vllm_hotpath
from tests import cuda_probe
from tests.helpers import BF16, POISON, assert_same_bits, capture, far_rows, run_python
from tests.moe_fp4_preamble_cases import FORMS, Call, check, make_call
from tests.moe_router_cases import FP32
from tests.nvfp4_cases import LAYOUTS, outputs, scale_of

if TYPE_CHECKING:
    from vllm_hotpath import MoePreamble

pytestmark = pytest.mark.gpu("moe_fp4_preamble")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def _assert_same(got: MoePreamble, want: MoePreamble) -> None:
    for name in ("packed", "scales", "router_logits"):
        ours = getattr(got, name)
        assert ours.is_cuda
        assert_same_bits(ours.contiguous(), getattr(want, name).contiguous(), name)


def _given(call: Call) -> dict[str, torch.Tensor]:
    packed, scales = outputs((call.form.tokens,), call.form.hidden, call.form.layout, CUDA)
    shape = (call.form.tokens, call.form.experts)
    logits = torch.full(shape, -7.0, dtype=call.form.logits or BF16, device=CUDA)
    return {"out": packed.tensor, "out_scale": scales.tensor, "out_logits": logits}


def _poison(given: dict[str, torch.Tensor]) -> None:
    for tensor in given.values():
        tensor.view(torch.uint8).fill_(POISON)


@pytest.mark.parametrize("name", list(FORMS))
def test_codes_agree_with_the_cpu(name: str, rng: torch.Generator) -> None:
    call = make_call(CPU, rng, FORMS[name])
    want, got = call.run(), call.to(CUDA).run()
    assert_same_bits(got.packed, want.packed, "codes")
    assert_same_bits(got.scales, want.scales, "scales")


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.experts >= 8])
def test_logits_are_those_of_the_router(name: str, rng: torch.Generator) -> None:
    """Both kernels sum in the same order."""
    call = make_call(CUDA, rng, FORMS[name])
    got = call.run().router_logits
    assert got is not None
    logits = torch.empty_like(got)
    vllm_hotpath.moe_router(
        call.hidden, call.weight, top_k=1, logits_dtype=call.form.logits, out_logits=logits
    )
    assert_same_bits(got, logits, "logits")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [1, 8, 9, 16, 17, 32])
def test_replay_sees_changed_inputs(tokens: int, layout: Any, rng: torch.Generator) -> None:
    form: dict[str, Any] = {"tokens": tokens, "layout": layout, "experts": 384, "hidden": 464}
    call = make_call(CUDA, rng, **form)
    given, scale = _given(call), scale_of(1.0, CUDA)

    def run(call: Call, **options: torch.Tensor) -> MoePreamble:
        return vllm_hotpath.moe_fp4_preamble(
            call.hidden, scale, gate_weight=call.weight, layout=layout, **options
        )

    graph, made = capture(lambda: run(call, **given))
    for _ in range(4):
        fresh = make_call(CUDA, rng, **form)
        call.hidden.copy_(fresh.hidden)
        call.weight.copy_(fresh.weight)
        scale.fill_(float(torch.rand((), generator=rng)) * 50)
        want = run(fresh)
        _poison(given)
        for _ in range(3):
            graph.replay()
        _assert_same(made, want)


@pytest.mark.parametrize("name", list(FORMS))
def test_a_call_is_one_kernel_node(name: str, rng: torch.Generator) -> None:
    call = make_call(CUDA, rng, FORMS[name])
    graph, _ = capture(call.run, keep_graph=True)
    assert cuda_probe.node_types(graph) == [cuda_probe.KERNEL_NODE]
    graph, _ = capture(lambda: call.run(gate_weight=None, logits_dtype=None), keep_graph=True)
    assert cuda_probe.node_types(graph) == [cuda_probe.KERNEL_NODE]


def test_a_kept_bias_adds_no_node(rng: torch.Generator) -> None:
    call, bias = make_call(CUDA, rng), torch.randn(40, generator=rng).to(CUDA)
    kept = call.run(routing_bias=bias, bias_dtype=BF16).routing_bias
    graph, made = capture(lambda: call.run(routing_bias=bias, bias_dtype=BF16), keep_graph=True)
    assert cuda_probe.node_types(graph) == [cuda_probe.KERNEL_NODE]
    assert made.routing_bias is kept


def test_no_tokens_launch_nothing(rng: torch.Generator) -> None:
    call = make_call(CUDA, rng, tokens=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Graph is empty")
        graph, _ = capture(call.run, keep_graph=True)
    assert cuda_probe.node_types(graph) == []


_FIRST_CALL = """
import torch
from tests.moe_fp4_preamble_cases import FORMS, make_call

call = make_call(torch.device("cuda"), torch.Generator().manual_seed({seed}), FORMS[{name!r}])
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, capture_error_mode={mode!r}):
    got = call.run()
for tensor in got[:3]:
    tensor.view(torch.uint8).fill_(0x7F)
graph.replay()
for ours, want in zip(got[:3], call.run()[:3]):
    assert torch.equal(ours, want)
torch.cuda.synchronize()
print("captured")
"""


@pytest.mark.parametrize(
    ("mode", "name"),
    [("global", "kimi k2.6"), ("thread_local", "padding columns"), ("relaxed", "deepseek v3")],
)
def test_the_first_call_of_a_process_may_be_inside_a_capture(
    mode: str, name: str, rng: torch.Generator
) -> None:
    code = _FIRST_CALL.format(seed=rng.initial_seed() % 2**31, mode=mode, name=name)
    assert run_python(code).endswith("captured\n")


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_the_op_waits_for_a_producer_that_lets_it_start_early(captured: bool, rng: torch.Generator) -> None:
    late_copy = cuda_probe.load_late_copy()
    source = make_call(CUDA, rng, FORMS["kimi k2.6"])
    hidden = torch.zeros_like(source.hidden)
    call = Call(hidden, source.weight, source.form)
    given = _given(call)

    def body() -> MoePreamble:
        late_copy(source.hidden, hidden)
        return call.run(**given)

    graph, made = capture(body) if captured else (None, None)
    for _ in range(30):
        source.hidden.copy_(torch.randn(source.hidden.shape, generator=rng))
        want = source.run()
        hidden.zero_()
        _poison(given)
        torch.cuda.synchronize()
        if graph is None:
            made = body()
        else:
            graph.replay()
        assert made is not None
        _assert_same(made, want)


def test_two_threads_on_two_streams(rng: torch.Generator) -> None:
    calls = [make_call(CUDA, rng, FORMS[name]) for name in ("kimi k2.6", "deepseek v3")]
    wants = [call.run() for call in calls]
    torch.cuda.synchronize()
    errors: list[BaseException] = []

    def work(call: Call, want: MoePreamble) -> None:
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(50):
                    got = call.run()
                    stream.synchronize()
                    _assert_same(got, want)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(calls, wants, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]


def test_context_is_usable_after_refused_calls(rng: torch.Generator) -> None:
    call = make_call(CUDA, rng)
    for _ in range(5):
        with pytest.raises(ValueError, match="gate_weight"):
            call.run(gate_weight=call.weight[:, :-16])
    torch.cuda.synchronize()
    check(call)


@pytest.mark.big(device_gib=14)
@pytest.mark.parametrize("odd", [0, 1], ids=["aligned", "odd"])
def test_rows_beyond_2_31_bytes(odd: int, rng: torch.Generator) -> None:
    """Rows of activations, weight and logits, in turn, more than 2^31 bytes apart."""
    call = make_call(CUDA, rng, tokens=4, experts=16, hidden=80, logits=FP32)
    want = call.run()
    memory = torch.empty(12 * 2**30, dtype=torch.uint8, device=CUDA)

    apart = Call(far_rows(memory, call.hidden, 2**31 + 2**20, odd), call.weight, call.form)
    got = apart.run()
    assert_same_bits(got.packed, want.packed)
    if not odd:
        _assert_same(got, want)
    apart = Call(call.hidden, far_rows(memory, call.weight, 600 * 2**20, odd), call.form)
    assert_same_bits(apart.run().packed, want.packed)
    assert want.router_logits is not None
    logits = far_rows(memory, torch.zeros_like(want.router_logits), 2**31 + 2**20, odd)
    _assert_same(call.run(out_logits=logits), want)
