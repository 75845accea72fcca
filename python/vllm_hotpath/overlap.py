"""Two streams for the time of one fork and join: work on the side runs beside work on the main stream.

A device has one auxiliary stream in a process, whoever uses it, and its events are made once; a fork and a
join are two driver calls each. Legal in CUDA-graph capture, on the very first use too.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from vllm_hotpath import _core

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

__all__ = ["SLOTS", "ForkJoin", "run_overlapped"]

# Micro-batches of a device that can be between their fork and their join.
SLOTS = _core.SideStream.SLOTS

_Main = TypeVar("_Main")
_SideResult = TypeVar("_SideResult")

_is_compiling = torch.compiler.is_dynamo_compiling
_BREAKABLE = "vllm.compilation.breakable_cudagraph"


class ForkJoin:
    """Forks from torch's current stream of a device to its auxiliary stream, and joins them again.

    ::

        with ForkJoin(device) as fork:
            with fork.side():
                y = small(x)
            z = large(x)
            fork.join()
            return y + z

    Everything runs in sequence on the current stream, and a join does nothing, on a CPU device, with
    ``enabled`` false, while Dynamo traces, under vLLM's breakable capture, and where the auxiliary stream
    belongs to a capture that the current stream is not part of (another thread's).

    What the side reads must live until the join. What is made on the side may be used and freed as anything
    else once joined. Collectives do not belong on the side: their order would no longer be the same on every
    rank. An external stream that has forked must live as long as other streams fork.

    A slot is one micro-batch: each has its own events, so that one may join while the other still works. The
    state of a slot is the calling thread's own.

    Args:
        device: a CUDA or CPU device, its name or a CUDA index; None is the current CUDA device, or the CPU
            where there is no CUDA.
        enabled: False switches the overlap off.

    Raises:
        ValueError: another kind of device.
    """

    __slots__ = ("_index", "_thread", "device", "enabled")

    def __init__(self, device: torch.device | str | int | None = None, *, enabled: bool = True) -> None:
        self.device = _resolve(device)
        self.enabled = enabled
        self._index = self.device.index if self.device.type == "cuda" else -1
        self._thread = _Thread()

    def fork(self, slot: int = 0) -> bool:
        """Let the side start from where the current stream is now; False if all will run in sequence.

        Only needed where the main stream gets work before :meth:`side` is entered, which forks by itself
        otherwise.

        Raises:
            ValueError: the slot is not one of ``range(SLOTS)``.
            RuntimeError: the driver refuses.
        """
        if not 0 <= slot < SLOTS:
            raise ValueError(f"ForkJoin: slot: expected 0 to {SLOTS - 1}, got {slot!r}")
        if self._index < 0 or not self.enabled or _is_compiling() or is_breakable_capture():
            return False
        open_forks = self._thread.open
        before = open_forks.get(slot)
        if before is not None and before.inside:
            return False
        side = _sides.get(self._index) or _make_side(self._index)
        main: int = torch._C._cuda_getCurrentRawStream(self._index)
        if before is not None and before.main != main:
            # Left open by a scope that is gone, perhaps with its capture: what it marked counts no more.
            before.marked = False
            self.join(slot)
            before = None
        if not side.core.fork(main, slot, before is not None):
            return False
        if before is None:
            open_forks[slot] = _Fork(side, main, slot)
        else:
            before.marked = before.entered = False
        return True

    def side(self, slot: int = 0) -> _Side:
        """Return the context in which torch's current stream is the auxiliary one.

        An exception that leaves it joins first.
        """
        return _Side(self, slot)

    def join(self, slot: int = 0) -> None:
        """Make the stream that forked wait for the side. Nothing happens without an open fork, or on the side."""
        open_forks = self._thread.open
        fork = open_forks.get(slot)
        if fork is not None and not fork.inside:
            del open_forks[slot]
            fork.join()

    def __enter__(self) -> ForkJoin:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for slot in tuple(self._thread.open):
            self._leave(slot, error)

    def _leave(self, slot: int, error: BaseException | None) -> None:
        """Join on the way out of a scope: the exception that leaves it counts, if there is one."""
        try:
            self.join(slot)
        except RuntimeError:
            if error is None:
                raise


class _Side:
    """One entry of :meth:`ForkJoin.side`."""

    __slots__ = ("_back", "_fork", "_opened", "_slot")
    _back: tuple[Any, int]

    def __init__(self, fork: ForkJoin, slot: int) -> None:
        self._fork, self._slot = fork, slot
        self._opened: _Fork | None = None

    def __enter__(self) -> None:
        fork, slot = self._fork, self._slot
        opened = fork._thread.open.get(slot)
        if opened is None or opened.entered:
            if not fork.fork(slot):
                return
            opened = fork._thread.open[slot]
        self._back = opened.side.enter()
        self._opened = opened
        opened.entered = opened.inside = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        opened, self._opened = self._opened, None
        if opened is None:
            return
        opened.inside = False
        opened.side.leave(self._back)
        if error is None:
            opened.mark()
        else:
            self._fork._leave(self._slot, error)


def run_overlapped(
    main_fn: Callable[[], _Main],
    side_fn: Callable[[], _SideResult],
    *,
    side_first: bool = True,
    tokens: int | None = None,
    max_tokens: int | None = None,
    slot: int = 0,
    device: torch.device | str | int | None = None,
) -> tuple[_Main, _SideResult]:
    """Run ``main_fn`` on the current stream and ``side_fn`` on the auxiliary one; both results, joined.

    Args:
        main_fn: takes no arguments.
        side_fn: takes no arguments; what it reads must live until this function returns.
        side_first: which of the two is launched first. Both start from where the current stream is now.
        tokens: size of the batch, for ``max_tokens``.
        max_tokens: more tokens run in sequence; None is no limit, as is ``tokens`` None.
        slot: the micro-batch, see :class:`ForkJoin`.
        device: see :class:`ForkJoin`.

    Raises:
        ValueError: as :class:`ForkJoin`.
        RuntimeError: as :class:`ForkJoin`. An exception of either function is raised once both are joined.
    """
    few = tokens is None or max_tokens is None or tokens <= max_tokens
    fork = _shared(device, few)
    fork.fork(slot)
    try:
        if not side_first:
            main = main_fn()
        with fork.side(slot):
            side = side_fn()
        if side_first:
            main = main_fn()
    except BaseException as error:
        fork._leave(slot, error)
        raise
    fork.join(slot)
    return main, side


# ---- Streams ----


class _Thread(threading.local):
    """The open forks of a thread, by slot."""

    def __init__(self) -> None:
        self.open: dict[int, _Fork] = {}


class _Fork:
    """A fork that has no join yet."""

    __slots__ = ("entered", "inside", "joined", "main", "marked", "side", "slot")

    def __init__(self, side: _SideStream, main: int, slot: int) -> None:
        self.side, self.main, self.slot = side, main, slot
        self.entered = self.inside = self.marked = self.joined = False

    def __del__(self) -> None:
        if not self.joined:
            self.side.core.close()

    def mark(self) -> None:
        self.side.core.mark(self.slot)
        self.marked = True

    def join(self) -> None:
        core = self.side.core
        self.joined = True
        if not self.marked:
            try:
                core.mark(self.slot)
            except RuntimeError:
                core.close()
                raise
        core.join(self.main, self.slot)


class _SideStream:
    """The auxiliary stream of a device, for the driver (``core``) and for torch."""

    __slots__ = ("core", "index", "key", "stream")

    def __init__(self, index: int) -> None:
        self.index = index
        self.core = _core.SideStream(index)
        self.stream = torch.cuda.ExternalStream(self.core.handle, torch.device("cuda", index))
        self.key = (self.stream.stream_id, self.stream.device_index, self.stream.device_type)

    def enter(self) -> tuple[Any, int]:
        """Make it torch's current stream; return what was."""
        device: int = torch._C._cuda_getDevice()
        if torch.cuda.set_stream.__module__ == "torch.cuda":
            key = torch._C._cuda_getCurrentStream(self.index)
            torch._C._cuda_setStream(*self.key)
            return key, device
        # An engine that keeps its own record of the current stream.
        stream = torch.cuda.current_stream(self.index)
        torch.cuda.set_stream(self.stream)
        return stream, device

    def leave(self, back: tuple[Any, int]) -> None:
        stream, device = back
        if isinstance(stream, tuple):
            torch._C._cuda_setStream(*stream)
        else:
            torch.cuda.set_stream(stream)
        if device != self.index:
            torch._C._cuda_setDevice(device)


_sides: dict[int, _SideStream] = {}


def _make_side(index: int) -> _SideStream:
    return _sides.setdefault(index, _SideStream(index))


def is_breakable_capture() -> bool:
    """Whether this thread captures in vLLM's segments, whose ends nobody announces."""
    module = sys.modules.get(_BREAKABLE)
    capture = getattr(module, "BreakableCUDAGraphCapture", None)
    return capture is not None and bool(capture.is_active())


_joined: dict[tuple[torch.device, bool], ForkJoin] = {}


def _shared(device: torch.device | str | int | None, enabled: bool) -> ForkJoin:
    key = _resolve(device), enabled
    return _joined.get(key) or _joined.setdefault(key, ForkJoin(key[0], enabled=enabled))


def _resolve(device: torch.device | str | int | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if found.type not in {"cpu", "cuda"}:
        raise ValueError(f"ForkJoin: device: expected a CUDA or CPU device, got {found}")
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found
