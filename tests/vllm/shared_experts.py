"""Runs vLLM 0.22.1's MoE runner on CPU tensors in a process of its own, stock and with our launch order.

Streams, events, the gate and both kinds of experts are stand-ins that keep the order of what happens.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from tests.helpers import assert_same_bits
from tests.vllm import compare_moe_router
from tests.vllm.compare import counted
from tests.vllm.driver import load_plugins

if TYPE_CHECKING:
    from collections.abc import Iterator

RUNNER = "vllm.model_executor.layers.fused_moe.runner.moe_runner"
SHARED = "vllm.model_executor.layers.fused_moe.runner.shared_experts"
CALLS: list[str] = []
CURRENT = ["main"]


class Event:
    def __init__(self, name: str) -> None:
        self.name = name

    def record(self, stream: Any = None) -> None:
        CALLS.append(f"{stream.name if stream else CURRENT[0]} records {self.name}")

    def wait(self, stream: Any = None) -> None:
        CALLS.append(f"{stream.name if stream else CURRENT[0]} waits for {self.name}")


class Stream:
    name = "side"

    def wait_stream(self, _: Any) -> None:
        CALLS.append("side waits for main")


class Main:
    def wait_stream(self, _: Any) -> None:
        CALLS.append("main waits for side")


@contextlib.contextmanager
def on(stream: Stream) -> Iterator[None]:
    CURRENT.append(stream.name)
    try:
        yield
    finally:
        CURRENT.pop()


class Input(torch.Tensor):
    def record_stream(self, _: Any) -> None:
        CALLS.append("record_stream")


class Runner:
    """A ``MoERunner`` whose parts around the two experts are stand-ins."""

    def __init__(self, *, tokens: int, threshold: int = 256) -> None:
        shared, runner = sys.modules[SHARED], sys.modules[RUNNER]
        shared.envs.VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD = threshold
        self.experts = experts = shared.SharedExperts.__new__(shared.SharedExperts)
        experts.enable_dbo, experts._output, experts._stream = False, [None, None], Stream()
        experts._layer = self.shared
        parallel = SimpleNamespace(
            enable_eplb=False, all2all_backend="naive", use_fi_nvl_two_sided_kernels=False
        )
        experts._moe_config = SimpleNamespace(moe_parallel_config=parallel, disable_inplace=True)
        experts._quant_method = SimpleNamespace(mk_can_overlap_shared_experts=False)
        self.runner = made = runner.MoERunner.__new__(runner.MoERunner)
        torch.nn.Module.__init__(made) if isinstance(made, torch.nn.Module) else None
        vars(made).update(
            _shared_experts=experts, gate=self.gate, _fse_fuse_gate=False,
            router=None, moe_config=experts._moe_config, layer_name="model.layers.3.mlp.experts",
            _quant_method=SimpleNamespace(is_monolithic=True, apply_monolithic=self.routed),
            _sequence_parallel_context=contextlib.nullcontext,
            _maybe_dispatch=lambda _layer, hidden, logits: (hidden, logits),
            _maybe_combine=lambda shared_out, fused: (shared_out, fused),
        )  # fmt: skip
        self.failing = ""
        rng = torch.Generator().manual_seed(tokens)
        self.x = torch.randn(tokens, 32, generator=rng)

    def note(self, what: str) -> None:
        CALLS.append(f"{what} on {CURRENT[-1]}")
        if self.failing == what:
            raise KeyError(what)

    def gate(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        self.note("gate")
        return x[:, :4], None

    def shared(self, x: torch.Tensor) -> torch.Tensor:
        self.note("shared")
        return x.sigmoid()

    def routed(self, *, x: torch.Tensor, **_: Any) -> torch.Tensor:
        self.note("routed")
        return x.tanh()

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        CALLS.clear()
        layer = SimpleNamespace(ensure_moe_quant_config_init=lambda: None)
        x = self.x.as_subclass(Input)
        result: tuple[torch.Tensor, torch.Tensor] = self.runner._forward_impl(layer, x, x, x)
        return result


STOCK = [
    "record_stream", "side waits for main", "gate on main", "routed on main", "shared on side",
    "main waits for side",
]  # fmt: skip
FORK = ["main records ready", "side waits for ready", "shared on side"]
JOIN = ["side records done", "main waits for done"]
OURS = {
    "sync": [*FORK, "gate on main", "routed on main", *JOIN],
    "gate": ["gate on main", *FORK, "routed on main", *JOIN],
    "routed": ["gate on main", "routed on main", *FORK, *JOIN],
}


def check(feature: Any, capture: Any) -> None:
    for launch, expected in OURS.items():
        feature.LAUNCH = launch
        for tokens in (1, 8):
            runner = Runner(tokens=tokens)
            want = [runner.x.sigmoid(), runner.x.tanh()]
            # The first call is stock even in a capture, and every call outside of one.
            for capturing, calls in ((True, STOCK), (True, expected), (False, STOCK), (True, expected)):
                capture(capturing)
                got = runner.run()
                assert calls == CALLS, (launch, CALLS)
                assert runner.experts._output == [None, None]
                for a, b in zip(got, want, strict=True):
                    assert_same_bits(a.as_subclass(torch.Tensor), b)
        # Whatever raises: what was started is joined, and the next call is as any other.
        for failing in ("gate", "shared", "routed"):
            runner.failing = failing
            try:
                runner.run()
            except KeyError:
                runner.failing = ""
            assert not runner.failing
            assert feature._thread.flight is None
            assert (CALLS[-2:] == JOIN) == ("side waits for ready" in CALLS)
            runner.experts._output = [None, None]
        runner.run()
        assert expected == CALLS


def check_other_calls(feature: Any, capture: Any) -> None:
    """Too many tokens, or no second stream: vLLM's own code in sequence, in captures too."""
    feature.LAUNCH = "gate"
    capture(True)
    sequence = ["shared on main", "routed on main"]
    for threshold in (4, 256):
        runner = Runner(tokens=8, threshold=threshold)
        if threshold > 8:
            runner.experts._stream = None
        for _ in range(2):
            runner.run()
            assert [call for call in CALLS if not call.startswith("gate")] == sequence


def check_with_the_router(feature: Any, capture: Any) -> None:
    """The router feature wraps the same method: both do their part of one call."""
    from vllm_hotpath.plugin import register

    os.environ[compare_moe_router.FLAG] = "1"
    register()
    wrapped = sys.modules[RUNNER].MoERunner._forward_impl.__wrapped__.__wrapped__
    assert wrapped.__code__.co_filename == sys.modules[RUNNER].__file__
    check_other_calls(feature, capture)

    case = compare_moe_router.Case("with shared experts", {}, {"experts": 32})
    layer = case.make()
    layer._shared_experts = experts = Runner(tokens=5).experts
    stand_in = layer.experts_stand_in
    x = compare_moe_router.activations(5).as_subclass(Input)
    for capturing, expected in ((True, [STOCK[0], STOCK[1], *STOCK[4:]]), (True, [*FORK, *JOIN])):
        capture(capturing)
        CALLS.clear()
        with compare_moe_router.context(), counted("moe_router") as calls:
            shared_out, _ = layer._forward_impl(stand_in, x, x, x)
        assert (len(calls), expected) == (1, CALLS)
        assert_same_bits(shared_out.as_subclass(torch.Tensor), x.as_subclass(torch.Tensor).sigmoid())
        weights, ids = stand_in.routed.pop()
        logits, _ = layer.gate(x)
        with compare_moe_router.kernels_of_torch():
            want = layer.router._compute_routing(x, logits.clone(), None)
        order, wanted = ids.argsort(-1), want[1].argsort(-1)
        assert torch.equal(ids.gather(-1, order), want[1].gather(-1, wanted))
        torch.testing.assert_close(weights.gather(-1, order), want[0].gather(-1, wanted))
    assert experts._output == [None, None]


def run() -> str:
    load_plugins()
    shared, runner = importlib.import_module(SHARED), importlib.import_module(RUNNER)
    from vllm_hotpath.plugin.features import moe_shared_experts as feature

    for function in (
        shared.SharedExperts.apply,
        shared.SharedExperts.maybe_sync_shared_experts_stream,
        runner.MoERunner._forward_impl,
    ):
        assert function.__wrapped__.__code__.co_filename != function.__code__.co_filename
    shared.envs = SimpleNamespace(VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD=256)
    shared.current_platform = SimpleNamespace(is_cuda=lambda: True)
    shared.current_stream = Main
    torch.cuda.stream = on  # type: ignore[assignment, misc]
    feature._events = lambda *_: (Event("ready"), Event("done"))

    assert not feature._captures(SimpleNamespace(_stream=None))

    def capture(capturing: bool) -> None:
        feature._captures = lambda experts: capturing and experts._stream is not None

    check(feature, capture)
    check_other_calls(feature, capture)
    check_with_the_router(feature, capture)
    return "compared"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(run()))
