"""What replaces vLLM's packs of keys and values: the bits of stock, and stock itself for other calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.helpers import BF16, E4M3, FP16, assert_same_bits, random_patterns
from vllm_hotpath.ops import mla_kv_pack as ops
from vllm_hotpath.plugin.features import mla_kv_pack as feature

if TYPE_CHECKING:
    from collections.abc import Callable

CPU = torch.device("cpu")


class Impl:
    """As much of vLLM's MLA implementation as the patches touch; its concat is the stock rule."""

    _use_flashinfer_concat_mla_k = False

    def __init__(self, nope: int = 128, value: int = 128) -> None:
        self.qk_nope_head_dim, self.v_head_dim, self.stock_calls = nope, value, 0
        self.kv_b_proj = SimpleNamespace(prefix="model.layers.3.self_attn.kv_b_proj")

    def stock(self, k_nope: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
        self.stock_calls += 1
        return concat(k_nope, k_pe)

    _concat_k_nope_k_pe = feature._concat_method(stock)


def concat(k_nope: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
    k = torch.empty((*k_nope.shape[:-1], k_nope.shape[-1] + k_pe.shape[-1]), dtype=k_nope.dtype)
    k[..., : k_nope.shape[-1]] = k_nope
    k[..., k_nope.shape[-1] :] = k_pe
    return k


def chunk(
    tokens: int, heads: int, widths: tuple[int, int, int], dtype: torch.dtype, rng: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """kv_b_proj's output and a rotary slice of the latent workspace."""
    nope, rope, value = widths
    kv_nope = (torch.randn(tokens, heads, nope + value, generator=rng) * 200).to(dtype)
    latent = (torch.randn(tokens, 1, 512 + rope, generator=rng) * 200).to(dtype)
    return kv_nope, latent[..., 512:]


@pytest.mark.parametrize("tokens", [0, 1, 7, 130])
@pytest.mark.parametrize("heads", [1, 3, 12, 128])
@pytest.mark.parametrize("dtype", [BF16, FP16, E4M3], ids=str)
def test_concat_gives_the_bits_of_stock(
    tokens: int, heads: int, dtype: torch.dtype, rng: torch.Generator
) -> None:
    k_nope = random_patterns((tokens, heads, 256), dtype, rng)[..., :128]
    k_pe = random_patterns((tokens, 1, 576), dtype, rng)[..., 512:]
    impl = Impl()
    got = impl._concat_k_nope_k_pe(k_nope, k_pe)
    assert impl.stock_calls == 0
    assert got.is_contiguous()
    assert_same_bits(got, concat(k_nope, k_pe))


def _ones(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


STOCK_CONCATS: dict[str, tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]] = {
    "another dtype": (
        lambda: _ones(3, 2, 16, dtype=torch.float32),
        lambda: _ones(3, 1, 8, dtype=torch.float32),
    ),
    "two dtypes": (lambda: _ones(3, 2, 16), lambda: _ones(3, 1, 8, dtype=FP16)),
    "an odd width": (lambda: _ones(3, 2, 12), lambda: _ones(3, 1, 8)),
    "an odd rope width": (lambda: _ones(3, 2, 16), lambda: _ones(3, 1, 4)),
    "no rope": (lambda: _ones(3, 2, 16), lambda: _ones(3, 1, 0)),
    "two dimensions": (lambda: _ones(2, 2, 16), lambda: _ones(2, 8)),
    "a rope of every head": (lambda: _ones(3, 2, 16), lambda: _ones(3, 2, 8)),
    "four dimensions": (lambda: _ones(1, 3, 2, 16), lambda: _ones(3, 1, 8)),
    "strided elements": (lambda: _ones(3, 2, 32)[..., ::2], lambda: _ones(3, 1, 8)),
    "strided rope elements": (lambda: _ones(3, 2, 16), lambda: _ones(3, 1, 16)[..., ::2]),
    "one rope for all tokens": (lambda: _ones(3, 2, 16), lambda: _ones(1, 1, 8)),
}


@pytest.mark.parametrize("kind", STOCK_CONCATS)
def test_concat_leaves_other_calls_to_stock(kind: str) -> None:
    k_nope, k_pe = (make() for make in STOCK_CONCATS[kind])
    impl = Impl()
    assert_same_bits(impl._concat_k_nope_k_pe(k_nope, k_pe), concat(k_nope, k_pe))
    assert impl.stock_calls == 1


def test_concat_leaves_flashinfers_kernel_and_other_devices_to_stock() -> None:
    impl = Impl()
    impl._use_flashinfer_concat_mla_k = True
    impl._concat_k_nope_k_pe(_ones(3, 2, 16), _ones(3, 1, 8))
    assert impl.stock_calls == 1
    assert not feature.takes_concat(_ones(3, 2, 16).to("meta"), _ones(3, 1, 8).to("meta"))


def test_concat_is_stock_under_torch_compile() -> None:
    impl = Impl()
    k_nope, k_pe = _ones(3, 2, 16), _ones(3, 1, 8)

    def call(k_nope: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
        return impl._concat_k_nope_k_pe(k_nope, k_pe)

    got = torch.compile(call, backend="eager", fullgraph=True)(k_nope, k_pe)
    assert_same_bits(got, concat(k_nope, k_pe))
    assert impl.stock_calls == 1


# ---- The DCP loop's hook ----


def loop(q_data_type: torch.dtype, *given: Any) -> list[Any]:
    """What the stock loop gets as its hook."""
    seen: list[Any] = []

    def original(self: Any, *arguments: Any, fused_mla_kv_concat_fn: Any = None) -> str:
        assert arguments == ("q", "cache", metadata, "scale", 2)
        seen.append(fused_mla_kv_concat_fn)
        return "result"

    metadata = SimpleNamespace(prefill=SimpleNamespace(q_data_type=q_data_type))
    patched = feature._dcp_loop(original)
    options = {"fused_mla_kv_concat_fn": given[0]} if given else {}
    assert patched(Impl(), "q", "cache", metadata, "scale", dcp_world_size=2, **options) == "result"
    return seen


def test_the_loop_gets_our_pack_for_fp8_queries_and_whatever_the_caller_gives() -> None:
    assert callable(loop(E4M3)[0])
    assert loop(BF16) == [None]
    assert loop(E4M3, None) == [None]
    assert loop(E4M3, print) == [print]


@pytest.mark.parametrize("tokens", [0, 1, 33])
@pytest.mark.parametrize(
    "widths", [(128, 64, 128), (192, 64, 256), (64, 32, 72), (12, 8, 8), (16, 4, 8)], ids=str
)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_our_pack_of_an_fp8_chunk_gives_the_bits_of_stock(
    tokens: int, widths: tuple[int, int, int], dtype: torch.dtype, rng: torch.Generator
) -> None:
    kv_nope, k_pe = chunk(tokens, 3, widths, dtype, rng)
    kv_nope, k_pe = kv_nope.clamp(-448, 448), k_pe.clamp(-448, 448)
    impl = Impl(widths[0], widths[2])
    k, v = loop(E4M3)[0].func(impl, kv_nope, k_pe, True)
    k_nope, v_stock = kv_nope.to(E4M3).split([widths[0], widths[2]], dim=-1)
    assert_same_bits(k, concat(k_nope, k_pe.to(E4M3)), "k")
    assert_same_bits(v, v_stock, "v")
    fits = all(width % 8 == 0 for width in widths)
    assert (impl.stock_calls == 0) == fits


# ---- Kimi-K3 ----


def stock_is_called(*_: Any) -> str:
    return "stock"


@pytest.mark.parametrize("tokens", [0, 1, 33])
@pytest.mark.parametrize("fp8_k_pe", [False, True])
def test_k3_packs_give_the_bits_of_the_generic_tail(
    tokens: int, fp8_k_pe: bool, rng: torch.Generator
) -> None:
    kv_nope, k_pe = chunk(tokens, 12, (128, 64, 128), BF16, rng)
    kv_nope, k_pe = kv_nope.clamp(-448, 448), k_pe.clamp(-448, 448)
    k_nope, v = kv_nope.split([128, 128], dim=-1)
    fp8_pe = k_pe.to(E4M3)
    wants = (concat(k_nope.to(E4M3), fp8_pe), v.to(E4M3))
    given = fp8_pe if fp8_k_pe else k_pe
    dcp = feature._k3_dcp_pack(stock_is_called)
    quant = feature._k3_quant(stock_is_called)
    for got in (dcp(Impl(), kv_nope, given, True), quant(k_nope, given[:, 0], v), quant(k_nope, given, v)):
        for name, tensor, want in zip("kv", got, wants, strict=True):
            assert tensor.is_contiguous()
            assert_same_bits(tensor, want, name)

    k, same_v = dcp(Impl(), kv_nope, k_pe, False)
    assert same_v.data_ptr() == v.data_ptr()
    assert same_v.stride() == v.stride()
    assert_same_bits(k, concat(k_nope, k_pe), "k")
    assert_same_bits(feature._k3_concat(stock_is_called)(k_nope, k_pe[:, 0]), concat(k_nope, k_pe), "k")


def test_k3_packs_leave_other_calls_to_stock() -> None:
    odd, k_pe = _ones(3, 2, 12), _ones(3, 8)
    assert feature._k3_concat(stock_is_called)(odd, k_pe) == "stock"
    assert feature._k3_quant(stock_is_called)(odd, k_pe, odd) == "stock"
    assert feature._k3_quant(stock_is_called)(_ones(3, 2, 16), k_pe, odd) == "stock"
    both = torch.cat([odd, odd], dim=-1)
    for fp8 in (False, True):
        assert feature._k3_dcp_pack(stock_is_called)(Impl(12, 12), both, k_pe[:, None], fp8) == "stock"
    # A bf16 pack of an FP8 k_pe is no case of ours either.
    fp8_pe = k_pe[:, None].to(E4M3)
    assert feature._k3_dcp_pack(stock_is_called)(Impl(16, 16), _ones(3, 2, 32), fp8_pe, False) == "stock"


# ---- Errors ----


@pytest.mark.parametrize("kind", [TypeError, ValueError, RuntimeError])
def test_errors_of_the_op_name_the_layer(kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: torch.Tensor) -> None:
        raise kind("mla_kv_concat: CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr(ops, "mla_kv_concat", fail)
    patched = feature._concat_method(stock_is_called)
    with pytest.raises(kind, match=r"^model\.layers\.3\.self_attn\.kv_b_proj: mla_kv_concat: CUDA_ERROR"):
        patched(Impl(), _ones(3, 2, 16), _ones(3, 1, 8))
    with pytest.raises(kind, match=r"^Kimi-K3 context chunk: "):
        feature._k3_concat(stock_is_called)(_ones(3, 2, 16), _ones(3, 8))


def test_running_out_of_memory_stays_that_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ops, "mla_kv_concat", fail)
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory"):
        feature._concat_method(stock_is_called)(Impl(), _ones(3, 2, 16), _ones(3, 1, 8))
