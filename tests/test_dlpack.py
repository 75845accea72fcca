"""Tensors of other producers, the cache of exchange tables, threads, and borrowing without side effects."""

from __future__ import annotations

import gc
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import vllm_hotpath
from tests import dlpack_producers as producers
from tests.helpers import E4M3, FP16, Output, as_bits, assert_same_bits, random_patterns, random_values
from tests.pack_cases import check_quant, make_inputs, make_scale
from tests.reference import mla_kv_pack as reference
from vllm_hotpath import _core

CPU = torch.device("cpu")


@pytest.fixture
def keys(rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return random_values((5, 3, 16), FP16, rng), random_values((5, 8), FP16, rng)


def test_numpy_arrays_are_inputs_and_outputs(keys: tuple[torch.Tensor, torch.Tensor]) -> None:
    k_nope, k_pe = (tensor.numpy() for tensor in keys)
    want = reference.concat(*keys)
    out = np.zeros((5, 3, 24), dtype=np.float16)
    assert vllm_hotpath.mla_kv_concat(k_nope, k_pe, out=out) is out
    assert_same_bits(torch.from_numpy(out), want)
    got = vllm_hotpath.mla_kv_concat(k_nope, k_pe)
    assert type(got) is torch.Tensor
    assert_same_bits(got, want)


def test_numpy_views_keep_their_strides(keys: tuple[torch.Tensor, torch.Tensor]) -> None:
    k_nope = np.zeros((3, 7, 20), dtype=np.float16)[:, 1:6, 3:19].transpose(1, 0, 2)
    k_nope[...] = keys[0].numpy()
    want = reference.concat(*keys)
    assert_same_bits(vllm_hotpath.mla_kv_concat(k_nope, keys[1].numpy()), want)


@pytest.mark.parametrize("allocate", [False, True], ids=["out given", "out allocated"])
def test_numpy_views_may_run_backwards(allocate: bool, keys: tuple[torch.Tensor, torch.Tensor]) -> None:
    k_nope, k_pe = keys[0].numpy()[::-1, ::-1], keys[1].numpy()[::-1]
    assert max(k_nope.strides[:2]) < 0
    out = None if allocate else torch.empty(5, 3, 24, dtype=FP16)
    got = vllm_hotpath.mla_kv_concat(k_nope, k_pe, out=out)
    assert_same_bits(got, reference.concat(keys[0].flip(0, 1), keys[1].flip(0)))


def test_read_only_arrays_are_inputs(keys: tuple[torch.Tensor, torch.Tensor]) -> None:
    arrays = [tensor.numpy().copy() for tensor in keys]
    for array in arrays:
        array.flags.writeable = False
    assert_same_bits(vllm_hotpath.mla_kv_concat(*arrays), reference.concat(*keys))


def test_read_only_array_is_refused_as_output(keys: tuple[torch.Tensor, torch.Tensor]) -> None:
    out = np.zeros((5, 3, 24), dtype=np.float16)
    out.flags.writeable = False
    with pytest.raises(ValueError, match=r"mla_kv_concat: out: expected .*writable.*, got "):
        vllm_hotpath.mla_kv_concat(*keys, out=out)
    assert not out.any()


@pytest.mark.parametrize("wrap", [producers.Unversioned, producers.NoKeywords, producers.Versioned])
def test_wrapped_torch_tensors(wrap: type, rng: torch.Generator) -> None:
    inputs = make_inputs(5, 3, (16, 8, 16), CPU, rng)
    scale = make_scale(0.4, CPU)
    wants = reference.concat_quant_fp8(*inputs, k_scale=scale)
    outputs = [Output(tuple(want.shape), E4M3, CPU) for want in wants]
    wrapped = [wrap(tensor) for tensor in (*inputs, scale, outputs[0].tensor, outputs[1].tensor)]
    got = vllm_hotpath.mla_kv_concat_quant_fp8(
        *wrapped[:3], k_scale=wrapped[3], k_out=wrapped[4], v_out=wrapped[5]
    )
    assert got[0] is wrapped[4]
    assert got[1] is wrapped[5]
    for output, want in zip(outputs, wants, strict=True):
        output.assert_guards_intact()
        assert_same_bits(output.tensor, want)
    for result, want in zip(
        vllm_hotpath.mla_kv_concat_quant_fp8(*wrapped[:3], k_scale=scale), wants, strict=True
    ):
        assert type(result) is torch.Tensor
        assert_same_bits(result, want)


@pytest.mark.parametrize("kind", [producers.Handmade, producers.HandmadeVersioned])
@pytest.mark.parametrize("options", [{}, {"null_strides": True}, {"byte_offset": 48}], ids=str)
def test_handmade_capsules_are_read_and_deleted_once(
    kind: type[producers.Handmade], options: dict[str, Any], rng: torch.Generator
) -> None:
    k_nope, k_pe = random_patterns((5, 3, 16), E4M3, rng), random_patterns((5, 8), E4M3, rng)
    made = [kind(as_bits(tensor).numpy(), **options) for tensor in (k_nope, k_pe)]
    out = kind(np.zeros((5, 3, 24), dtype=np.uint8), **options)
    assert vllm_hotpath.mla_kv_concat(*made, out=out) is out
    assert_same_bits(torch.from_numpy(out.array).view(E4M3), reference.concat(k_nope, k_pe))
    for producer in (*made, out):
        assert producer.exports >= 1
        assert producer.deletions == producer.exports


@pytest.mark.parametrize("kind", [producers.Handmade, producers.HandmadeVersioned])
def test_capsules_are_deleted_once_when_the_call_fails(kind: type[producers.Handmade]) -> None:
    k_nope = kind(np.zeros((5, 3, 16), dtype=np.uint8))
    for k_pe in (kind(np.zeros((4, 8), dtype=np.uint8)), kind(np.zeros((5, 8), dtype=np.float32))):
        exports = k_nope.exports
        with pytest.raises((ValueError, TypeError), match="mla_kv_concat: k_pe: expected "):
            vllm_hotpath.mla_kv_concat(k_nope, k_pe)
        assert k_nope.exports > exports
        assert k_nope.deletions == k_nope.exports
        assert k_pe.deletions == k_pe.exports


@pytest.mark.parametrize(
    ("producer", "expected"),
    [
        (producers.WrongName(np.zeros((5, 8), dtype=np.uint8)), ""),
        (producers.FutureVersion(np.zeros((5, 8), dtype=np.uint8)), "version|DLPack 1"),
        (producers.Handmade(np.zeros((5, 8), dtype=np.uint8), null_data=True), ""),
        (producers.Handmade(np.zeros((5, 8), dtype=np.uint8), lanes=2), ""),
    ],
    ids=["wrong capsule name", "unknown major version", "null data", "two lanes"],
)
def test_unusable_capsules_are_refused_and_released(
    producer: producers.Handmade, expected: str, rng: torch.Generator
) -> None:
    out = Output((5, 3, 24), E4M3, CPU)
    k_nope = random_patterns((5, 3, 16), E4M3, rng)
    with pytest.raises((ValueError, TypeError), match=rf"mla_kv_concat: k_pe: .*({expected})"):
        vllm_hotpath.mla_kv_concat(k_nope, producer, out=out.tensor)
    out.assert_untouched()
    assert producer.exports >= 1
    assert producer.deletions == producer.exports


def test_null_data_is_fine_without_elements() -> None:
    k_nope = producers.Handmade(np.zeros((0, 3, 16), dtype=np.uint8), null_data=True)
    k_pe = producers.HandmadeVersioned(np.zeros((0, 8), dtype=np.uint8), null_data=True, null_strides=True)
    got = vllm_hotpath.mla_kv_concat(k_nope, k_pe, out=torch.empty(0, 3, 24, dtype=E4M3))
    assert got.shape == (0, 3, 24)
    assert (k_nope.deletions, k_pe.deletions) == (k_nope.exports, k_pe.exports)


def test_read_only_flag_of_a_capsule_protects_outputs_only(rng: torch.Generator) -> None:
    k_nope, k_pe = random_patterns((5, 3, 16), E4M3, rng), random_patterns((5, 8), E4M3, rng)
    read_only = producers.HandmadeVersioned(as_bits(k_nope).numpy(), flags=producers.READ_ONLY)
    assert_same_bits(
        vllm_hotpath.mla_kv_concat(read_only, k_pe, out=torch.empty(5, 3, 24, dtype=E4M3)),
        reference.concat(k_nope, k_pe),
    )
    out = producers.HandmadeVersioned(np.zeros((5, 3, 24), dtype=np.uint8), flags=producers.READ_ONLY)
    with pytest.raises(ValueError, match=r"mla_kv_concat: out: expected .*writable.*, got "):
        vllm_hotpath.mla_kv_concat(k_nope, k_pe, out=out)
    assert not out.array.any()
    assert out.deletions == out.exports


def test_a_copy_is_no_output(keys: tuple[torch.Tensor, torch.Tensor]) -> None:
    out = producers.HandmadeVersioned(np.zeros((5, 3, 24), dtype=np.float16), flags=producers.IS_COPIED)
    with pytest.raises(ValueError, match=r"mla_kv_concat: out: expected .*, got "):
        vllm_hotpath.mla_kv_concat(*keys, out=out)
    assert out.deletions == out.exports


def test_an_error_of_the_producer_reaches_the_caller(keys: tuple[torch.Tensor, torch.Tensor]) -> None:
    with pytest.raises((ZeroDivisionError, TypeError)) as caught:
        vllm_hotpath.mla_kv_concat(producers.Failing(keys[0]), keys[1])
    messages, error = [], caught.value
    while error is not None:
        messages.append(str(error))
        error = error.__cause__ or error.__context__
    assert any("export failed" in message for message in messages)


@pytest.mark.parametrize("value", [object(), 3, "k", [1.0], None, torch.Tensor], ids=lambda v: repr(v)[:12])
def test_objects_without_dlpack_are_refused(value: Any, keys: tuple[torch.Tensor, torch.Tensor]) -> None:
    with pytest.raises(TypeError, match=r"mla_kv_concat: k_pe: expected .*, got "):
        vllm_hotpath.mla_kv_concat(keys[0], value)


def test_borrowing_counts_and_keeps_no_reference(rng: torch.Generator) -> None:
    tensors = [
        torch.zeros(2, 3),
        torch.zeros(0, 8),
        torch.nn.Parameter(torch.zeros(4)),
        np.zeros(3, np.float32),
    ]
    before = [sys.getrefcount(tensor) for tensor in tensors]
    for _ in range(100):
        assert _core.borrow_tensors(*tensors) == len(tensors)
    assert [sys.getrefcount(tensor) for tensor in tensors] == before
    assert _core.borrow_tensors() == 0
    with pytest.raises(TypeError):
        _core.borrow_tensors(tensors[0], "no tensor")


def test_calls_keep_no_reference_to_their_arguments(rng: torch.Generator) -> None:
    inputs = make_inputs(5, 3, (16, 8, 16), CPU, rng)
    outputs = [torch.empty(5, 3, 24, dtype=E4M3), torch.empty(5, 3, 16, dtype=E4M3)]
    tensors = [*inputs, *outputs]
    before = [sys.getrefcount(tensor) for tensor in tensors]
    for _ in range(50):
        vllm_hotpath.mla_kv_concat_quant_fp8(*inputs, k_out=outputs[0], v_out=outputs[1])
        with pytest.raises(ValueError, match="v_out"):
            vllm_hotpath.mla_kv_concat_quant_fp8(*inputs, k_out=outputs[0], v_out=outputs[0])
    gc.collect()
    assert [sys.getrefcount(tensor) for tensor in tensors] == before


def test_torch_tensors_have_the_exchange_api() -> None:
    assert _core.exchange_api_version(torch.Tensor)[0] == 1
    assert _core.exchange_api_version(torch.nn.Parameter) == _core.exchange_api_version(torch.Tensor)
    assert _core.exchange_api_version(np.ndarray) is None
    assert _core.exchange_api_version(int) is None


def test_many_tensor_types_are_told_apart(rng: torch.Generator) -> None:
    inputs = make_inputs(3, 2, (8, 8, 8), CPU, rng)
    wants = check_quant(*inputs)
    for index in range(200):
        subclass = type(f"Weight{index}", (torch.nn.Parameter,), {})
        instances = [torch.Tensor._make_subclass(subclass, tensor, False) for tensor in inputs]
        got = vllm_hotpath.mla_kv_concat_quant_fp8(*instances)
        assert_same_bits(got[0].as_subclass(torch.Tensor), wants[0])
        assert_same_bits(got[1].as_subclass(torch.Tensor), wants[1])
        wrapper = type(f"Producer{index}", (producers.Versioned,), {})
        got = vllm_hotpath.mla_kv_concat_quant_fp8(*[wrapper(tensor) for tensor in inputs])
        assert_same_bits(got[0], wants[0])
        stranger = type(f"Stranger{index}", (), {"__slots__": ()})
        with pytest.raises(TypeError, match="k_pe"):
            vllm_hotpath.mla_kv_concat(inputs[0], stranger())
        del subclass, instances, wrapper, stranger, got
        if index % 10 == 0:
            gc.collect()


def test_threads_get_their_own_results(rng: torch.Generator) -> None:
    jobs = []
    for tokens in (1, 7, 64, 300, 0, 13, 128, 500):
        inputs = make_inputs(tokens, 8, (128, 64, 128), CPU, rng)
        scale = make_scale(0.1 + tokens / 100, CPU)
        jobs.append((inputs, scale, reference.concat_quant_fp8(*inputs, k_scale=scale)))

    def work(job: int) -> None:
        inputs, scale, wants = jobs[job % len(jobs)]
        for _ in range(10):
            got = vllm_hotpath.mla_kv_concat_quant_fp8(*inputs, k_scale=scale)
            assert torch.equal(as_bits(got[0]), as_bits(wants[0]))
            assert torch.equal(as_bits(got[1]), as_bits(wants[1]))
            with pytest.raises(ValueError, match="k_pe"):
                vllm_hotpath.mla_kv_concat(inputs[0], torch.zeros(tokens + 1, 64, dtype=inputs[0].dtype))

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work, job) for job in range(16)]:
            future.result()
