"""Shared experts on vLLM's second stream, by events and in a launch order of our choice, in captured graphs.

vLLM 0.33.0 does this itself. 0.22.1 lets its second stream wait for the first with ``wait_stream`` before the
gate, and launches the shared experts after the routed ones. Here they are launched where ``LAUNCH`` says, in
captures only: eager calls stay stock, so that the second stream has always run vLLM's own order before.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

from vllm_hotpath import envs
from vllm_hotpath.plugin.plan import Feature, Patch, Plan
from vllm_hotpath.plugin.targets import Target

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

_SHARED = "vllm.model_executor.layers.fused_moe.runner.shared_experts"
_RUNNER = "vllm.model_executor.layers.fused_moe.runner.moe_runner"

NATIVE = Target(
    module=_SHARED,
    names=("SharedExperts.maybe_forward_async",),
    signatures=("self, shared_experts_input",),
    hashes={"aba9ddff3117e6b3": "0.33.0"},
)
SYNC = Target(
    module=_SHARED,
    names=("SharedExperts.maybe_sync_shared_experts_stream",),
    signatures=("self, shared_experts_input",),
    hashes={"380638a57099ad9d": "0.22.1"},
)
APPLY = Target(
    module=_SHARED,
    names=("SharedExperts.apply",),
    signatures=("self, shared_experts_input, order",),
    hashes={"f507930376f20a92": "0.22.1"},
)
# What calls the two, in this order: sync, gate, apply(NO_OVERLAP), routed experts, apply(MULTI_STREAM).
RUN = Target(
    module=_RUNNER,
    names=("MoERunner._forward_impl",),
    signatures=("self, layer, hidden_states, router_logits, shared_experts_input, input_ids=None",),
    hashes={"c2861cf2768b8e2b": "0.22.1"},
)
ROUTED = Target(
    module=_RUNNER,
    names=("MoERunner._apply_quant_method",),
    signatures=("self, layer, hidden_states, router_logits, shared_experts_input, input_ids=None",),
    hashes={"beca5ee60c1f8f94": "0.22.1"},
)

# Where the shared experts fork and are launched: "sync" before the gate, "gate" right after it, "routed"
# after the routed experts.
LAUNCH = "gate"

_NO_OVERLAP, _MULTI_STREAM = 1, 3

# In a SharedExperts' attributes: vLLM's own order has run on its stream.
_STOCK_HAS_RUN = "_vllm_hotpath_stock_has_run"


class _Thread(threading.local):
    """What the calling thread has in flight: one layer's shared experts."""

    def __init__(self) -> None:
        self.flight: _Flight | None = None


_thread = _Thread()


class _Flight:
    """The shared experts of one call of one layer, from the sync point to their join."""

    def __init__(self, experts: Any) -> None:
        self.experts = experts
        self.started = False
        self.output: torch.Tensor | None = None
        self.ready, self.done = _events(experts._stream, experts._output_idx)

    def start(self, hidden_states: torch.Tensor) -> None:
        """Launch them on the second stream, from where the current one is now."""
        import torch

        stream = self.experts._stream
        self.ready.record()
        with torch.cuda.stream(stream):
            self.ready.wait(stream)
            self.started = True
            self.output = self.experts._layer(hidden_states)

    def join(self) -> None:
        """Make the current stream wait for all that the second one has been given."""
        if self.started:
            self.started = False
            self.done.record(self.experts._stream)
            self.done.wait()


@functools.cache
def _events(_stream: torch.cuda.Stream, _micro_batch: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    import torch

    return torch.cuda.Event(), torch.cuda.Event()


def _captures(experts: Any) -> bool:
    """Whether this call becomes part of a CUDA graph that both ends of the fork lie in."""
    import torch

    from vllm_hotpath.overlap import is_breakable_capture

    return (
        experts._stream is not None
        and torch.cuda.is_current_stream_capturing()
        and not is_breakable_capture()
    )


def _sync(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def maybe_sync_shared_experts_stream(self: Any, shared_experts_input: torch.Tensor) -> None:
        _thread.flight = None
        if self._determine_shared_experts_order(shared_experts_input) != _MULTI_STREAM:
            return original(self, shared_experts_input)
        if not _captures(self) or not getattr(self, _STOCK_HAS_RUN, False):
            setattr(self, _STOCK_HAS_RUN, True)
            return original(self, shared_experts_input)
        _thread.flight = flight = _Flight(self)
        if LAUNCH == "sync":
            flight.start(shared_experts_input)
        return None

    return maybe_sync_shared_experts_stream


def _apply(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def apply(self: Any, shared_experts_input: torch.Tensor, order: int) -> Any:
        flight = _thread.flight
        if flight is None or flight.experts is not self:
            return original(self, shared_experts_input, order)
        if order == _NO_OVERLAP and LAUNCH == "gate":
            flight.start(shared_experts_input)
        elif order == _MULTI_STREAM:
            index = self._output_idx
            assert self._output[index] is None
            if not flight.started:
                flight.start(shared_experts_input)
            flight.join()
            self._output[index] = flight.output
            _thread.flight = None
        return None

    return apply


def _forward_impl(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _forward_impl(self: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return original(self, *arguments, **options)
        finally:
            # Something is in flight here only where the routed experts have raised: a capture has to end.
            flight, _thread.flight = _thread.flight, None
            if flight is not None:
                flight.join()

    return _forward_impl


# ---- What the flag asks for ----


def _plan(environ: Mapping[str, str]) -> Plan | None:
    if not envs.read(envs.SHARED_EXPERTS_TWO_STREAM, environ):
        return None
    return Plan(
        (Patch(SYNC, _sync), Patch(APPLY, _apply), Patch(RUN, _forward_impl)),
        detail="shared experts by events, launched after the gate, in captures (SharedExperts)",
        known=(ROUTED,),
        native=NATIVE,
        refusal=_REFUSAL,
    )


_REFUSAL = (
    "no launch order has been measured to be faster than vLLM's own with equal tokens (docs/plugin.md);"
    f" {envs.FORCE}=1 turns it on"
)

MOE_SHARED_EXPERTS = Feature("moe_shared_experts", (envs.SHARED_EXPERTS_TWO_STREAM,), _plan)
