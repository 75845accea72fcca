"""Fork and join on a GPU: what runs beside what, captures that end, memory across streams, threads."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from vllm_hotpath import overlap
from vllm_hotpath.overlap import ForkJoin, run_overlapped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.gpu

KERNELS = 60


@pytest.fixture(autouse=True)
def _nothing_stays_open() -> Iterator[None]:
    torch.cuda.synchronize()
    yield
    gc.collect()
    torch.cuda.synchronize()
    assert all(side.core.open == 0 for side in overlap._sides.values())


def stream_handle() -> int:
    return torch.cuda.current_stream().cuda_stream


def chain(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Small kernels, each of which waits for the one before."""

    def run() -> torch.Tensor:
        for _ in range(KERNELS):
            x.add_(1)
        return x

    return run


def captured(body: Callable[[], object], **options: str) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        body()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    times = []
    for _ in range(15):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[len(times) // 2]


@pytest.mark.parametrize("side_first", [True, False])
def test_two_chains_of_a_replayed_graph_run_beside_each_other(side_first: bool) -> None:
    a, b = torch.zeros(64, device="cuda"), torch.zeros(64, device="cuda")
    one, other = chain(a), chain(b)

    def in_sequence() -> None:
        one()
        other()

    sequence = captured(in_sequence)
    overlapped = captured(lambda: run_overlapped(one, other, side_first=side_first))
    before = a.clone()
    overlapped.replay()
    assert torch.equal(a, before + KERNELS)
    assert torch.equal(b, before + KERNELS)
    assert replay_us(overlapped) <= 0.6 * replay_us(sequence)


def test_the_side_is_one_other_stream_and_the_old_one_comes_back() -> None:
    sides = set()
    main = torch.cuda.Stream()
    for stream in (torch.cuda.default_stream(), main):
        with torch.cuda.stream(stream):
            here = stream_handle()
            for _ in range(60):
                fork = ForkJoin()
                with fork.side():
                    sides.add(stream_handle())
                    # On the side already: no third stream.
                    assert run_overlapped(stream_handle, stream_handle) == (stream_handle(),) * 2
                assert stream_handle() == here
                fork.join()
    assert len(sides) == 1
    assert here not in sides


def test_an_engines_own_record_of_the_current_stream_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    original, seen = torch.cuda.set_stream, []

    def recording(stream: torch.cuda.Stream) -> None:
        seen.append(stream.cuda_stream)
        original(stream)

    here = stream_handle()
    monkeypatch.setattr(torch.cuda, "set_stream", recording)
    with ForkJoin().side():
        side = stream_handle()
    assert seen == [side, here]
    assert stream_handle() == here


@pytest.mark.parametrize("where", ["side", "main", "no join"])
def test_a_capture_ends_whatever_is_raised_in_it(where: str) -> None:
    x, y = torch.zeros(64, device="cuda"), torch.zeros(64, device="cuda")
    fork = ForkJoin()

    def body() -> None:
        with fork:
            with fork.side(3):
                x.add_(1)
                if where == "side":
                    raise KeyError(where)
            y.add_(1)
            if where == "main":
                raise KeyError(where)

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        with contextlib.nullcontext() if where == "no join" else pytest.raises(KeyError, match=where):
            body()
        graph.capture_end()
    graph.replay()
    torch.cuda.synchronize()
    assert x.eq(1).all()
    assert y.eq(0 if where == "side" else 1).all()
    # And the stream can be used as before.
    run_overlapped(lambda: y.add_(1), lambda: x.add_(1))
    assert x.eq(2).all()


@pytest.mark.parametrize("which", ["main", "side"])
def test_exceptions_of_overlapped_functions_join(which: str) -> None:
    def fail() -> None:
        raise KeyError(which)

    x = torch.zeros(1, device="cuda")

    def fine() -> None:
        x.add_(1)

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    for side_first in (True, False):
        with torch.cuda.stream(stream):
            graph.capture_begin()
            fine()
            with pytest.raises(KeyError):
                run_overlapped(*((fail, fine) if which == "main" else (fine, fail)), side_first=side_first)
            graph.capture_end()
        graph.reset()


def test_the_first_use_of_a_process_may_be_inside_a_capture() -> None:
    code = """
        import torch
        from vllm_hotpath.overlap import run_overlapped
        x, y = torch.zeros(64, device="cuda"), torch.zeros(64, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run_overlapped(lambda: x.add_(1), lambda: y.add_(x * 0 + 2))
        x.zero_(), y.zero_()
        graph.replay()
        assert x.eq(1).all() and y.eq(2).all()
        run_overlapped(lambda: x.add_(1), lambda: y.add_(1))
        assert x.eq(2).all() and y.eq(3).all()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr


def test_memory_made_on_the_side_may_be_freed_after_the_join() -> None:
    size = 1 << 20
    for _ in range(50):
        fork = ForkJoin()
        with fork.side():
            y = torch.ones(size, device="cuda")
        fork.join()
        torch.cuda._sleep(200_000)
        total = y.sum()
        del y
        with fork.side():
            torch.full((size,), float("nan"), device="cuda")
        fork.join()
        assert total.item() == size


def test_memory_made_on_the_side_is_not_reused_for_another_main_stream_too_early() -> None:
    size = 1 << 20
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    for _ in range(50):
        with torch.cuda.stream(one):
            _, y = run_overlapped(lambda: None, lambda: torch.ones(size, device="cuda"))
            torch.cuda._sleep(2_000_000)
            total = y.sum()
            del y
        with torch.cuda.stream(other):
            run_overlapped(lambda: None, lambda: torch.full((size,), float("nan"), device="cuda"))
        one.synchronize()
        assert total.item() == size


def test_what_the_side_makes_in_a_capture_survives_replays() -> None:
    x = torch.zeros(1 << 16, device="cuda")

    def body() -> None:
        for _ in range(8):
            main, side = run_overlapped(lambda: x * 2, lambda: x + 1)
            x.copy_(side - main + x)

    graph = captured(body)
    x.zero_()
    for step in range(1, 20):
        graph.replay()
        # x becomes 1 for an x of 0: side - main + x is 1 whatever x is.
        assert x.eq(1).all(), step


def test_two_threads_overlap_on_their_own_streams() -> None:
    problems: list[str] = []

    def work(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            x = torch.full((1 << 14,), float(seed), device="cuda")
            for i in range(300):
                main, side = run_overlapped(lambda: x + 1, lambda: x * 2, slot=i % 2, side_first=i % 3 == 0)
                if not (main + side).eq(3 * seed + 1).all():
                    problems.append(f"{seed} {i}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (3, 5, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


def test_a_thread_that_captures_and_one_that_does_not_stay_apart() -> None:
    inside, done = threading.Event(), threading.Event()
    handles: list[int] = []
    y = torch.zeros(64, device="cuda")

    def eager() -> None:
        inside.wait(60)
        with torch.cuda.stream(torch.cuda.Stream()):
            here = stream_handle()
            run_overlapped(lambda: y.add_(1), lambda: handles.append(stream_handle()))
            handles.append(here)
            torch.cuda.current_stream().synchronize()
        done.set()

    thread = threading.Thread(target=eager)
    thread.start()
    x = torch.zeros(64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    fork = ForkJoin()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        with fork.side():
            x.add_(1)
            inside.set()
            assert done.wait(60)
        fork.join()
        x.add_(1)
    thread.join()
    # In sequence there, for the side belongs to the capture.
    assert handles[0] == handles[1]
    assert y.eq(1).all()
    graph.replay()
    assert x.eq(2).all()
    assert run_overlapped(stream_handle, stream_handle) != (stream_handle(), stream_handle())


def test_a_capture_does_not_swallow_a_side_that_another_thread_is_using() -> None:
    entered, leave = threading.Event(), threading.Event()
    x, y = torch.zeros(64, device="cuda"), torch.zeros(64, device="cuda")

    def eager() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            fork = ForkJoin()
            with fork.side():
                entered.set()
                leave.wait(60)
                y.add_(1)
            fork.join()
            torch.cuda.current_stream().synchronize()

    thread = threading.Thread(target=eager)
    thread.start()
    assert entered.wait(60)
    handles: list[int] = []
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        here = stream_handle()
        run_overlapped(lambda: x.add_(1), lambda: handles.append(stream_handle()))
        leave.set()
        thread.join()
    assert handles == [here]
    assert y.eq(1).all()


def test_other_users_of_the_device_are_not_disturbed() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with torch.cuda.device(1):
        x = torch.zeros(4, device="cuda:0")
        run_overlapped(lambda: None, lambda: x.add_(1), device=0)
        assert torch.cuda.current_device() == 1
    assert x.eq(1).all()


def test_a_fork_and_join_cost_less_than_torchs_own_events() -> None:
    side, fork = torch.cuda.Stream(), ForkJoin()
    forked, done = torch.cuda.Event(), torch.cuda.Event()
    work = torch.cuda.Stream()

    def ours() -> None:
        with fork.side():
            pass
        fork.join()

    def theirs() -> None:
        forked.record()
        with torch.cuda.stream(side):
            forked.wait()
            done.record()
        done.wait()

    with torch.cuda.stream(work):
        times = {call: min(host_us(call) for _ in range(10)) for call in (ours, theirs)}
    assert times[ours] < times[theirs]


def host_us(call: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(200):
        call()
    return (time.perf_counter() - start) / 200 * 1e6
