"""Runs vLLM's MLA prefill on CPU tensors, stock and patched, and compares what attention gets bit by bit.

Gathers of the cache, collectives and attention itself are stand-ins; all between them is vLLM's own code.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import inspect
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from tests.helpers import BF16, E4M3, FP16, assert_same_bits, random_patterns
from tests.vllm.driver import FLAG, K3, K3_OPS, MLA, base, modules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LATENT, ROPE = 512, 64
SHAPES = [(1, 12, 128, 128), (33, 8, 128, 128), (130, 3, 192, 256), (17, 128, 128, 128), (5, 4, 12, 20)]


class Projection:
    """kv_b_proj: bf16, or fp16."""

    prefix = "model.layers.0.self_attn.kv_b_proj"

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(1)
        self.weight = (torch.randn(LATENT, width, generator=generator) * 6).to(dtype)

    def __call__(self, latent: torch.Tensor) -> tuple[torch.Tensor]:
        return ((latent.float() @ self.weight.float()).clamp(-448, 448).to(self.weight.dtype),)


class Backend:
    """Prefill attention that keeps what it is given."""

    def __init__(self) -> None:
        self.calls: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def run_prefill_new_tokens(self, q: Any, k: Any, v: Any, return_softmax_lse: bool, **_: Any) -> Any:
        self.calls.append((q, k, v))
        return v.float().mean(0).expand(q.shape[0], -1, -1)

    def run_prefill_context_chunk(self, q: Any, k: Any, v: Any, **_: Any) -> Any:
        self.calls.append((q, k, v))
        return torch.ones(1), torch.ones(1)


def make_impl(cls: Any, heads: int, nope: int, value: int, dtype: torch.dtype) -> Any:
    concrete = type("Impl", (cls,), {})
    concrete.__abstractmethods__ = frozenset()
    impl = concrete.__new__(concrete)
    impl.num_heads, impl.kv_lora_rank, impl.kv_cache_dtype = heads, LATENT, "auto"
    impl.qk_nope_head_dim, impl.qk_rope_head_dim, impl.v_head_dim = nope, ROPE, value
    impl.kv_b_proj = Projection(heads * (nope + value), dtype)
    impl._use_flashinfer_concat_mla_k = False
    impl.dcp_world_size = 1
    return impl


def prefill_metadata(q_data_type: torch.dtype, tokens: int, workspace: torch.Tensor | None) -> Any:
    context = None
    if workspace is not None:
        chunk = SimpleNamespace(
            num_context_tokens=tokens, num_local_context_tokens=tokens, num_requests=1, max_seq_len=tokens,
            request_slice=slice(0, 1), token_slice=slice(0, 3), cu_seq_lens=None, starts=None,
            token_to_seq=None,
            padded_local_seq_lens=[tokens], local_context_lens_allranks=[[tokens]], local_starts=[0],
            padded_local_cu_seq_lens=[0, tokens], padded_local_token_to_seq=[0],
        )  # fmt: skip
        manager = SimpleNamespace(kv_gather=lambda gathered, local: gathered.copy_(local))
        context = SimpleNamespace(
            chunks=[chunk], empty_token_slices=[], workspace=workspace, dcp_manager=manager
        )
    prefill = SimpleNamespace(
        prefill_backend=Backend(), chunked_context=context, q_data_type=q_data_type, block_table=[None]
    )
    return SimpleNamespace(prefill=prefill)


def same_calls(stock: Any, patched: Any) -> None:
    assert len(stock.calls) == len(patched.calls) == 1
    for name, want, got in zip("qkv", stock.calls[0], patched.calls[0], strict=True):
        assert_same_bits(got, want, name)
    assert patched.calls[0][1].is_contiguous() == stock.calls[0][1].is_contiguous() is True


@contextlib.contextmanager
def counted(name: str) -> Iterator[list[None]]:
    """Counts the calls that reach our op's compiled code."""
    from vllm_hotpath import _core

    calls: list[None] = []
    op = getattr(_core, name)

    def counting(*arguments: Any) -> Any:
        calls.append(None)
        return op(*arguments)

    setattr(_core, name, counting)
    try:
        yield calls
    finally:
        setattr(_core, name, op)


def check_concat(impl: Any, heads: int, nope: int, tokens: int) -> None:
    rng = torch.Generator().manual_seed(tokens)
    for dtype in (BF16, FP16, E4M3):
        k_nope = random_patterns((tokens, heads, 2 * nope), dtype, rng)[..., :nope]
        k_pe = random_patterns((tokens, 1, LATENT + ROPE), dtype, rng)[..., LATENT:]
        stock = type(impl)._concat_k_nope_k_pe.__wrapped__(impl, k_nope, k_pe)
        assert_same_bits(impl._concat_k_nope_k_pe(k_nope, k_pe), stock, "concat")


def check_new_tokens(impl: Any, tokens: int, dtype: torch.dtype, q_data_type: torch.dtype) -> None:
    """``forward_mha`` without context."""
    rng = torch.Generator().manual_seed(tokens)
    q = torch.randn(3, impl.num_heads, impl.qk_nope_head_dim + ROPE, generator=rng).to(dtype)
    latent = torch.randn(tokens, LATENT, generator=rng).to(dtype)
    k_pe = torch.randn(tokens, 1, ROPE, generator=rng).to(dtype)
    backends, outputs = [], []
    for cls_concat in (type(impl)._concat_k_nope_k_pe.__wrapped__, type(impl)._concat_k_nope_k_pe):
        impl._concat_k_nope_k_pe = functools.partial(cls_concat, impl)
        metadata = prefill_metadata(q_data_type, tokens, None)
        output = torch.empty(3, impl.num_heads * impl.v_head_dim)
        impl.forward_mha(q, latent, k_pe, None, metadata, None, output)
        backends.append(metadata.prefill.prefill_backend)
        outputs.append(output)
    del impl._concat_k_nope_k_pe
    same_calls(*backends)
    assert_same_bits(outputs[1], outputs[0], "output")


def check_context(
    impl: Any,
    call: Callable[[Any, torch.Tensor, Any], Any],
    tokens: int,
    q_data_type: torch.dtype,
    *,
    dcp: bool,
) -> None:
    """One context chunk: ``call(stock or patched impl, q, metadata)``."""
    backends = []
    dtype = impl.kv_b_proj.weight.dtype
    for patched in (False, True):
        rng = torch.Generator().manual_seed(tokens)
        rows = torch.randn(tokens, LATENT + ROPE, generator=rng).to(dtype)
        if not dcp:
            rows = rows.to(q_data_type)
        workspace = torch.zeros(2 * tokens, LATENT + ROPE, dtype=rows.dtype)
        workspace[:tokens] = rows
        metadata = prefill_metadata(q_data_type, tokens, workspace)
        q = torch.randn(3, impl.num_heads, impl.qk_nope_head_dim + ROPE, generator=rng).to(dtype)
        if not patched:
            stock = type(impl)._concat_k_nope_k_pe.__wrapped__
            impl._concat_k_nope_k_pe = functools.partial(stock, impl)
        call(patched, q, metadata)
        if not patched:
            del impl._concat_k_nope_k_pe
        backends.append(metadata.prefill.prefill_backend)
    same_calls(*backends)


def check_impl(mla: Any) -> None:
    for tokens, heads, nope, value in SHAPES:
        fits = nope % 8 == 0
        for dtype in (BF16, FP16):
            impl = make_impl(base(mla), heads, nope, value, dtype)
            with counted("mla_kv_concat") as calls:
                check_concat(impl, heads, nope, tokens)
                assert len(calls) == (3 if fits else 0)
                check_new_tokens(impl, tokens, dtype, dtype)
                check_new_tokens(impl, tokens, dtype, E4M3)
                assert len(calls) == (5 if fits else 0)
            if K3 in modules():
                check_context_loops(impl, tokens, dtype, fits)


def check_context_loops(impl: Any, tokens: int, dtype: torch.dtype, fits: bool) -> None:
    """The context loops of 0.33.0, whose gathers into the workspace do nothing here."""
    cls = type(impl)

    def plain(_patched: bool, q: Any, metadata: Any) -> Any:
        return cls._compute_prefill_context(impl, q, None, metadata, None)

    def under_dcp(patched: bool, q: Any, metadata: Any) -> Any:
        loop = cls._context_parallel_compute_prefill_context
        loop = loop if patched else loop.__wrapped__
        return loop(impl, q, None, metadata, k_scale=None, dcp_world_size=1)

    with counted("mla_kv_concat") as calls, counted("mla_kv_concat_quant_fp8") as packs:
        for q_data_type in (dtype, E4M3):
            check_context(impl, plain, tokens, q_data_type, dcp=False)
        assert (len(calls), len(packs)) == ((2, 0) if fits else (0, 0))
        check_context(impl, under_dcp, tokens, dtype, dcp=True)
        assert (len(calls), len(packs)) == ((3, 0) if fits else (0, 0))
        check_context(impl, under_dcp, tokens, E4M3, dcp=True)
        assert (len(calls), len(packs)) == ((3, 1) if fits else (0, 0))


def check_k3(mla: Any, k3: Any, expected: str) -> None:
    """Kimi-K3's layer hands its pack to the DCP loop: against the stock steps of that loop."""
    tokens, heads = 49, 12
    impl = make_impl(base(mla), heads, 128, 128, BF16)
    layer = SimpleNamespace(qk_nope_head_dim=128, v_head_dim=128, layer_name="model.layers.3.mla")
    pack = k3.MultiHeadLatentAttention._fused_mla_kv_concat
    hook = pack if pack is None else functools.partial(pack, layer)

    def under_dcp(patched: bool, q: Any, metadata: Any) -> Any:
        loop = type(impl)._context_parallel_compute_prefill_context
        given = hook if patched else None
        loop = loop if patched else loop.__wrapped__
        return loop(impl, q, None, metadata, None, 1, fused_mla_kv_concat_fn=given)

    with counted("mla_kv_concat") as calls, counted("mla_kv_concat_quant_fp8") as packs:
        check_context(impl, under_dcp, tokens, BF16, dcp=True)
        check_context(impl, under_dcp, tokens, E4M3, dcp=True)
        # The stock tail's concat is that of the generic feature, which is on here too.
        assert (len(calls), len(packs)) == ((1, 1) if expected == "fused" else (2, 0))


def check_k3_functions(k3: Any) -> None:
    rng = torch.Generator().manual_seed(5)
    for tokens, heads in ((0, 3), (3, 4), (49, 12)):
        k_nope = random_patterns((tokens, heads, 256), BF16, rng)[..., :128]
        k_pe = random_patterns((tokens, LATENT + ROPE), BF16, rng)[..., LATENT:]
        want = torch.cat([k_nope, k_pe[:, None].expand(-1, heads, -1)], dim=-1)
        assert_same_bits(k3.fused_mla_kv_concat(k_nope, k_pe), want, "k")
        kv = (torch.randn(tokens, heads, 256, generator=rng) * 150).to(BF16).clamp(-448, 448)
        k_nope, v = kv.split([128, 128], dim=-1)
        fp8_pe = random_patterns((tokens, LATENT + ROPE), E4M3, rng)[..., LATENT:]
        k, v_fp8 = k3.fused_mla_kv_concat_quant_fp8(k_nope, fp8_pe, v)
        want = torch.cat([k_nope.to(E4M3), fp8_pe[:, None].expand(-1, heads, -1)], dim=-1)
        assert_same_bits(k, want, "k")
        assert_same_bits(v_fp8, v.to(E4M3), "v")


def check_hashes(mla: Any, k3: Any) -> None:
    """The hashes of the probes are those of ``inspect.getsource``."""
    from vllm_hotpath.plugin.features import mla_kv_pack as feature

    ops = importlib.import_module(K3_OPS) if k3 else None
    for target, module in (
        (feature.CONCAT, mla),
        (feature.DCP_LOOP, mla),
        (feature.K3_CONCAT, ops),
        (feature.K3_QUANT, ops),
        (feature.K3_DCP_PACK, k3),
    ):
        for name in target.names:
            found: Any = module
            for part in name.split("."):
                found = getattr(found, part, None)
            if found is not None:
                source = inspect.getsource(found)
                assert hashlib.sha256(source.encode()).hexdigest()[:16] in target.hashes, name


def run() -> None:
    """Flags come one by one into a process whose modules are imported and stock."""
    from vllm import _custom_ops

    from vllm_hotpath.plugin import hooks, register

    mla = importlib.import_module(MLA)
    k3 = importlib.import_module(K3) if K3 in modules() else None
    check_hashes(mla, k3)
    for name in ("gather_and_maybe_dequant_cache", "cp_gather_cache"):
        setattr(_custom_ops, name, lambda **_: None)

    os.environ[FLAG] = "1"
    register()
    check_impl(mla)
    if k3 is None:
        return
    check_k3_functions(k3)
    layer, stock = k3.MultiHeadLatentAttention, k3.MultiHeadLatentAttention._fused_mla_kv_concat
    os.environ["VLLM_K3_DCP_FUSED_KV_PACK"] = "1"
    register()
    assert layer._fused_mla_kv_concat.__wrapped__ is stock
    check_k3(mla, k3, "fused")

    layer._fused_mla_kv_concat = stock
    vars(k3)[hooks.PATCHED_BY].discard("k3_dcp_kv_pack")
    os.environ["VLLM_K3_DCP_FUSED_KV_PACK_DISABLE"] = "1"
    register()
    assert layer._fused_mla_kv_concat is None
    check_k3(mla, k3, "stock")
