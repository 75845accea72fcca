"""Arguments that are hard to read: without memory, misshapen, misaligned, or for somebody else to handle."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import vllm_hotpath
from tests.dlpack_producers import Handmade
from vllm_hotpath import _core
from vllm_hotpath.ops import allocate

if TYPE_CHECKING:
    from collections.abc import Callable

BF16 = torch.bfloat16


def _inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(3, 2, 16).to(BF16), torch.randn(3, 8).to(BF16)


def _freed() -> torch.Tensor:
    whole = torch.ones(1 << 20, dtype=BF16)
    view = whole[1 << 19 : (1 << 19) + 96].view(3, 2, 16)
    whole.untyped_storage().resize_(0)
    return view


def _fake_with_offset() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(3, 2, 40, dtype=BF16)[..., 8:24]


@pytest.mark.parametrize(
    "make",
    [lambda: torch._efficientzerotensor((3, 2, 40), dtype=BF16)[..., 8:24], _freed, _fake_with_offset],
    ids=["zero tensor", "freed storage", "fake view"],
)
def test_a_view_without_memory_is_refused(make: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(ValueError, match=r"mla_kv_concat: k_nope: expected a tensor with memory.*, got "):
        _core.mla_kv_concat(make(), _inputs()[1], None, allocate)


class _Reshaped(Handmade):
    """A capsule whose shape says something else than its array's."""

    def __init__(self, array: np.ndarray, shape: tuple[int, ...] | None, **options: Any) -> None:
        super().__init__(array, **options)
        self._claimed = shape

    def _tensor(self) -> Any:
        tensor = super()._tensor()
        if self._claimed is None:
            tensor.shape = None
        else:
            self._shape = (ctypes.c_int64 * len(self._claimed))(*self._claimed)
            tensor.shape = ctypes.cast(self._shape, type(tensor.shape))
        return tensor


@pytest.mark.parametrize(
    "shape",
    [None, (-3, 2, 16), (3, -2, 16), (3, 2, -16), (2**31, 2**30, 16), (2**62, 2, 16)],
    ids=["null", "negative tokens", "negative heads", "negative width", "overflow", "far"],
)
@pytest.mark.parametrize("null_strides", [False, True])
def test_an_impossible_shape_is_refused(shape: tuple[int, ...] | None, null_strides: bool) -> None:
    producer = _Reshaped(np.zeros((3, 2, 16), np.float16), shape, null_strides=null_strides)
    with pytest.raises(ValueError, match=r"mla_kv_concat: k_nope: expected .*, got "):
        vllm_hotpath.mla_kv_concat(producer, torch.zeros(3, 8, dtype=torch.float16))  # type: ignore[arg-type]
    assert producer.deletions == 1


def test_null_data_with_an_offset_is_refused() -> None:
    producer = Handmade(np.zeros((3, 2, 16), np.float16), null_data=True, byte_offset=1 << 20)
    with pytest.raises(ValueError, match="k_nope: expected a tensor with memory"):
        vllm_hotpath.mla_kv_concat(producer, torch.zeros(3, 8, dtype=torch.float16))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["k_nope", "k_pe", "v"])
def test_a_base_between_elements_is_refused(name: str) -> None:
    shapes = {"k_nope": (3, 2, 16), "k_pe": (3, 8), "v": (3, 2, 24)}
    arrays = {key: np.zeros(shape, np.float16) for key, shape in shapes.items()}
    size = arrays[name].nbytes
    arrays[name] = np.zeros(size + 2, np.uint8)[1 : 1 + size].view(np.float16).reshape(shapes[name])
    with pytest.raises(
        ValueError, match=rf"mla_kv_concat_quant_fp8: {name}: expected a base aligned to 2 bytes"
    ):
        vllm_hotpath.mla_kv_concat_quant_fp8(**arrays)  # type: ignore[arg-type]


def test_values_without_a_width_are_an_empty_output() -> None:
    k_nope, k_pe = _inputs()
    k, v = vllm_hotpath.mla_kv_concat_quant_fp8(k_nope, k_pe, torch.empty(3, 2, 0, dtype=BF16))
    assert v.shape == (3, 2, 0)
    assert torch.equal(k.view(torch.uint8), torch.cat(
        [k_nope, k_pe[:, None].expand(3, 2, 8)], -1
    ).to(torch.float8_e4m3fn).view(torch.uint8))  # fmt: skip


@pytest.mark.parametrize(
    ("number", "error"),
    [(1.5, TypeError), ("24", TypeError), (2**63, ValueError), (2**40, ValueError), (-8, ValueError)],
)
def test_a_wrong_padding_is_named(number: Any, error: type[Exception]) -> None:
    k_nope, k_pe = _inputs()
    with pytest.raises(error, match=r"mla_kv_concat_quant_fp8: v_pad_to: expected .*, got "):
        vllm_hotpath.mla_kv_concat_quant_fp8(k_nope, k_pe, k_nope, v_pad_to=number)


def test_an_interrupt_in_a_producer_is_not_swallowed() -> None:
    class Interrupted:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

        def __dlpack__(self, **_: Any) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        vllm_hotpath.mla_kv_concat(Interrupted(), _inputs()[1])  # type: ignore[arg-type]


def test_a_tracer_records_the_op_and_not_its_result() -> None:
    k_nope, k_pe = _inputs()
    graph = make_fx(lambda a, b: vllm_hotpath.mla_kv_concat(a, b, out=None))(k_nope, k_pe)
    other = (k_nope + 1, k_pe + 1)
    assert torch.equal(graph(*other), vllm_hotpath.mla_kv_concat(*other))


def test_a_dispatch_mode_sees_the_op() -> None:
    seen = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    inputs = _inputs()
    want = vllm_hotpath.mla_kv_concat(*inputs)
    with Recorder():
        got = vllm_hotpath.mla_kv_concat(*inputs)
    assert "vllm_hotpath.mla_kv_concat.default" in seen
    assert torch.equal(got, want)


class _Passing(torch.Tensor):
    """Handles dispatch itself, and does what torch does."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs or {})


@pytest.mark.parametrize("which", [0, 1])
def test_a_subclass_that_passes_on_its_data_works(which: int) -> None:
    inputs = list(_inputs())
    want = vllm_hotpath.mla_kv_concat(*inputs)
    inputs[which] = inputs[which].as_subclass(_Passing)
    assert torch.equal(vllm_hotpath.mla_kv_concat(*inputs).as_subclass(torch.Tensor), want)


def test_results_do_not_require_grad_on_either_path() -> None:
    k_nope, k_pe = _inputs()
    k_nope.requires_grad_()
    assert not vllm_hotpath.mla_kv_concat(k_nope, k_pe).requires_grad
    assert not torch.ops.vllm_hotpath.mla_kv_concat(k_nope, k_pe).requires_grad


@pytest.mark.parametrize("device", [-1, 4096, "cuda:300"])
def test_a_device_that_is_not_there_is_not_supported(device: int | str) -> None:
    answer = vllm_hotpath.is_supported("mla_kv_concat", device)
    assert not answer
    assert answer.reason
