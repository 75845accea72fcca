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
    ``enabled`` false, under vLLM's breakable capture, and where the auxiliary stream belongs to a capture
    that the current stream is not part of (another thread's).

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

    __slots__ = ("_thread", "device", "enabled")

    def __init__(self, device: torch.device | str | int | None = None, *, enabled: bool = True) -> None:
        self.device = _resolve(device)
        self.enabled = enabled
        self._thread = _Thread(self.device.index if self.device.type == "cuda" and enabled else -1)

    def fork(self, slot: int = 0) -> bool:
        """Let the side start from where the current stream is now; False if all will run in sequence.

        Only needed where the main stream gets work before :meth:`side` is entered, which forks by itself
        otherwise.

        Raises:
            ValueError: the slot is not one of ``range(SLOTS)``.
            RuntimeError: the driver refuses.
        """
        return self.side(slot).fork()

    def side(self, slot: int = 0) -> _Slot:
        """Return the context in which torch's current stream is the auxiliary one.

        An exception that leaves it joins first.

        Raises:
            ValueError: the slot is not one of ``range(SLOTS)``.
        """
        slots = self._thread.slots
        return slots[slot] if slot in slots else self._thread.add(slot)

    def join(self, slot: int = 0) -> None:
        """Make the stream that forked wait for the side; nothing happens without an open fork."""
        slots = self._thread.slots
        if slot in slots:
            slots[slot].join()

    def __enter__(self) -> ForkJoin:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for slot in self._thread.slots.values():
            slot.leave(error)


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

    In sequence, in the same order, wherever :class:`ForkJoin` does, and while Dynamo traces.

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
    # Dynamo traces no streams.
    if _is_compiling():
        if side_first:
            side = side_fn()
            return main_fn(), side
        return main_fn(), side_fn()
    pair = _shared(device, few).side(slot)
    pair.fork()
    try:
        if not side_first:
            main = main_fn()
        with pair:
            side = side_fn()
        if side_first:
            main = main_fn()
    except BaseException as error:
        pair.leave(error)
        raise
    pair.join()
    return main, side


# ---- One micro-batch of a thread ----


class _Thread(threading.local):
    """The slots that the calling thread has used."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.slots: dict[int, _Slot] = {}

    def add(self, slot: int) -> _Slot:
        if not 0 <= slot < SLOTS:
            raise ValueError(f"ForkJoin: slot: expected 0 to {SLOTS - 1}, got {slot!r}")
        return self.slots.setdefault(slot, _Slot(self.index, slot))


class _Slot:
    """One pair of events in one thread, from a fork to its join; as a context, its time on the side."""

    __slots__ = ("back", "depth", "entered", "index", "main", "marked", "opened", "side", "slot")
    side: _SideStream
    back: Any

    def __init__(self, index: int, slot: int) -> None:
        self.index, self.slot = index, slot
        self.main = self.depth = 0
        self.opened = self.entered = self.marked = False

    def fork(self) -> bool:
        if self.index < 0 or self.depth:
            return False
        if _BREAKABLE in sys.modules and is_breakable_capture():
            return False
        index = self.index
        main: int = _raw_stream(index)
        if self.opened and main != self.main:
            # Left open by a scope that is gone, perhaps with its capture: what it marked counts no more.
            self.marked = False
            self.join()
        side = _sides[index] if index in _sides else _make_side(index)
        if not side.core.fork(main, self.slot, self.opened):
            return False
        self.side, self.main, self.opened = side, main, True
        self.entered = self.marked = False
        return True

    def join(self) -> None:
        # On the side itself nothing is over yet.
        if not self.opened or self.depth:
            return
        self.opened = False
        core = self.side.core
        if not self.marked:
            try:
                core.mark(self.slot)
            except RuntimeError:
                core.close()
                raise
        core.join(self.main, self.slot)

    def leave(self, error: BaseException | None) -> None:
        """Join on the way out of a scope: the exception that leaves it counts, if there is one."""
        try:
            self.join()
        except RuntimeError:
            if error is None:
                raise

    def __enter__(self) -> None:
        if self.depth:
            self.depth += 1
        elif (self.opened and not self.entered) or self.fork():
            self.back = self.side.enter()
            self.entered, self.depth = True, 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self.depth:
            return
        self.depth -= 1
        if self.depth:
            return
        self.side.leave(self.back)
        if error is None:
            self.side.core.mark(self.slot)
            self.marked = True
        else:
            self.leave(error)

    def __del__(self) -> None:
        if self.opened:
            self.side.core.close()


# ---- Streams ----


class _SideStream:
    """The auxiliary stream of a device, for the driver (``core``) and for torch."""

    __slots__ = ("alone", "core", "index", "key", "stream")

    def __init__(self, index: int) -> None:
        self.index = index
        self.core = _core.SideStream(index)
        self.stream = torch.cuda.ExternalStream(self.core.handle, torch.device("cuda", index))
        # With one device there is no other to put back.
        self.alone = torch.cuda.device_count() == 1
        self.key = (self.stream.stream_id, self.stream.device_index, self.stream.device_type)

    def enter(self) -> Any:
        """Make it torch's current stream; return what was."""
        if torch.cuda.set_stream is _torch_set_stream:
            if self.alone:
                main = _get_stream(self.index)
                _set_stream(*self.key)
                return main
            back = _get_stream(self.index), torch._C._cuda_getDevice()
            _set_stream(*self.key)
            return back
        # An engine that keeps its own record of the current stream.
        back = torch.cuda.current_stream(self.index), torch._C._cuda_getDevice()
        torch.cuda.set_stream(self.stream)
        return back

    def leave(self, back: Any) -> None:
        if len(back) == 3:
            _set_stream(*back)
            return
        stream, device = back
        if isinstance(stream, tuple):
            _set_stream(*stream)
        else:
            torch.cuda.set_stream(stream)
        if device != self.index:
            torch._C._cuda_setDevice(device)


# What torch's own functions call; builds without CUDA have none of them.
_get_stream: Any = getattr(torch._C, "_cuda_getCurrentStream", None)
_set_stream: Any = getattr(torch._C, "_cuda_setStream", None)
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_sides: dict[int, _SideStream] = {}
# None where an engine had put its own in place before.
_torch_set_stream = torch.cuda.set_stream if torch.cuda.set_stream.__module__ == "torch.cuda" else None


def _make_side(index: int) -> _SideStream:
    return _sides.setdefault(index, _SideStream(index))


def is_breakable_capture() -> bool:
    """Whether this thread captures in vLLM's segments, whose ends nobody announces."""
    module = sys.modules.get(_BREAKABLE)
    capture = getattr(module, "BreakableCUDAGraphCapture", None)
    return capture is not None and bool(capture.is_active())


_joined: dict[tuple[torch.device | str | int | None, bool], ForkJoin] = {}


def _shared(device: torch.device | str | int | None, enabled: bool) -> ForkJoin:
    """The one ForkJoin of all callers of ``run_overlapped``."""
    if device is None and torch.cuda.is_initialized():
        device = torch._C._cuda_getDevice()
    found = _joined.get((device, enabled))
    if found is None:
        resolved = _resolve(device)
        found = _joined.setdefault((resolved, enabled), ForkJoin(resolved, enabled=enabled))
        # What else names this device whatever the current one is.
        if isinstance(device, int):
            _joined[device, enabled] = found
    return found


def _resolve(device: torch.device | str | int | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if found.type not in {"cpu", "cuda"}:
        raise ValueError(f"ForkJoin: device: expected a CUDA or CPU device, got {found}")
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found
