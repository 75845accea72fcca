"""Every op on each of two GPUs: whichever is current, from two threads, without a trace on the other."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch

import vllm_hotpath
from tests import cuda_probe, kda_cases, kda_spec_cases, moe_fp4_preamble_cases, moe_router_cases
from tests.helpers import BF16, as_bits
from vllm_hotpath.overlap import ForkJoin, run_overlapped

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

pytestmark = [pytest.mark.gpu, pytest.mark.gpus(2)]

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
SEED = 7


class Op(NamedTuple):
    """``make(device)`` gives a call on fresh copies of the same inputs; it returns all that it writes."""

    name: str
    make: Callable[[torch.device], Callable[[], Sequence[torch.Tensor]]]


def _rng() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


def _concat(device: torch.device) -> Callable[[], Sequence[torch.Tensor]]:
    rng = _rng()
    k_nope = torch.randn(70, 12, 128, generator=rng).to(device, BF16)
    k_pe = torch.randn(70, 64, generator=rng).to(device, BF16)
    return lambda: [vllm_hotpath.mla_kv_concat(k_nope, k_pe)]


def _pack(device: torch.device) -> Callable[[], Sequence[torch.Tensor]]:
    rng = _rng()
    k_nope, v = (torch.randn(70, 12, 128, generator=rng).to(device, BF16) for _ in range(2))
    k_pe, scale = torch.randn(70, 64, generator=rng).to(device, BF16), torch.tensor([0.7], device=device)
    return lambda: vllm_hotpath.mla_kv_concat_quant_fp8(k_nope, k_pe, v, k_scale=scale)


def _quantize(device: torch.device) -> Callable[[], Sequence[torch.Tensor]]:
    x, scale = torch.randn(33, 464, generator=_rng()).to(device, BF16), torch.tensor([30.0], device=device)
    return lambda: vllm_hotpath.nvfp4_quantize(x, scale, layout="swizzled_128x4")


def _silu_mul(device: torch.device) -> Callable[[], Sequence[torch.Tensor]]:
    x, scale = torch.randn(33, 928, generator=_rng()).to(device, BF16), torch.tensor([30.0], device=device)
    return lambda: vllm_hotpath.silu_mul_nvfp4(x, scale, layout="swizzled_8x4")


def _norm(device: torch.device) -> Callable[[], Sequence[torch.Tensor]]:
    rng = _rng()
    x, residual = (torch.randn(33, 464, generator=rng).to(device, BF16) for _ in range(2))
    weight, scale = torch.ones(464, dtype=BF16, device=device), torch.tensor([30.0], device=device)

    def run() -> Sequence[torch.Tensor]:
        total = residual.clone()
        return [*vllm_hotpath.add_rms_norm_nvfp4(x, total, weight, 1e-6, scale), total]

    return run


def _router(device: torch.device) -> Callable[[], Sequence[torch.Tensor]]:
    return moe_router_cases.make_call(device, _rng(), moe_router_cases.FORMS["kimi linear"]).run


def _preamble(device: torch.device) -> Callable[[], Sequence[torch.Tensor]]:
    call = moe_fp4_preamble_cases.make_call(device, _rng(), moe_fp4_preamble_cases.FORMS["padding columns"])
    return lambda: [made for made in call.run() if made is not None]


def _decode(device: torch.device) -> Callable[[], Sequence[torch.Tensor]]:
    call = kda_cases.make_call(device, _rng(), rows=5, heads=3)
    return lambda: [call.run()]


def _decode_spec(device: torch.device) -> Callable[[], Sequence[torch.Tensor]]:
    call = kda_spec_cases.make_spec_call(device, _rng())
    return lambda: [call.run()]


OPS = (
    Op("mla_kv_concat", _concat),
    Op("mla_kv_concat_quant_fp8", _pack),
    Op("nvfp4_quantize", _quantize),
    Op("silu_mul_nvfp4", _silu_mul),
    Op("add_rms_norm_nvfp4", _norm),
    Op("moe_router", _router),
    Op("moe_fp4_preamble", _preamble),
    Op("kda_decode", _decode),
    Op("kda_decode_spec", _decode_spec),
)


def _assert_equal(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], device: torch.device) -> None:
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert one.device == device
        assert torch.equal(as_bits(one).cpu(), as_bits(other).cpu())


def test_every_op_is_here() -> None:
    from vllm_hotpath.ops import STEMS

    assert {op.name for op in OPS} == set(STEMS)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
@pytest.mark.parametrize("current", [0, 1])
def test_an_op_runs_where_its_tensors_are(op: Op, current: int) -> None:
    want = op.make(FIRST)()
    with torch.cuda.device(current):
        torch.cuda.synchronize()
        before = torch.cuda.current_device(), cuda_probe.current_context()
        for device in (FIRST, SECOND, FIRST):
            _assert_equal(op.make(device)(), want, device)
        assert (torch.cuda.current_device(), cuda_probe.current_context()) == before


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_two_threads_have_a_device_each(op: Op) -> None:
    want = op.make(FIRST)()
    errors: list[BaseException] = []

    def work(device: torch.device) -> None:
        try:
            torch.cuda.set_device(device)
            call = op.make(device)
            fresh = op.name.startswith("kda")
            for _ in range(30):
                # Decode moves its state on: each call gets its own.
                _assert_equal((op.make(device) if fresh else call)(), want, device)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(device,)) for device in (FIRST, SECOND)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_a_capture_on_the_second_device_is_replayed_there(op: Op) -> None:
    want = op.make(FIRST)()
    with torch.cuda.device(SECOND):
        op.make(SECOND)()
        call = op.make(SECOND)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = call()
        graph.replay()
        _assert_equal(got, want, SECOND)


def test_tensors_of_two_devices_are_refused() -> None:
    x, scale = torch.ones(3, 32, dtype=BF16, device=FIRST), torch.ones(1, device=SECOND)
    for device in (FIRST, SECOND):
        with (
            torch.cuda.device(device),
            pytest.raises(ValueError, match="global_scale: expected device"),
        ):
            vllm_hotpath.nvfp4_quantize(x, scale)


def test_each_device_has_a_side_stream_of_its_own() -> None:
    forks = {device: ForkJoin(device) for device in (FIRST, SECOND)}
    seen = {}
    for device, fork in forks.items():
        with torch.cuda.device(device), fork.side():
            stream = torch.cuda.current_stream()
            assert stream.device == device
            seen[device] = stream.cuda_stream
        fork.join()
    assert seen[FIRST] != seen[SECOND]


def test_overlap_on_each_device_gives_the_sums(rng: torch.Generator) -> None:
    for device in (FIRST, SECOND, FIRST):
        with torch.cuda.device(device):
            a, b = (torch.randn(1000, generator=rng).to(device) for _ in range(2))
            main, side = run_overlapped(lambda a=a: a * 2, lambda b=b: b * 3)
            assert torch.equal(main, a * 2)
            assert torch.equal(side, b * 3)
            assert main.device == side.device == device


def test_a_fork_of_the_device_that_is_not_current_leaves_it_so() -> None:
    fork = ForkJoin(SECOND)
    with torch.cuda.device(FIRST):
        before = torch.cuda.current_stream(FIRST), torch.cuda.current_stream(SECOND)
        with fork.side():
            assert torch.cuda.current_stream(SECOND) != before[1]
            value = torch.ones(3, device=SECOND) * 2
        fork.join()
        assert torch.cuda.current_device() == 0
        assert (torch.cuda.current_stream(FIRST), torch.cuda.current_stream(SECOND)) == before
        assert value.tolist() == [2, 2, 2]
