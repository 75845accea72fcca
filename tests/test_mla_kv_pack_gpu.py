"""CUDA behaviour of both ops: parity with the CPU, capture, streams, threads, ordering, offsets past 2^31."""

from __future__ import annotations

import itertools
import threading
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

import vllm_hotpath
from tests import cuda_probe
from tests.helpers import (
    BF16,
    DTYPES,
    E4M3,
    FP16,
    as_bits,
    assert_same_bits,
    capture,
    every_pattern,
    random_patterns,
    random_values,
    run_python,
)
from tests.pack_cases import (
    HEAD_LAYOUTS,
    HEADS,
    ROW_LAYOUTS,
    WIDTHS,
    check_concat,
    check_quant,
    make_heads,
    make_inputs,
    make_rows,
    make_scale,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

pytestmark = pytest.mark.gpu("mla_kv_concat", "mla_kv_concat_quant_fp8")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPE = (128, 64, 128)
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _move(tensor: torch.Tensor) -> torch.Tensor:
    """The same view, strides and offset included, of a copy of the storage on the GPU."""
    length = tensor.untyped_storage().nbytes() // tensor.element_size()
    flat = tensor.as_strided((length,), (1,), 0).to(CUDA)
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _assert_cpu_equals_gpu(op: Callable[..., Any], inputs: Sequence[Any], **keywords: Any) -> None:
    moved = {
        key: _move(value) if isinstance(value, torch.Tensor) else value for key, value in keywords.items()
    }
    wants, gots = op(*inputs, **keywords), op(*[_move(tensor) for tensor in inputs], **moved)
    if isinstance(wants, torch.Tensor):
        wants, gots = (wants,), (gots,)
    for want, got, index in zip(wants, gots, itertools.count()):
        assert got.is_cuda
        assert_same_bits(got, want, f"output {index}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rope", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [1, 64])
def test_every_pattern_and_random_scales_agree_with_the_cpu(
    dtype: torch.dtype, rope: torch.dtype, heads: int, rng: torch.Generator
) -> None:
    heads_shape = (1024, heads, 128)
    inputs = [every_pattern(dtype, heads_shape, CPU), every_pattern(rope, (1024, 64), CPU)]
    inputs.append(every_pattern(dtype, heads_shape, CPU))
    for exponent in range(-149, 128, 7 if heads == 1 else 40):
        scale = make_scale(2.0**exponent, CPU)
        _assert_cpu_equals_gpu(vllm_hotpath.mla_kv_concat_quant_fp8, inputs, k_scale=scale, v_scale=scale)
    for _ in range(64 if heads == 1 else 4):
        k_scale, v_scale = random_patterns((2,), torch.float32, rng)
        _assert_cpu_equals_gpu(vllm_hotpath.mla_kv_concat_quant_fp8, inputs, k_scale=k_scale, v_scale=v_scale)
    _assert_cpu_equals_gpu(vllm_hotpath.mla_kv_concat_quant_fp8, inputs)
    _assert_cpu_equals_gpu(vllm_hotpath.mla_kv_concat_quant_fp8, inputs, k_scale=make_scale(0.3, CPU))
    _assert_cpu_equals_gpu(vllm_hotpath.mla_kv_concat_quant_fp8, inputs, v_scale=make_scale(0.3, CPU))


@pytest.mark.parametrize("heads", HEADS)
def test_every_shape_agrees_with_the_cpu(heads: int, rng: torch.Generator) -> None:
    for tokens, widths in itertools.product((0, 1, 5, 64, 137, 515), WIDTHS):
        inputs = make_inputs(tokens, heads, widths, CPU, rng)
        _assert_cpu_equals_gpu(vllm_hotpath.mla_kv_concat_quant_fp8, inputs)
        _assert_cpu_equals_gpu(vllm_hotpath.mla_kv_concat, inputs[:2])


@pytest.mark.parametrize(("tokens", "heads"), [(16_387, 1), (4097, 12), (1025, 128)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_batches_agree_with_the_cpu(
    tokens: int, heads: int, dtype: torch.dtype, rng: torch.Generator
) -> None:
    kv = random_values((tokens, heads, 256), dtype, rng)
    latent = random_values((tokens, 576), dtype, rng)
    k_nope, k_pe, v = kv[..., :128], latent[:, 512:], kv[..., 128:]
    scale = make_scale(0.37, CPU)
    for keywords in ({}, {"k_scale": scale, "v_scale": scale}, {"v_pad_to": 192}):
        _assert_cpu_equals_gpu(vllm_hotpath.mla_kv_concat_quant_fp8, (k_nope, k_pe, v), **keywords)
    _assert_cpu_equals_gpu(vllm_hotpath.mla_kv_concat, (k_nope, k_pe))


@pytest.mark.parametrize("layout", HEAD_LAYOUTS)
@pytest.mark.parametrize("rows", ROW_LAYOUTS)
def test_every_layout_and_dtype_mix_agrees_with_the_cpu(layout: str, rows: str, rng: torch.Generator) -> None:
    for dtypes in itertools.product(DTYPES, repeat=3):
        k_nope = make_heads(layout, (37, 6, 128), dtypes[0], CPU, rng)
        k_pe = make_rows(rows, (37, 64), dtypes[1], CPU, rng)
        v = make_heads(layout, (37, 6, 128), dtypes[2], CPU, rng)
        scale = make_scale(0.37, CPU)
        quant = vllm_hotpath.mla_kv_concat_quant_fp8
        _assert_cpu_equals_gpu(quant, (k_nope, k_pe, v))
        _assert_cpu_equals_gpu(quant, (k_nope, k_pe, v), k_scale=scale, v_scale=scale, v_pad_to=192)
        _assert_cpu_equals_gpu(quant, (k_nope, k_pe, v), v_scale=scale)
        if dtypes[0] == dtypes[1]:
            _assert_cpu_equals_gpu(vllm_hotpath.mla_kv_concat, (k_nope, k_pe))


def _refill(inputs: Sequence[torch.Tensor], rng: torch.Generator) -> None:
    for tensor in inputs:
        tensor.copy_(random_values(tuple(tensor.shape), tensor.dtype, rng))


@pytest.mark.parametrize("tokens", [1, 64, 4096])
def test_replay_sees_changed_inputs_and_scales(tokens: int, rng: torch.Generator) -> None:
    inputs = make_inputs(tokens, 8, SHAPE, CUDA, rng)
    scale = make_scale(1.0, CUDA)
    graph, (k, v, out) = capture(
        lambda: (
            *vllm_hotpath.mla_kv_concat_quant_fp8(*inputs, k_scale=scale, v_scale=scale),
            vllm_hotpath.mla_kv_concat(*inputs[:2]),
        )
    )
    last = None
    for value in (1.0, 0.3, 2.5):
        _refill(inputs, rng)
        scale.fill_(value)
        for tensor in (k, v, out):
            as_bits(tensor).fill_(0x55)
        graph.replay()
        want_k, want_v = check_quant(*inputs, k_scale=scale, v_scale=scale)
        assert_same_bits(k, want_k, "k_out")
        assert_same_bits(v, want_v, "v_out")
        assert_same_bits(out, check_concat(*inputs[:2]), "out")
        assert last is None or not torch.equal(as_bits(k), last)
        last = as_bits(k).clone()


@pytest.mark.parametrize("tokens", [1, 37, 8192])
@pytest.mark.parametrize("layout", ["contiguous", "first half of kv", "odd base and strides"])
def test_a_call_is_one_kernel_node_and_nothing_else(tokens: int, layout: str, rng: torch.Generator) -> None:
    k_nope = make_heads(layout, (tokens, 8, 128), BF16, CUDA, rng)
    v = make_heads(layout, (tokens, 8, 128), BF16, CUDA, rng)
    k_pe = make_rows("tail of the latent row", (tokens, 64), BF16, CUDA, rng)
    scale = make_scale(2.0, CUDA)
    for body in (
        lambda: vllm_hotpath.mla_kv_concat(k_nope, k_pe),
        lambda: vllm_hotpath.mla_kv_concat_quant_fp8(k_nope, k_pe, v),
        lambda: vllm_hotpath.mla_kv_concat_quant_fp8(
            k_nope, k_pe, v, k_scale=scale, v_scale=scale, v_pad_to=192
        ),
    ):
        graph, _ = capture(body, keep_graph=True)
        assert cuda_probe.node_types(graph) == [cuda_probe.KERNEL_NODE]


def test_zero_tokens_launch_nothing(rng: torch.Generator) -> None:
    inputs = make_inputs(0, 8, SHAPE, CUDA, rng)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Graph is empty")
        graph, _ = capture(
            lambda: (vllm_hotpath.mla_kv_concat_quant_fp8(*inputs), vllm_hotpath.mla_kv_concat(*inputs[:2])),
            keep_graph=True,
        )
    assert cuda_probe.node_types(graph) == []


_FIRST_CALL = """
import torch
from tests.pack_cases import check_quant, make_inputs
import vllm_hotpath

inputs = make_inputs(64, 8, (128, 64, 128), torch.device("cuda"), torch.Generator().manual_seed({seed}))
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, capture_error_mode={mode!r}):
    k, v = vllm_hotpath.mla_kv_concat_quant_fp8(*inputs)
k.view(torch.uint8).fill_(0x55)
graph.replay()
want_k, want_v = check_quant(*inputs)
assert torch.equal(k.view(torch.uint8), want_k.view(torch.uint8))
assert torch.equal(v.view(torch.uint8), want_v.view(torch.uint8))
torch.cuda.Event().record()
print("captured")
"""


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_the_first_call_of_a_process_may_be_inside_a_capture(mode: str, rng: torch.Generator) -> None:
    code = _FIRST_CALL.format(seed=rng.initial_seed() % 2**31, mode=mode)
    assert run_python(code).endswith("captured\n")


def test_a_side_stream_orders_the_op_behind_its_producer(rng: torch.Generator) -> None:
    sources = make_inputs(512, 8, SHAPE, CUDA, rng)
    inputs = [torch.zeros_like(tensor) for tensor in sources]
    check_quant(*sources)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        for tensor, source in zip(inputs, sources, strict=True):
            tensor.copy_(source)
        got = vllm_hotpath.mla_kv_concat_quant_fp8(*inputs)
        assert torch.cuda.current_stream() == stream
    stream.synchronize()
    want = check_quant(*sources)
    assert_same_bits(got[0], want[0], "k_out")
    assert_same_bits(got[1], want[1], "v_out")


def test_a_call_does_not_wait_for_the_device(rng: torch.Generator) -> None:
    inputs = make_inputs(512, 8, SHAPE, CUDA, rng)
    check_quant(*inputs)
    torch.cuda.synchronize()
    torch.cuda._sleep(500_000_000)
    vllm_hotpath.mla_kv_concat_quant_fp8(*inputs)
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()


def test_two_threads_on_two_streams(rng: torch.Generator) -> None:
    jobs = []
    for tokens in (300, 301):
        inputs = make_inputs(tokens, 8, SHAPE, CUDA, rng)
        jobs.append((inputs, check_quant(*inputs)))
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def work(inputs: Inputs, want: tuple[torch.Tensor, torch.Tensor]) -> None:
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(200):
                    k, v = vllm_hotpath.mla_kv_concat_quant_fp8(*inputs)
                    assert torch.equal(as_bits(k), as_bits(want[0]))
                    assert torch.equal(as_bits(v), as_bits(want[1]))
                assert torch.cuda.current_stream() == stream
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_context_stream_and_device_are_left_as_they_were(rng: torch.Generator) -> None:
    inputs = make_inputs(64, 8, SHAPE, CUDA, rng)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        before = cuda_probe.current_context(), torch.cuda.current_device(), torch.cuda.current_stream()
        vllm_hotpath.mla_kv_concat_quant_fp8(*inputs)
        with pytest.raises(ValueError, match="k_pe"):
            vllm_hotpath.mla_kv_concat(inputs[0], inputs[1][:1])
        after = cuda_probe.current_context(), torch.cuda.current_device(), torch.cuda.current_stream()
    assert after == before
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    ones = torch.ones(64, 64, device=CUDA)
    assert (ones @ ones).sum().item() == 64**3


def test_a_thread_without_a_context_may_call(rng: torch.Generator) -> None:
    inputs = make_inputs(64, 8, SHAPE, CUDA, rng)
    want = check_quant(*inputs)
    torch.cuda.synchronize()
    k, v = (torch.empty_like(tensor) for tensor in want)
    torch.cuda.synchronize()
    contexts = []

    def work() -> None:
        contexts.append(cuda_probe.current_context())
        vllm_hotpath.mla_kv_concat_quant_fp8(*inputs, k_out=k, v_out=v)
        contexts.append(cuda_probe.current_context())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(contexts) == 2
    assert contexts[1] in (contexts[0], cuda_probe.current_context())
    torch.cuda.synchronize()
    assert_same_bits(k, want[0], "k_out")
    assert_same_bits(v, want[1], "v_out")


def test_context_is_usable_after_refused_calls(rng: torch.Generator) -> None:
    inputs = make_inputs(64, 8, SHAPE, CUDA, rng)
    for _ in range(10):
        with pytest.raises(TypeError, match="v"):
            vllm_hotpath.mla_kv_concat_quant_fp8(*inputs[:2], inputs[2].float())
    torch.cuda.synchronize()
    check_quant(*inputs)


@pytest.mark.parametrize("tokens", [1, 16, 512])
def test_a_chain_of_packs_and_torch_kernels_keeps_its_order(tokens: int, rng: torch.Generator) -> None:
    """Every pack reads what the kernel right before it wrote, and overwrites what the one before read."""
    links = 48
    k_pe = random_values((tokens, 64), E4M3, rng).to(CUDA)
    source = random_values((tokens, 4, 128), FP16, rng).to(CUDA)
    buffers = [torch.empty(tokens, 4, 192, dtype=E4M3, device=CUDA) for _ in range(2)]
    results = [torch.empty_like(buffers[0]) for _ in range(links)]
    first = torch.empty(tokens, 4, 128, dtype=FP16, device=CUDA)
    unused_v = torch.zeros(tokens, 4, 8, dtype=E4M3, device=CUDA)
    v_out = torch.empty_like(unused_v)

    def chain() -> None:
        first.copy_(source)
        for link in range(links):
            out, previous = buffers[link % 2], buffers[(link + 1) % 2]
            if link % 3 == 0:
                first.neg_()
                vllm_hotpath.mla_kv_concat_quant_fp8(first, k_pe, unused_v, k_out=out, v_out=v_out)
            else:
                vllm_hotpath.mla_kv_concat(previous[..., 64:], previous[:, 0, :64], out=out)
            if link % 2:
                as_bits(results[link]).copy_(as_bits(out))
            else:
                vllm_hotpath.mla_kv_concat(out[..., :184], out[:, 3, 184:], out=results[link])

    def expected() -> list[torch.Tensor]:
        wants, value = [], source.clone()
        previous = None
        for link in range(links):
            if link % 3 == 0:
                value = -value
                out, _ = check_quant(value, k_pe, unused_v)
            else:
                out = torch.cat(
                    [as_bits(previous)[..., 64:], as_bits(previous)[:, :1, :64].expand(-1, 4, -1)], -1
                ).view(E4M3)
            previous = out
            tail = as_bits(out)[:, 3:, 184:].expand(-1, 4, -1)
            wants.append(out if link % 2 else torch.cat([as_bits(out)[..., :184], tail], -1).view(E4M3))
        return wants

    graph, _ = capture(chain)
    for _ in range(5):
        source.copy_(random_values((tokens, 4, 128), FP16, rng))
        k_pe.copy_(random_values((tokens, 64), E4M3, rng))
        wants = torch.stack([as_bits(want) for want in expected()])
        wrong = torch.zeros(links, dtype=torch.int64, device=CUDA)
        for _ in range(20):
            for tensor in results:
                as_bits(tensor).fill_(0x55)
            graph.replay()
            wrong += (torch.stack([as_bits(result) for result in results]) != wants).flatten(1).sum(1)
        assert wrong.tolist() == [0] * links


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_the_pack_waits_for_a_producer_that_lets_it_start_early(captured: bool, rng: torch.Generator) -> None:
    late_copy = cuda_probe.load_late_copy()
    sources = make_inputs(16, 4, SHAPE, CUDA, rng)
    inputs = [torch.zeros_like(tensor) for tensor in sources]

    def body() -> tuple[torch.Tensor, torch.Tensor]:
        for source, tensor in zip(sources, inputs, strict=True):
            late_copy(source, tensor)
        return vllm_hotpath.mla_kv_concat_quant_fp8(*inputs)

    graph, got = capture(body) if captured else (None, None)
    for _ in range(50):
        for tensor in inputs:
            tensor.zero_()
        _refill(sources, rng)
        if graph is None:
            got = body()
        else:
            graph.replay()
        want = check_quant(*sources)
        assert_same_bits(got[0], want[0], "k_out")
        assert_same_bits(got[1], want[1], "v_out")


def test_cupy_arrays_are_inputs_and_outputs(rng: torch.Generator) -> None:
    cupy = pytest.importorskip("cupy")
    k_nope, k_pe, _ = make_inputs(13, 3, SHAPE, CUDA, rng, dtypes=(FP16,) * 3)
    want = check_concat(k_nope, k_pe)
    arrays = [cupy.from_dlpack(tensor) for tensor in (k_nope, k_pe)]
    out = cupy.zeros((13, 3, 192), dtype=cupy.float16)
    cupy.cuda.Stream.null.synchronize()
    assert vllm_hotpath.mla_kv_concat(*arrays, out=out) is out
    torch.cuda.synchronize()
    assert_same_bits(torch.from_dlpack(out), want)
    assert_same_bits(vllm_hotpath.mla_kv_concat(*arrays), want)


def _fill(tensor: torch.Tensor) -> None:
    tensor.view(-1).view(torch.int64).random_()


@pytest.mark.big(device_gib=24)
def test_inputs_and_outputs_beyond_2_31_elements() -> None:
    tokens, heads = 90_112, 128
    kv = torch.empty(tokens, heads, 256, dtype=BF16, device=CUDA)
    latent = torch.empty(tokens, 576, dtype=BF16, device=CUDA)
    _fill(kv)
    _fill(latent)
    k_nope, v, k_pe = kv[..., :128], kv[..., 128:], latent[:, 512:]
    k, values = vllm_hotpath.mla_kv_concat_quant_fp8(k_nope, k_pe, v, v_pad_to=192)
    assert min(kv.numel(), k.numel(), values.numel()) > 2**31
    for start in range(0, tokens, 8192):
        rows = slice(start, start + 8192)
        want = vllm_hotpath.mla_kv_concat_quant_fp8(k_nope[rows], k_pe[rows], v[rows], v_pad_to=192)
        assert torch.equal(as_bits(k[rows]), as_bits(want[0])), f"k_out of tokens from {start}"
        assert torch.equal(as_bits(values[rows]), as_bits(want[1])), f"v_out of tokens from {start}"
    for rows in (slice(0, 4), slice(tokens // 2, tokens // 2 + 4), slice(tokens - 4, tokens)):
        want = check_quant(k_nope[rows], k_pe[rows], v[rows], v_pad_to=192)
        assert_same_bits(k[rows], want[0], "k_out")
        assert_same_bits(values[rows], want[1], "v_out")
    del k, values, want
    out = vllm_hotpath.mla_kv_concat(k_nope, k_pe)
    assert out.numel() > 2**31
    for start in range(0, tokens, 8192):
        rows = slice(start, start + 8192)
        assert torch.equal(as_bits(out[rows, :, :128]), as_bits(k_nope[rows]))
        assert torch.equal(as_bits(out[rows, :, 128:]), as_bits(k_pe[rows, None].expand(-1, heads, -1)))


@pytest.mark.big(device_gib=12)
@pytest.mark.parametrize("odd", [0, 1], ids=["aligned", "odd"])
def test_strides_beyond_2_31_elements(odd: int, rng: torch.Generator) -> None:
    stride = 2**30 + 16 + odd
    storage = torch.zeros(3 * stride, dtype=BF16, device=CUDA)
    kv = storage.as_strided((3, 3, 256), (stride, 256, 1), odd)
    kv.copy_(random_values((3, 3, 256), BF16, rng))
    by_head = storage.as_strided((3, 3, 256), (256, stride, 1), odd)
    k_pe = storage.as_strided((3, 64), (stride, 1), odd + 128)
    for view in (kv, by_head):
        check_quant(view[..., :128], k_pe, view[..., 128:])
        check_quant(view[..., :128], k_pe, view[..., 128:], k_scale=make_scale(0.3, CUDA))
        check_concat(view[..., :128], k_pe)


@pytest.mark.big(device_gib=40)
def test_more_than_2_31_rows(rng: torch.Generator) -> None:
    tokens, heads = 2**24 + 3, 128
    token = random_values((1, heads, 8), E4M3, rng).to(CUDA)
    k_nope = token.expand(tokens, heads, 8)
    k_pe = torch.empty(tokens, 0, dtype=E4M3, device=CUDA)

    def assert_all_rows_right(got: torch.Tensor, want: torch.Tensor) -> None:
        assert got.shape[0] * got.shape[1] > 2**31
        for rows in as_bits(got).split(2**20):
            assert torch.equal(rows, as_bits(want).expand(rows.shape))

    assert_all_rows_right(vllm_hotpath.mla_kv_concat(k_nope, k_pe), token)
    scale = make_scale(0.3, CUDA)
    k, v = vllm_hotpath.mla_kv_concat_quant_fp8(k_nope, k_pe, k_nope, k_scale=scale)
    want = check_quant(token, k_pe[:1], token, k_scale=scale)
    assert_all_rows_right(k, want[0])
    assert_all_rows_right(v, want[1])
