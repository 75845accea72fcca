"""The routing bias in another dtype: cast once, renewed in place, never stale, gone with its bias."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import vllm_hotpath
from tests import cuda_probe
from tests.helpers import BF16, FP16, assert_same_bits, capture, random_patterns
from tests.moe_router_cases import FP32
from vllm_hotpath.routing_bias import cast_once

DTYPES = (BF16, FP16, FP32)


def _bias(device: torch.device, rng: torch.Generator, experts: int = 384) -> torch.Tensor:
    return (torch.randn(experts, generator=rng) * 3 + 8).to(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("experts", [1, 7, 256, 384])
def test_it_is_the_cast_of_torch(
    experts: int, source: torch.dtype, dtype: torch.dtype, device: torch.device, rng: torch.Generator
) -> None:
    bias = random_patterns((experts,), source, rng).nan_to_num().to(device)
    got = cast_once(bias, dtype)
    assert_same_bits(got, bias.to(dtype))
    assert (got is bias) == (source == dtype)
    assert cast_once(bias, dtype) is got


def test_a_changed_bias_is_cast_anew_into_the_same_memory(device: torch.device, rng: torch.Generator) -> None:
    bias = torch.nn.Parameter(_bias(device, rng))
    kept = cast_once(bias, BF16)
    with torch.no_grad():
        bias.mul_(2)
    again = cast_once(bias, BF16)
    assert again.data_ptr() == kept.data_ptr()
    assert_same_bits(again, bias.detach().to(BF16))
    # Other memory under the same tensor.
    bias.data = _bias(device, rng)
    again = cast_once(bias, BF16)
    assert again.data_ptr() == kept.data_ptr()
    assert_same_bits(again, bias.detach().to(BF16))


def test_bf16_does_not_tell_near_biases_apart() -> None:
    """Why a bias is not cast where fp32 is taken (docs/kernels/moe_fp4_preamble.md)."""
    biases = torch.linspace(11.13, 11.32, 256)
    assert len(biases.unique()) > 190
    assert len(cast_once(biases, BF16).unique()) == 4


def test_another_number_of_experts_is_other_memory(device: torch.device, rng: torch.Generator) -> None:
    bias = _bias(device, rng)
    kept = cast_once(bias, BF16)
    old = kept.clone()
    bias.data = _bias(device, rng, 100)
    assert_same_bits(cast_once(bias, BF16), bias.to(BF16))
    assert_same_bits(kept, old)


def test_another_view_of_the_same_memory_is_cast_anew(device: torch.device, rng: torch.Generator) -> None:
    bias = torch.nn.Parameter(_bias(device, rng))
    whole = bias.data
    for other in (whole[:4], whole.as_strided((384,), (0,)), whole.view(2, 192), whole):
        bias.data = other
        assert_same_bits(cast_once(bias, BF16), bias.detach().to(BF16))


def test_a_bias_without_memory_does_not_keep_others_from_a_refresh(rng: torch.Generator) -> None:
    biases = [_bias(torch.device("cpu"), rng, 8) for _ in range(3)]
    copies = [cast_once(bias, BF16) for bias in biases]
    biases[1].untyped_storage().resize_(0)
    for bias in (biases[0], biases[2]):
        bias.data.copy_(_bias(torch.device("cpu"), rng, 8))
    with pytest.raises(RuntimeError, match="refresh_routing_bias: bias: "):
        vllm_hotpath.refresh_routing_bias()
    for index in (0, 2):
        assert_same_bits(copies[index], biases[index].to(BF16))


def test_refresh_sees_what_torch_does_not(device: torch.device, rng: torch.Generator) -> None:
    first, second = _bias(device, rng), _bias(device, rng)
    copies = [cast_once(bias, dtype) for bias in (first, second) for dtype in (BF16, FP16)]
    for bias in (first, second):
        bias.data.copy_(_bias(device, rng))
    vllm_hotpath.refresh_routing_bias(first)
    old = copies[2].clone()
    assert_same_bits(copies[0], first.to(BF16))
    assert_same_bits(copies[1], first.to(FP16))
    assert_same_bits(copies[2], old)
    vllm_hotpath.refresh_routing_bias()
    assert_same_bits(copies[2], second.to(BF16))
    assert_same_bits(copies[3], second.to(FP16))
    vllm_hotpath.refresh_routing_bias(torch.zeros(3, device=device))
    with pytest.raises(TypeError, match="refresh_routing_bias: bias: expected a tensor or None, got str"):
        vllm_hotpath.refresh_routing_bias("all")  # type: ignore[arg-type]


def test_a_copy_made_in_inference_mode_is_renewed_outside_of_it(
    device: torch.device, rng: torch.Generator
) -> None:
    with torch.inference_mode():
        bias = _bias(device, rng).clone()
        kept = cast_once(bias, BF16)
        assert cast_once(bias, BF16) is kept
        bias.mul_(2)
    vllm_hotpath.refresh_routing_bias(bias)
    assert_same_bits(kept, bias.to(BF16))
    # Made under inference mode, renewed outside of it.
    normal = _bias(device, rng)
    with torch.inference_mode():
        kept = cast_once(normal, BF16)
    normal.mul_(2)
    assert cast_once(normal, BF16) is kept
    assert_same_bits(kept, normal.to(BF16))


def test_a_copy_goes_with_its_bias(device: torch.device, rng: torch.Generator) -> None:
    bias = _bias(device, rng)
    kept = weakref.ref(cast_once(bias, BF16))
    gc.collect()
    assert kept() is not None
    del bias
    gc.collect()
    assert kept() is None


def test_threads_that_meet_a_bias_get_one_copy(device: torch.device, rng: torch.Generator) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            for _ in range(300):
                bias = _bias(device, rng, 8)
                start = threading.Barrier(4)

                def meet(bias: torch.Tensor = bias, start: threading.Barrier = start) -> int:
                    start.wait()
                    return cast_once(bias, BF16).data_ptr()

                assert len({each.result() for each in [pool.submit(meet) for _ in range(4)]}) == 1
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.gpu
def test_a_refresh_inside_a_capture_is_refused_and_the_capture_goes_on(rng: torch.Generator) -> None:
    bias = _bias(torch.device("cuda"), rng)
    cast_once(bias, BF16)

    def body() -> torch.Tensor:
        with pytest.raises(RuntimeError, match="refresh_routing_bias: the current stream is being captured"):
            vllm_hotpath.refresh_routing_bias()
        return bias * 2

    graph, got = capture(body)
    graph.replay()
    assert torch.equal(got, bias * 2)


@pytest.mark.gpu
def test_a_graph_reads_the_kept_copy_and_sees_a_refresh(rng: torch.Generator) -> None:
    bias = _bias(torch.device("cuda"), rng)
    cast_once(bias, BF16)
    graph, got = capture(lambda: cast_once(bias, BF16) * 1)
    bias.mul_(2)
    cast_once(bias, BF16)
    graph.replay()
    assert_same_bits(got, bias.to(BF16))
    bias.data.copy_(_bias(torch.device("cuda"), rng))
    vllm_hotpath.refresh_routing_bias()
    graph.replay()
    assert_same_bits(got, bias.to(BF16))


@pytest.mark.gpu
def test_first_seen_in_a_capture_it_is_cast_in_the_graph(rng: torch.Generator) -> None:
    bias = _bias(torch.device("cuda"), rng)
    graph, got = capture(lambda: cast_once(bias, BF16), keep_graph=True)
    assert cuda_probe.node_types(graph) == [cuda_probe.KERNEL_NODE]
    graph.instantiate()
    bias.mul_(2)
    graph.replay()
    assert_same_bits(got, bias.to(BF16))
    kept = cast_once(bias, BF16)
    assert kept is not got
    assert_same_bits(kept, bias.to(BF16))
