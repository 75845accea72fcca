"""CUDA behaviour of ``kda_decode``: parity with the CPU, plans, capture, streams, order, 64-bit offsets."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch

from tests import cuda_probe
from tests.helpers import BF16, FP16, POISON, as_bits, assert_same_bits, capture, run_python
from tests.kda_cases import (
    FORMS,
    HEADS,
    STATE_DTYPES,
    STATE_TOLERANCE,
    Call,
    D,
    Form,
    assert_out_close,
    assert_same_results,
    assert_state_close,
    check,
    check_far_slots,
    conv_windows,
    make_call,
    one_step,
    poisoned_out,
    refill,
    whole,
)

pytestmark = pytest.mark.gpu("kda_decode")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FP32 = torch.float32
# Rows and heads on both sides of every change of plan on a whole H200.
SIZES = ((1, 1), (1, 12), (3, 12), (4, 12), (18, 12), (19, 12), (26, 12), (27, 12), (64, 12), (32, 96))


def _with_out(call: Call) -> Call:
    return call.changed(out=poisoned_out(call))


def _assert_agree(one: Call, other: Call) -> None:
    """Two runs of the same call by different code: each as close to the other as to the reference."""
    one = one.copy("cpu")
    slots = one["state_indices"].reshape(-1).long()
    slots = slots[slots > one["null_index"]]
    assert_out_close(one["out"], other["out"].double())
    mine, theirs = one["state"][slots].double(), other["state"][slots].double()
    allowed = theirs.abs().amax((-1, -2), keepdim=True) * 2 * STATE_TOLERANCE
    if one["state"].dtype != FP32:
        allowed = allowed + one_step(theirs.abs() + allowed, one["state"].dtype)
    assert ((mine - theirs).abs() <= allowed.clamp(min=1e-37)).all()
    for left, right in zip(conv_windows(one), conv_windows(other), strict=True):
        assert_same_bits(left, right, "conv_state")


@pytest.mark.parametrize("name", list(FORMS))
def test_every_form_agrees_with_the_cpu(name: str, rng: torch.Generator) -> None:
    call = _with_out(make_call(CPU, rng, FORMS[name]))
    on_gpu = call.copy(CUDA)
    call.run()
    on_gpu.run()
    _assert_agree(on_gpu, call)


@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS)
def test_every_size_agrees_with_the_cpu(heads: int, state_dtype: torch.dtype, rng: torch.Generator) -> None:
    for rows in (1, 2, 5, 16):
        call = _with_out(make_call(CPU, rng, rows=rows, heads=heads, state_dtype=state_dtype, inputs="wide"))
        on_gpu = call.copy(CUDA)
        call.run()
        on_gpu.run()
        _assert_agree(on_gpu, call)


@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
@pytest.mark.parametrize("heads", [3, 12])
def test_every_batch_size_gives_every_row_its_result(
    heads: int, state_dtype: torch.dtype, rng: torch.Generator
) -> None:
    """Batches of 1 to 300 rows cross every change of plan.

    Each is within the tolerances of the reference, its convolution state is right to the bit, and whatever a
    row gets, it gets to the bit in every batch.
    """
    null_rows = (5, 64, 299)
    by_row = ("x", "raw_gate", "raw_beta", "output_gate", "state_indices")
    call = make_call(
        CUDA, rng, rows=300, heads=heads, state_dtype=state_dtype, null_rows=null_rows, paged=False
    )
    want = call.reference()
    first = {name: as_bits(call[name]).clone() for name in ("conv_state", "state")}
    rounded = want.conv.flatten(1, 2)
    wanted_out, wanted_state = torch.empty(0), torch.empty(0)
    for rows in range(300, 0, -1):
        for name, bits in first.items():
            as_bits(call[name]).copy_(bits)
        part = {name: call[name][:rows] for name in by_row}
        out = poisoned_out(call.changed(**part))
        call.run(**part, out=out)
        live = int((want.rows < rows).sum())
        slots = want.slots[:live]
        assert_out_close(out, want.out[:rows])
        if rows == 300:
            wanted_out, wanted_state = out.clone(), call["state"].clone()
        assert_same_bits(out, wanted_out[:rows], "out")
        assert_same_bits(call["state"][slots], wanted_state[slots], "state")
        assert not as_bits(out)[[row for row in null_rows if row < rows]].any()
        assert_state_close(call["state"][slots], want.state[:live])
        assert_same_bits(call["conv_state"][slots], rounded[:live], "conv_state")
        rest = torch.ones(call["state"].shape[0], dtype=torch.bool, device=CUDA)
        rest[slots] = False
        for name, bits in first.items():
            assert torch.equal(as_bits(call[name])[rest], bits[rest])


@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "heads"), SIZES)
def test_equal_calls_give_equal_bits_in_every_plan(
    rows: int, heads: int, state_dtype: torch.dtype, rng: torch.Generator
) -> None:
    call = make_call(CUDA, rng, rows=rows, heads=heads, state_dtype=state_dtype)
    twins = [call.copy() for _ in range(5)]
    want = check(call)
    for twin in twins:
        assert_same_results(call, twin, want, twin.run())
        whole(twin["state"]).zero_()


@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "heads"), SIZES)
def test_null_rows_write_nothing_in_every_plan(
    rows: int, heads: int, state_dtype: torch.dtype, rng: torch.Generator
) -> None:
    for null_rows in ((0,), tuple(range(0, rows, 2)), tuple(range(rows))):
        check(make_call(CUDA, rng, rows=rows, heads=heads, state_dtype=state_dtype, null_rows=null_rows))


@pytest.mark.parametrize("rows", [1, 8, 40, 64])
def test_replay_sees_changed_inputs_indices_and_padding(rows: int, rng: torch.Generator) -> None:
    call = _with_out(make_call(CUDA, rng, rows=rows, heads=12))
    slots = call["state"].shape[0]
    # Whatever slot becomes live later holds finite values.
    for name in ("conv_state", "state"):
        call[name].copy_(call[name].nan_to_num(0.5, 0.5, 0.5).clamp(-2, 2))
    graph, _ = capture(call.run)

    def replay() -> torch.Tensor:
        graph.replay()
        return call["out"]

    for live in (rows, 1, 0, rows // 2, rows):
        refill(call, rng)
        indices = torch.randperm(slots - 1, generator=rng)[:rows].to(torch.int32) + 1
        indices[live:] = 0
        call["state_indices"].copy_(indices)
        as_bits(call["out"]).fill_(POISON * 257)
        check(call, out=call["out"], run=replay)


def test_capturing_writes_nothing(rng: torch.Generator) -> None:
    call = _with_out(make_call(CUDA, rng, rows=4, null_rows=(0, 3)))
    before = call.copy()
    graph, _ = capture(call.run)
    assert_same_results(call, before, call["out"], before["out"])
    graph.replay()
    assert not torch.equal(as_bits(call["out"]), as_bits(before["out"]))


@pytest.mark.parametrize("name", list(FORMS))
def test_a_call_is_one_kernel_node_and_nothing_else(name: str, rng: torch.Generator) -> None:
    call = make_call(CUDA, rng, FORMS[name])
    graph, _ = capture(call.run, keep_graph=True)
    assert cuda_probe.node_types(graph) == [cuda_probe.KERNEL_NODE]


@pytest.mark.parametrize(("rows", "heads"), SIZES)
def test_every_plan_is_one_kernel_node(rows: int, heads: int, rng: torch.Generator) -> None:
    for state_dtype in STATE_DTYPES:
        call = make_call(CUDA, rng, rows=rows, heads=heads, state_dtype=state_dtype)
        graph, _ = capture(call.run, keep_graph=True)
        assert cuda_probe.node_types(graph) == [cuda_probe.KERNEL_NODE]


def test_zero_rows_launch_nothing(rng: torch.Generator) -> None:
    call = make_call(CUDA, rng, rows=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Graph is empty")
        graph, _ = capture(call.run, keep_graph=True)
    assert cuda_probe.node_types(graph) == []


_FIRST_CALL = """
import torch
from tests.kda_cases import check, make_call, poisoned_out

rng = torch.Generator().manual_seed({seed})
call = make_call(torch.device("cuda"), rng, rows={rows}, heads=12, state_dtype={dtype}, null_rows=(0,))
call.args["out"] = poisoned_out(call)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, capture_error_mode={mode!r}):
    call.run()

def replay():
    graph.replay()
    return call["out"]

check(call, out=call["out"], run=replay)
torch.cuda.Event().record()
print("captured")
"""


@pytest.mark.parametrize(
    ("mode", "rows", "dtype"),
    [
        ("global", 2, "torch.float32"),
        ("thread_local", 10, "torch.float32"),
        ("relaxed", 40, "torch.float32"),
        ("global", 64, "torch.float32"),
        ("global", 4, "torch.bfloat16"),
        ("global", 64, "torch.bfloat16"),
    ],
)
def test_the_first_call_of_a_process_may_be_inside_a_capture(
    mode: str, rows: int, dtype: str, rng: torch.Generator
) -> None:
    code = _FIRST_CALL.format(seed=rng.initial_seed() % 2**31, mode=mode, rows=rows, dtype=dtype)
    assert run_python(code).endswith("captured\n")


def test_a_side_stream_orders_the_op_behind_its_producer(rng: torch.Generator) -> None:
    source = _with_out(make_call(CUDA, rng, rows=16, heads=12, paged=False))
    call, want = source.copy(), source.copy()
    want.run()
    names = ("x", "raw_gate", "raw_beta", "output_gate", "state_indices", "state", "conv_state")
    for name in names:
        call[name].zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        for name in names:
            call[name].copy_(source[name])
        got = call.run()
        assert torch.cuda.current_stream() == stream
    stream.synchronize()
    assert_same_results(call, want, got, want["out"])


def test_a_call_does_not_wait_for_the_device(rng: torch.Generator) -> None:
    call = make_call(CUDA, rng, rows=8, heads=12)
    call.run()
    torch.cuda.synchronize()
    torch.cuda._sleep(500_000_000)
    call.run()
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()


def test_two_threads_on_two_streams(rng: torch.Generator) -> None:
    jobs = []
    for rows in (9, 70):
        call = _with_out(make_call(CUDA, rng, rows=rows, heads=12))
        want = call.copy()
        for _ in range(100):
            want.run()
        jobs.append((call, want))
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def work(call: Call) -> None:
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(100):
                    call.run()
            stream.synchronize()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(call,)) for call, _ in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    for call, want in jobs:
        assert_same_results(call, want, call["out"], want["out"])


def test_context_stream_and_device_are_left_as_they_were(rng: torch.Generator) -> None:
    call = make_call(CUDA, rng)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        before = cuda_probe.current_context(), torch.cuda.current_device(), torch.cuda.current_stream()
        call.run()
        with pytest.raises(ValueError, match="raw_beta"):
            call.run(raw_beta=call["raw_beta"][:1])
        after = cuda_probe.current_context(), torch.cuda.current_device(), torch.cuda.current_stream()
    assert after == before
    torch.cuda.synchronize()
    check(make_call(CUDA, rng))


@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "heads"), [(1, 3), (3, 12), (8, 12), (40, 12), (64, 12)])
def test_200_chained_steps_in_a_graph_equal_200_eager_ones(
    rows: int, heads: int, state_dtype: torch.dtype, rng: torch.Generator
) -> None:
    """Every step reads caches, gate and output gate that the step right before it wrote, in other blocks."""
    call = make_call(CUDA, rng, rows=rows, heads=heads, state_dtype=state_dtype)
    slots = call["state_indices"].clone()
    orders = [slots[torch.randperm(rows, generator=rng).to(CUDA)] for _ in range(7)]
    outs = [poisoned_out(call) for _ in range(2)]
    seen = torch.zeros(200, rows, heads, D, dtype=BF16, device=CUDA)
    start = call.copy()
    first = call["output_gate"].clone()

    def steps(synchronize: bool) -> None:
        outs[1].copy_(first)
        for step in range(200):
            previous, out = outs[(step + 1) % 2], outs[step % 2]
            changes = {"raw_gate": previous, "output_gate": previous, "state_indices": orders[step % 7]}
            call.run(**changes, out=out)
            if synchronize:
                torch.cuda.synchronize()
            # Most steps follow each other without another kernel in between.
            if step % 10 == 9:
                seen[step].copy_(out)

    steps(synchronize=True)
    wanted_outs, wanted = seen.clone(), call.copy()
    graph, _ = capture(lambda: steps(synchronize=False))
    for _ in range(5):
        for name in ("state", "conv_state"):
            as_bits(call[name]).copy_(as_bits(start[name]))
        seen.zero_()
        graph.replay()
        assert_same_results(call, wanted, seen, wanted_outs)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_the_op_waits_for_a_producer_that_lets_it_start_early(captured: bool, rng: torch.Generator) -> None:
    late_copy = cuda_probe.load_late_copy()
    names = ("x", "raw_gate", "output_gate")
    source = make_call(CUDA, rng, rows=4, heads=4, paged=False)
    call = _with_out(source.copy())

    def body() -> None:
        for name in names:
            late_copy(source[name], call[name])
            call.run()

    graph = capture(body)[0] if captured else None
    for _ in range(50):
        refill(source, rng)
        for name in ("state", "conv_state"):
            call[name].copy_(source[name])
        call["raw_beta"].copy_(source["raw_beta"])
        want = call.copy()
        if graph is None:
            body()
        else:
            graph.replay()
        for name in names:
            want[name].copy_(source[name])
            torch.cuda.synchronize()
            want.run()
        assert_same_results(call, want, call["out"], want["out"])


@pytest.mark.big(device_gib=20)
@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
def test_slots_beyond_2_31_elements(state_dtype: torch.dtype, rng: torch.Generator) -> None:
    check_far_slots(CUDA, state_dtype, rng)


@pytest.mark.big(device_gib=20)
@pytest.mark.parametrize(("heads", "slots", "stride", "rows"), [(96, 1370, 0, 2), (32, 4000, 540_672, 64)])
def test_the_last_slots_of_a_large_pool(
    heads: int, slots: int, stride: int, rows: int, rng: torch.Generator
) -> None:
    near = _with_out(make_call(CUDA, rng, rows=rows, heads=heads, paged=False))
    far = near.copy()
    stride = stride or heads * D * D
    assert (slots - 2) * stride > 2**31
    memory = torch.empty(slots * stride, device=CUDA)
    pool = memory.as_strided((slots, heads, D, D), (stride, D * D, D, 1))
    conv = torch.zeros(slots, 3, 3 * heads * D, dtype=BF16, device=CUDA).transpose(1, 2)
    live = near["state_indices"].long()
    moved = slots - 1 - torch.arange(rows, device=CUDA)
    for source, target in zip(live.tolist(), moved.tolist(), strict=True):
        pool[target].copy_(near["state"][source])
        conv[target].copy_(near["conv_state"][source])
    far.args |= {"state": pool, "conv_state": conv, "state_indices": moved.int()}
    check(near, out=near["out"])
    far.run()
    assert_same_bits(far["out"], near["out"], "out")
    for source, target in zip(live.tolist(), moved.tolist(), strict=True):
        assert_same_bits(pool[target], near["state"][source], "state")
        assert_same_bits(conv[target], near["conv_state"][source], "conv_state")


@pytest.mark.parametrize("activation", [BF16, FP16], ids=str)
def test_inputs_and_outputs_at_every_alignment(activation: torch.dtype, rng: torch.Generator) -> None:
    for offset in range(9):
        call = make_call(CUDA, rng, Form(rows=5, inputs="wide", activation=activation))
        check(call, out=poisoned_out(call, row_gap=offset, offset=offset))
