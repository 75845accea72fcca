"""Fork and join without a GPU: in sequence there, and, with a stand-in for the driver, who waits for whom."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from vllm_hotpath import overlap
from vllm_hotpath.overlap import SLOTS, ForkJoin, run_overlapped

if TYPE_CHECKING:
    from collections.abc import Callable

MAIN, SIDE, OTHER = 101, 202, 303


class Driver:
    """A device whose streams are numbers, and the calls that a fork and a join make."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.stack = [MAIN]
        self.may_fork = True
        self.failing = ""
        self.core = self
        self.open = 0

    def note(self, call: str) -> None:
        self.calls.append(call)
        if self.failing and call.startswith(self.failing):
            raise RuntimeError(f"overlap: {call}")

    def fork(self, main: int, slot: int, again: bool) -> bool:
        if not self.may_fork or main == SIDE:
            return False
        self.note(f"fork {main} {slot}")
        self.open += not again
        return True

    def mark(self, slot: int) -> None:
        self.note(f"mark {slot}")

    def join(self, main: int, slot: int) -> None:
        self.open -= 1
        self.note(f"join {main} {slot}")

    def close(self) -> None:
        self.open -= 1

    def enter(self) -> int:
        self.stack.append(SIDE)
        return len(self.stack)

    def leave(self, depth: int) -> None:
        assert len(self.stack) == depth
        self.stack.pop()

    def on(self, what: str) -> Callable[[], str]:
        def run() -> str:
            self.note(f"{what} on {self.stack[-1]}")
            return what

        return run


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(overlap, "_sides", {0: made})
    monkeypatch.setattr(overlap, "_joined", {})
    monkeypatch.setattr(overlap, "_raw_stream", lambda _: made.stack[-1])
    return made


# ---- In sequence ----


@pytest.mark.parametrize("side_first", [True, False])
@pytest.mark.parametrize("slot", [0, 1, SLOTS - 1])
def test_both_results_come_back_in_the_order_asked_for(side_first: bool, slot: int) -> None:
    order: list[str] = []

    def note(what: str) -> str:
        order.append(what)
        return what

    got = run_overlapped(
        lambda: note("main"), lambda: note("side"), side_first=side_first, slot=slot, device="cpu"
    )
    assert got == ("main", "side")
    assert order == (["side", "main"] if side_first else ["main", "side"])


@pytest.mark.parametrize("which", ["main", "side"])
@pytest.mark.parametrize("side_first", [True, False])
def test_exceptions_of_either_are_raised(which: str, side_first: bool) -> None:
    def fail() -> None:
        raise KeyError(which)

    pair = (fail, list) if which == "main" else (list, fail)
    with pytest.raises(KeyError, match=which):
        run_overlapped(*pair, side_first=side_first, device="cpu")
    assert run_overlapped(list, dict, device="cpu") == ([], {})


def test_a_fork_on_the_cpu_does_nothing() -> None:
    fork = ForkJoin("cpu")
    fork.join()
    x = torch.zeros(3)
    with fork, fork.side(2):
        x += 1
    assert not fork.fork()
    fork.join(2)
    assert x.eq(1).all()


def test_threads_run_their_own_pairs() -> None:
    results: dict[int, Any] = {}

    def work(i: int) -> None:
        results[i] = [run_overlapped(lambda: i, lambda: -i, slot=i, device="cpu") for _ in range(100)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: [(i, -i)] * 100 for i in range(4)}


def test_it_can_be_compiled() -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        main, side = run_overlapped(lambda: x + 1, lambda: x * 2, device="cpu")
        return main + side

    x = torch.arange(4.0)
    assert torch.equal(torch.compile(call, backend="eager", fullgraph=True)(x), call(x))


@pytest.mark.parametrize("device", ["meta", torch.device("meta")])
def test_other_devices_are_refused(device: Any) -> None:
    with pytest.raises(ValueError, match="ForkJoin: device: expected a CUDA or CPU device, got meta"):
        ForkJoin(device)


@pytest.mark.parametrize("slot", [-1, SLOTS])
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_slots_are_checked_wherever_it_runs(slot: int, device: str, driver: Driver) -> None:
    fork = ForkJoin(device)
    calls: list[Callable[[], object]] = [
        lambda: fork.fork(slot),
        lambda: fork.side(slot).__enter__(),
        lambda: run_overlapped(driver.on("main"), driver.on("side"), slot=slot, device=device),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"ForkJoin: slot: expected 0 to {SLOTS - 1}, got {slot}"):
            call()
    assert driver.calls == []


# ---- Who waits for whom ----


@pytest.mark.parametrize("side_first", [True, False])
def test_a_fork_and_join_are_four_driver_calls(driver: Driver, side_first: bool) -> None:
    got = run_overlapped(driver.on("main"), driver.on("side"), side_first=side_first, slot=5, device=0)
    assert got == ("main", "side")
    # "fork" records an event and lets the side wait for it; "mark" and "join" are one call each.
    side, main = [f"side on {SIDE}", "mark 5"], [f"main on {MAIN}"]
    middle = [*side, *main] if side_first else [*main, *side]
    assert driver.calls == [f"fork {MAIN} 5", *middle, f"join {MAIN} 5"]
    assert driver.open == 0


def test_side_and_join_in_sequence(driver: Driver) -> None:
    fork = ForkJoin(0)
    with fork.side():
        driver.on("a")()
    driver.on("b")()
    fork.join()
    fork.join()
    assert driver.calls == [f"fork {MAIN} 0", f"a on {SIDE}", "mark 0", f"b on {MAIN}", f"join {MAIN} 0"]


def test_leaving_a_scope_joins_every_slot(driver: Driver) -> None:
    with ForkJoin(0) as fork:
        for slot in (3, 1):
            with fork.side(slot):
                pass
        fork.fork(2)
    assert driver.calls[-4:] == [f"join {MAIN} 3", f"join {MAIN} 1", "mark 2", f"join {MAIN} 2"]
    assert driver.open == 0


@pytest.mark.parametrize("which", ["main", "side"])
@pytest.mark.parametrize("side_first", [True, False])
@pytest.mark.parametrize("driver_fails", [False, True])
def test_exceptions_join_and_come_through(
    driver: Driver, which: str, side_first: bool, driver_fails: bool
) -> None:
    def fail() -> None:
        driver.failing = "join" if driver_fails else ""
        raise KeyError(which)

    pair = (fail, driver.on("side")) if which == "main" else (driver.on("main"), fail)
    with pytest.raises(KeyError, match=which):
        run_overlapped(*pair, side_first=side_first, device=0)
    assert driver.calls[-1] == f"join {MAIN} 0"
    assert driver.calls.count("mark 0") == 1
    assert driver.stack == [MAIN]
    assert driver.open == 0
    driver.failing = ""
    assert run_overlapped(driver.on("main"), driver.on("side"), device=0) == ("main", "side")


def test_errors_of_the_driver_are_raised_where_nothing_else_is(driver: Driver) -> None:
    for failing in ("fork", "mark", "join"):
        driver.failing = failing
        with pytest.raises(RuntimeError, match=f"^overlap: {failing}"):
            run_overlapped(list, list, device=0)
        assert driver.stack == [MAIN]
        driver.failing = ""
        assert run_overlapped(list, dict, device=0) == ([], {})
        assert driver.open == 0


def test_forks_inside_forks(driver: Driver) -> None:
    def inner(what: str) -> Callable[[], object]:
        return lambda: run_overlapped(driver.on(f"{what}.main"), driver.on(f"{what}.side"), device=0)

    run_overlapped(inner("main"), inner("side"), device=0)
    assert driver.calls[:4] == [f"fork {MAIN} 0", f"side.side on {SIDE}", f"side.main on {SIDE}", "mark 0"]
    # The main function's pair uses the slot again, and its join covers both.
    assert driver.calls[4:] == [
        f"fork {MAIN} 0", f"main.side on {SIDE}", "mark 0", f"main.main on {MAIN}", f"join {MAIN} 0",
    ]  # fmt: skip
    assert driver.open == 0


def test_another_current_stream_joins_the_fork_before(driver: Driver) -> None:
    fork = ForkJoin(0)
    fork.fork()
    driver.stack.append(OTHER)
    fork.fork()
    fork.join()
    assert driver.calls == [
        f"fork {MAIN} 0", "mark 0", f"join {MAIN} 0", f"fork {OTHER} 0", "mark 0", f"join {OTHER} 0",
    ]  # fmt: skip


def test_a_threads_forks_are_its_own(driver: Driver) -> None:
    fork = ForkJoin(0)
    fork.fork()
    thread = threading.Thread(target=fork.join)
    thread.start()
    thread.join()
    assert driver.calls == [f"fork {MAIN} 0"]
    fork.join()
    assert driver.open == 0


def test_a_fork_that_nobody_joins_does_not_count_for_ever(driver: Driver) -> None:
    ForkJoin(0).fork()
    assert driver.open == 0
    assert driver.calls == [f"fork {MAIN} 0"]


# ---- When it runs in sequence on a GPU ----


class Breakable:
    class BreakableCUDAGraphCapture:
        active = True

        @classmethod
        def is_active(cls) -> bool:
            return cls.active


@pytest.mark.parametrize("why", ["off", "tokens", "breakable", "another capture"])
def test_in_sequence_on_a_gpu(driver: Driver, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"tokens": 257, "max_tokens": 256} if why == "tokens" else {}
    if why == "breakable":
        monkeypatch.setitem(overlap.sys.modules, overlap._BREAKABLE, Breakable)  # type: ignore[arg-type]
    driver.may_fork = why != "another capture"
    if why == "off":
        fork = ForkJoin(0, enabled=False)
        assert not fork.fork()
        with fork.side():
            driver.on("side")()
        fork.join()
    else:
        run_overlapped(driver.on("main"), driver.on("side"), device=0, **options)
    assert [call for call in driver.calls if not call.startswith("main")] == [f"side on {MAIN}"]


def test_it_overlaps_up_to_the_limit_and_outside_of_breakable_captures(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(overlap.sys.modules, overlap._BREAKABLE, Breakable)  # type: ignore[arg-type]
    monkeypatch.setattr(Breakable.BreakableCUDAGraphCapture, "active", False)
    run_overlapped(driver.on("main"), driver.on("side"), device=0, tokens=256, max_tokens=256)
    assert f"side on {SIDE}" in driver.calls
