"""CUDA behaviour of ``moe_router``: capture, streams, counters, far rows."""

from __future__ import annotations

import dataclasses
import math
import threading
import warnings

import pytest
import torch

from tests import cuda_probe
from tests.helpers import BF16, assert_same_bits, capture, far_rows, run_python
from tests.moe_router_cases import (
    FORMS,
    FP32,
    Call,
    Form,
    assert_logits_close,
    assert_routing,
    call_of_logits,
    check,
    make_call,
    scores_of,
    workspace_elements,
)

pytestmark = pytest.mark.gpu("moe_router")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def _assert_same(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    for one, other, name in zip(got, want, ("weights", "ids"), strict=True):
        assert_same_bits(one, other, name)


@pytest.mark.parametrize("name", list(FORMS))
def test_every_form_agrees_with_the_cpu(name: str, rng: torch.Generator) -> None:
    call = make_call(CPU, rng, FORMS[name])
    logits = torch.empty(call.shape, dtype=call.logits_dtype)
    call.run(out_logits=logits)
    on_gpu = call.to(CUDA).with_outputs()
    on_gpu.run()
    assert_logits_close(on_gpu["out_logits"].cpu(), call["hidden_states"], call["gate_weight"])
    if call["scoring"] == "sigmoid":
        # From equal logits both select the same.
        tokens, experts = call.shape
        identity = {
            "hidden_states": torch.eye(tokens, 8, dtype=BF16),
            "gate_weight": torch.zeros(experts, 8).index_copy_(
                1, torch.arange(tokens), logits.float().T.contiguous()
            ),
            "logits_dtype": call.logits_dtype,
        }
        exact = call.changed(**identity)
        here, there = exact.run(), exact.to(CUDA).run()
        assert_same_bits(there[1], here[1], "ids")
        torch.testing.assert_close(there[0].cpu(), here[0], rtol=1e-5, atol=2.0**-23)


@pytest.mark.parametrize("tokens", [1, 8, 9, 16, 17, 32])
def test_replay_sees_changed_inputs_weights_and_bias(tokens: int, rng: torch.Generator) -> None:
    for name in ("kimi linear", "many with bf16 logits", "fp32 weight", "softmax in groups"):
        form = dataclasses.replace(FORMS[name], tokens=tokens)
        call = make_call(CUDA, rng, form).with_outputs()
        graph, _ = capture(call.run)
        for _ in range(4):
            fresh = make_call(CUDA, rng, form)
            for argument in ("hidden_states", "gate_weight", "bias"):
                call[argument].copy_(fresh[argument])
            want = fresh.run()
            for argument in ("out_logits", "topk_weights", "topk_ids"):
                call[argument].fill_(-7)
            for _ in range(3):
                graph.replay()
            _assert_same((call["topk_weights"], call["topk_ids"]), want)
            assert_logits_close(call["out_logits"], call["hidden_states"], call["gate_weight"])


def test_capturing_writes_nothing(rng: torch.Generator) -> None:
    call = make_call(CUDA, rng).with_outputs()
    graph, _ = capture(call.run)
    torch.cuda.synchronize()
    for argument in ("out_logits", "topk_weights", "topk_ids"):
        assert (call[argument] == -7).all()
    graph.replay()
    assert (call["topk_ids"] >= 0).all()


@pytest.mark.parametrize("name", list(FORMS))
def test_a_call_is_one_kernel_node_and_nothing_else(name: str, rng: torch.Generator) -> None:
    for tokens in (1, 12, 32):
        call = make_call(CUDA, rng, FORMS[name], tokens=tokens)
        graph, _ = capture(call.run, keep_graph=True)
        assert cuda_probe.node_types(graph) == [cuda_probe.KERNEL_NODE]


def test_no_tokens_launch_nothing(rng: torch.Generator) -> None:
    call = make_call(CUDA, rng, tokens=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Graph is empty")
        graph, _ = capture(call.run, keep_graph=True)
    assert cuda_probe.node_types(graph) == []


_FIRST_CALL = """
import torch
from tests.moe_router_cases import FORMS, make_call

rng = torch.Generator().manual_seed({seed})
call = make_call(torch.device("cuda"), rng, FORMS[{name!r}], tokens={tokens})
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, capture_error_mode={mode!r}):
    weights, ids = call.run()
for _ in range(3):
    weights.fill_(-7)
    ids.fill_(-7)
    graph.replay()
want = call.run()
assert torch.equal(ids, want[1]) and torch.equal(weights, want[0])
torch.cuda.synchronize()
print("captured")
"""


@pytest.mark.parametrize(
    ("mode", "name", "tokens"),
    [
        ("global", "kimi k2.6", 1),
        ("thread_local", "deepseek v3", 16),
        ("relaxed", "kimi k3", 32),
        ("global", "fp32 weight", 4),
    ],
)
def test_the_first_call_of_a_process_may_be_inside_a_capture(
    mode: str, name: str, tokens: int, rng: torch.Generator
) -> None:
    code = _FIRST_CALL.format(seed=rng.initial_seed() % 2**31, mode=mode, name=name, tokens=tokens)
    assert run_python(code).endswith("captured\n")


def test_a_graph_may_be_replayed_on_any_stream(rng: torch.Generator) -> None:
    call = make_call(CUDA, rng, FORMS["kimi k2.6"]).with_outputs()
    want = make_call(CUDA, rng).changed(**{**call.args, "topk_weights": None, "topk_ids": None}).run()
    graph, _ = capture(call.run)
    for stream in [torch.cuda.Stream() for _ in range(3)]:
        call["topk_weights"].fill_(-7)
        call["topk_ids"].fill_(-7)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(20):
                graph.replay()
        torch.cuda.current_stream().wait_stream(stream)
        _assert_same((call["topk_weights"], call["topk_ids"]), want)


def _jobs(rng: torch.Generator) -> list[tuple[Call, tuple[torch.Tensor, torch.Tensor]]]:
    """Two different calls that may run at once, and what they return alone."""
    calls = [make_call(CUDA, rng, FORMS["kimi k2.6"]), make_call(CUDA, rng, FORMS["kimi k3"], tokens=20)]
    return [(call.with_outputs(), call.run()) for call in calls]


def _clear(call: Call) -> None:
    call["topk_weights"].fill_(-7)
    call["topk_ids"].fill_(-7)


def test_two_graphs_replayed_at_once_do_not_disturb_each_other(rng: torch.Generator) -> None:
    jobs = _jobs(rng)
    streams = [torch.cuda.Stream() for _ in jobs]
    graphs = []
    for call, _ in jobs:

        def many(call: Call = call) -> None:
            for _ in range(20):
                call.run()

        graphs.append(capture(many)[0])
    for _ in range(25):
        for call, _ in jobs:
            _clear(call)
        torch.cuda.synchronize()
        for _ in range(10):
            for graph, stream in zip(graphs, streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
        for call, want in jobs:
            _assert_same((call["topk_weights"], call["topk_ids"]), want)


def test_two_streams_at_once(rng: torch.Generator) -> None:
    jobs = _jobs(rng)
    streams = [torch.cuda.Stream() for _ in jobs]
    torch.cuda.synchronize()
    for _ in range(20):
        for call, _ in jobs:
            _clear(call)
        torch.cuda.synchronize()
        # Both wait, so that the calls queue up and then run at once.
        for stream in streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(3_000_000)
        for _ in range(100):
            for (call, _), stream in zip(jobs, streams, strict=True):
                with torch.cuda.stream(stream):
                    call.run()
        torch.cuda.synchronize()
        for call, want in jobs:
            _assert_same((call["topk_weights"], call["topk_ids"]), want)


def test_two_threads_on_two_streams(rng: torch.Generator) -> None:
    jobs = _jobs(rng)
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def work(call: Call, want: tuple[torch.Tensor, torch.Tensor]) -> None:
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(30):
                    _clear(call)
                    for _ in range(20):
                        call.run()
                    stream.synchronize()
                    _assert_same((call["topk_weights"], call["topk_ids"]), want)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_calls_behind_each_other_share_a_workspace(rng: torch.Generator) -> None:
    """Sixty layers of different weights in one graph, each launched before the one before has ended."""
    for tokens in (1, 16, 32):
        layers = [make_call(CUDA, rng, experts=384, hidden=1024, tokens=tokens) for _ in range(60)]
        wants = []
        for layer in layers:
            wants.append(layer.run())
            torch.cuda.synchronize()
        workspace = torch.empty(workspace_elements(tokens, 384), dtype=torch.int64, device=CUDA)
        layers = [layer.changed(workspace=workspace).with_outputs() for layer in layers]

        def body(layers: list[Call] = layers) -> None:
            for layer in layers:
                layer.run()

        graph, _ = capture(body)
        want = [torch.stack(each) for each in zip(*wants, strict=True)]
        for _ in range(20):
            for layer in layers:
                _clear(layer)
            graph.replay()
            got = [torch.stack([layer[name] for layer in layers]) for name in ("topk_weights", "topk_ids")]
            _assert_same(tuple(got), tuple(want))


def test_counters_come_round(rng: torch.Generator) -> None:
    """More eager calls, and more captured ones, than there are counters."""
    call = make_call(CUDA, rng, experts=64, hidden=64).with_outputs()
    want = make_call(CUDA, rng).changed(**{**call.args, "topk_weights": None, "topk_ids": None}).run()
    workspace = torch.empty(workspace_elements(3, 64), dtype=torch.int64, device=CUDA)
    call.args["workspace"] = workspace
    for _ in range(70):
        _clear(call)
        for _ in range(1000):
            call.run()
        _assert_same((call["topk_weights"], call["topk_ids"]), want)

    def many() -> None:
        for _ in range(4000):
            call.run()

    graphs = [capture(many)[0]]
    for _ in range(50):
        graphs[1:] = [capture(many)[0]]
    for graph in graphs:
        _clear(call)
        graph.replay()
        _assert_same((call["topk_weights"], call["topk_ids"]), want)


def test_a_side_stream_orders_the_op_behind_its_producer(rng: torch.Generator) -> None:
    call = make_call(CUDA, rng, FORMS["kimi linear"], tokens=16)
    want = call.run()
    hidden = torch.zeros_like(call["hidden_states"])
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        hidden.copy_(call["hidden_states"])
        got = call.run(hidden_states=hidden)
        assert torch.cuda.current_stream() == stream
    stream.synchronize()
    _assert_same(got, want)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_the_op_waits_for_a_producer_that_lets_it_start_early(captured: bool, rng: torch.Generator) -> None:
    late_copy = cuda_probe.load_late_copy()
    source = make_call(CUDA, rng, FORMS["kimi k2.6"], tokens=8)
    hidden = torch.zeros_like(source["hidden_states"])
    call = source.changed(hidden_states=hidden).with_outputs()

    def body() -> None:
        late_copy(source["hidden_states"], hidden)
        call.run()

    graph = capture(body)[0] if captured else None
    for _ in range(30):
        source["hidden_states"].copy_(torch.randn(8, 7168, generator=rng))
        want = source.run()
        hidden.zero_()
        torch.cuda.synchronize()
        if graph is None:
            body()
        else:
            graph.replay()
        _assert_same((call["topk_weights"], call["topk_ids"]), want)


def test_a_call_does_not_wait_for_the_device(rng: torch.Generator) -> None:
    call = make_call(CUDA, rng)
    call.run()
    torch.cuda.synchronize()
    torch.cuda._sleep(500_000_000)
    call.run()
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()


def test_context_stream_and_device_are_left_as_they_were(rng: torch.Generator) -> None:
    call = make_call(CUDA, rng)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        before = cuda_probe.current_context(), torch.cuda.current_device(), torch.cuda.current_stream()
        call.run()
        with pytest.raises(ValueError, match="top_k"):
            call.run(top_k=33)
        after = cuda_probe.current_context(), torch.cuda.current_device(), torch.cuda.current_stream()
    assert after == before
    torch.cuda.synchronize()
    check(make_call(CUDA, rng))


@pytest.mark.big(device_gib=14)
@pytest.mark.parametrize("weight", [BF16, FP32], ids=str)
@pytest.mark.parametrize("odd", [0, 1], ids=["aligned", "odd"])
def test_rows_beyond_2_31_bytes(odd: int, weight: torch.dtype, rng: torch.Generator) -> None:
    """Rows of hidden states, weights and logits, in turn, more than 2^31 bytes apart."""
    call = make_call(CUDA, rng, tokens=4, experts=16, hidden=72, weight=weight)
    logits = torch.empty(call.shape, dtype=call.logits_dtype, device=CUDA)
    want = call.run(out_logits=logits)
    memory = torch.empty(12 * 2**30, dtype=torch.uint8, device=CUDA)

    hidden = far_rows(memory, call["hidden_states"], 2**31 + 2**20, odd)
    got_logits = torch.empty_like(logits)
    got = call.run(hidden_states=hidden, out_logits=got_logits)
    if not odd:
        _assert_same(got, want)
        assert_same_bits(got_logits, logits, "logits")
    assert_logits_close(got_logits, call["hidden_states"], call["gate_weight"])
    far_weight = far_rows(memory, call["gate_weight"], 600 * 2**20, odd)
    got = call.run(gate_weight=far_weight, out_logits=got_logits)
    assert_logits_close(got_logits, call["hidden_states"], call["gate_weight"])
    assert_routing(*got, scores_of(got_logits), got_logits, call.options)
    far_logits = far_rows(memory, logits, 2**31 + 2**20, odd)
    _assert_same(call.run(out_logits=far_logits), want)
    assert_same_bits(far_logits.contiguous(), logits, "logits")


@pytest.mark.parametrize("weight", [BF16, FP32], ids=str)
def test_inputs_at_every_alignment(weight: torch.dtype, rng: torch.Generator) -> None:
    """Every base and row stride modulo 16 bytes, of either operand alone and of both."""
    call = make_call(CUDA, rng, tokens=5, experts=33, hidden=104, weight=weight)

    def moved(x: torch.Tensor, offset: int) -> torch.Tensor:
        rows, columns = x.shape
        storage = torch.full(((rows + 1) * (columns + 8) + 16,), math.nan, dtype=x.dtype, device=CUDA)
        view = storage.as_strided((rows, columns), (columns + offset % 8, 1), offset)
        view.copy_(x)
        return view

    for offset in range(1, 9):
        for names in (("hidden_states",), ("gate_weight",), ("hidden_states", "gate_weight")):
            check(call.changed(**{name: moved(call[name], offset) for name in names}))


# Calls that the kernels for few tokens serve, whatever their number of tokens up to 8.
_FEW = {
    "kimi k2.6": {},
    "deepseek v3": {},
    "kimi linear": {},
    "fp32 weight": {},
    "fp32 weight, bf16 logits": {},
    "odd sizes": {"hidden_layout": "contiguous"},
    "16 of 384": {"experts": 384, "top_k": 16, "renormalize": False},
    "384 of any size": {"experts": 371, "hidden": 1000, "top_k": 9},
    "2 of 4 groups": {"experts": 64, "hidden": 4096, "top_k": 6, "n_group": 4, "topk_group": 2},
    "4 of 16 groups": {"experts": 256, "n_group": 16, "topk_group": 4, "bias": False},
    "no bias": {"n_group": 1, "topk_group": 1},
    "as many as there are": {"experts": 16, "top_k": 16, "hidden": 8},
}


def _few(name: str, rng: torch.Generator, tokens: int) -> Call:
    return make_call(CUDA, rng, FORMS.get(name, Form()), tokens=tokens, **_FEW[name])


def _workspace(call: Call, offset: int = 0) -> torch.Tensor:
    """A poisoned workspace ``offset`` elements behind an address that is a multiple of 16."""
    return torch.full((workspace_elements(*call.shape) + offset,), -7, dtype=torch.int64, device=CUDA)[
        offset:
    ]


@pytest.mark.parametrize("tokens", range(1, 9))
@pytest.mark.parametrize("name", list(_FEW))
def test_both_kernels_for_few_tokens_return_the_same_bits(
    name: str, tokens: int, rng: torch.Generator
) -> None:
    """A workspace that is not aligned to 16 bytes leaves only the kernels that serve every selection."""
    call = _few(name, rng, tokens)
    results = []
    for offset in (0, 1):
        one = call.with_outputs()
        one.run(workspace=_workspace(call, offset))
        results.append([one[argument] for argument in ("out_logits", "topk_weights", "topk_ids")])
    for few, any_, argument in zip(*results, ("logits", "weights", "ids"), strict=True):
        assert_same_bits(few, any_, argument)
    check(call)


@pytest.mark.parametrize("kind", ["equal", "two values", "nan", "infinite", "minus infinity", "nothing"])
@pytest.mark.parametrize("name", ["kimi k2.6", "deepseek v3", "384 of any size", "2 of 4 groups"])
def test_both_kernels_agree_on_awkward_logits(name: str, kind: str, rng: torch.Generator) -> None:
    form = _few(name, rng, 1)
    experts = form.shape[1]
    logits = torch.randn(experts, generator=rng)
    chosen = torch.rand(experts, generator=rng) < 0.2
    if kind == "equal":
        logits.fill_(0.25)
    elif kind == "two values":
        logits = torch.where(chosen, 1.0, -1.0)
    elif kind == "nothing":
        logits.fill_(-math.inf)
    else:
        logits[chosen] = {"nan": math.nan, "infinite": math.inf, "minus infinity": -math.inf}[kind]
    options = {key: form[key] for key in ("n_group", "topk_group", "renormalize", "routed_scaling_factor")}
    bias = torch.zeros(experts)
    call = call_of_logits(logits, CUDA, bias=bias, factors=(1.0, 0.5, -1.0), top_k=form["top_k"], **options)
    few = call.run(workspace=_workspace(call))
    _assert_same(few, call.run(workspace=_workspace(call, 1)))


def test_entries_of_earlier_launches_are_not_taken(rng: torch.Generator) -> None:
    """A graph finds in its workspace what an earlier launch of it, or of another one, has left."""
    calls = [_few("kimi k2.6", rng, tokens).with_outputs() for tokens in (1, 8, 3, 8)]
    workspace = _workspace(calls[1])
    graphs = [capture(lambda call=call: call.run(workspace=workspace))[0] for call in calls]
    left = [workspace.clone()]
    for _ in range(50):
        for call, graph in zip(calls, graphs, strict=True):
            call["hidden_states"].copy_(torch.randn(call["hidden_states"].shape, generator=rng))
            alone = {"out_logits": None, "topk_weights": None, "topk_ids": None}
            want = call.run(**alone)
            workspace.copy_(left[int(torch.randint(len(left), (1,), generator=rng))])
            for _ in range(2):
                _clear(call)
                graph.replay()
                _assert_same((call["topk_weights"], call["topk_ids"]), want)
            left.append(workspace.clone())


def test_a_counter_serves_launches_of_different_sizes(rng: torch.Generator) -> None:
    """Calls of several sizes in turn, of which no number divides that of the counters."""
    names = ("kimi linear", "fp32 weight", "2 of 4 groups", "odd sizes", "16 of 384")
    calls = [_few(name, rng, tokens) for name, tokens in zip(names, (1, 8, 3, 5, 2), strict=True)]
    workspace = max((_workspace(call) for call in calls), key=torch.numel)
    calls = [call.changed(workspace=workspace) for call in calls]
    wants = [call.run() for call in calls]
    calls = [call.with_outputs() for call in calls]
    torch.cuda.synchronize()
    for _ in range(3):
        for call in calls:
            _clear(call)
        for _ in range(10_000):
            for call in calls:
                call.run()
        for call, want in zip(calls, wants, strict=True):
            _assert_same((call["topk_weights"], call["topk_ids"]), want)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_eight_streams_at_once(captured: bool, rng: torch.Generator) -> None:
    names = list(_FEW)[:8]
    calls = [_few(name, rng, tokens) for name, tokens in zip(names, (1, 8, 1, 2, 4, 5, 1, 8), strict=True)]
    wants = [call.run() for call in calls]
    calls = [call.changed(workspace=_workspace(call)).with_outputs() for call in calls]

    def layers(call: Call) -> None:
        for _ in range(30):
            call.run()

    bodies = [
        capture(lambda call=call: layers(call))[0].replay if captured else lambda call=call: layers(call)
        for call in calls
    ]
    streams = [torch.cuda.Stream() for _ in calls]
    for _ in range(20):
        for call in calls:
            _clear(call)
        torch.cuda.synchronize()
        for stream in streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(1_000_000)
        for _ in range(5):
            for body, stream in zip(bodies, streams, strict=True):
                with torch.cuda.stream(stream):
                    body()
        torch.cuda.synchronize()
        for call, want in zip(calls, wants, strict=True):
            _assert_same((call["topk_weights"], call["topk_ids"]), want)
