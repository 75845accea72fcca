"""Runs vLLM's MLA decode on CPU tensors in a process of its own: stock, and with the write held back.

The graph capture and attention itself are stand-ins; the two ops and all between them are vLLM's own code.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from tests.helpers import BF16, assert_same_bits
from tests.vllm.driver import MLA, load_plugins

if TYPE_CHECKING:
    from collections.abc import Callable

LATENT, ROPE, NOPE, VALUE, BLOCK = 512, 64, 128, 128, 16
NAME = "model.layers.0.self_attn.attn"
CALLS: list[str] = []


def write(kv_c: Any, k_pe: Any, kv_cache: Any, slots: Any, **_: Any) -> None:
    """``concat_and_cache_mla``, which this build of vLLM has for GPUs only."""
    CALLS.append("write")
    rows = torch.cat([kv_c, k_pe], dim=-1)[: slots.numel()]
    kept = slots >= 0
    kv_cache.view(-1, kv_cache.shape[-1])[slots[kept]] = rows[kept]


def make_impl(mla: Any) -> Any:
    backend = importlib.import_module("vllm.v1.attention.backend")

    class Impl(backend.MLAAttentionImpl):
        """Attention that reads every slot of the batch back from the cache."""

        is_sparse = False
        dcp_world_size = 1
        supports_quant_query_input = False

        def __init__(self) -> None:
            self.failing = False

        def forward_mqa(self, q: Any, kv_cache: Any, metadata: Any, _layer: Any) -> Any:
            CALLS.append("attend")
            if self.failing:
                raise KeyError("attention")
            nope, pe = q
            rows = kv_cache.view(-1, LATENT + ROPE)[metadata.read]
            scores = torch.cat([nope, pe], dim=-1).float() @ rows.float().T
            return (scores.softmax(-1) @ rows[:, :LATENT].float()).to(BF16), None

        def forward_mha(self, q: Any, *_: Any, output: Any, **__: Any) -> None:
            CALLS.append("prefill")
            output.copy_(q[..., :VALUE].reshape(output.shape))

        def reserve_workspace(self) -> None:
            pass

    Impl.__abstractmethods__ = frozenset()
    return Impl()


def make_layer(mla: Any, heads: int, cls: Any = None) -> Any:
    cls = cls or mla.MLAAttention
    layer = cls.__new__(cls)
    torch.nn.Module.__init__(layer)
    generator = torch.Generator().manual_seed(heads)
    layer.impl = make_impl(mla)
    layer.layer_name, layer.num_heads, layer.kv_cache_dtype = NAME, heads, "auto"
    layer.qk_nope_head_dim, layer.qk_rope_head_dim, layer.v_head_dim = NOPE, ROPE, VALUE
    layer.kv_lora_rank, layer.q_pad_num_heads = LATENT, None
    layer.use_direct_call = layer.use_pcp = layer.use_sparse = layer.is_amx_bmm_enabled = False
    layer.pcp_shard_decode_requests = False
    layer.is_aiter_triton_fp4_bmm_enabled = layer.is_aiter_triton_fp8_bmm_enabled = False
    layer.hisparse_cache = layer.prefill_backend = None
    layer.W_UK_T = (torch.randn(heads, NOPE, LATENT, generator=generator) / 16).to(BF16)
    layer.W_UV = (torch.randn(heads, LATENT, VALUE, generator=generator) / 16).to(BF16)
    layer._k_scale, layer._k_scale_float = torch.ones(1), 1.0
    layer._chunked_prefill_workspace_size = layer.chunked_prefill_workspace = 16
    return layer


class Batch:
    """Tokens of one forward; ``decodes`` of them are decoded, the padding behind them has no slot."""

    def __init__(self, layer: Any, tokens: int, decodes: int, padding: int = 0) -> None:
        rng = torch.Generator().manual_seed(tokens)
        rows = tokens + padding
        self.q = torch.randn(rows, layer.num_heads, NOPE + ROPE, generator=rng).to(BF16)
        self.kv_c = torch.randn(rows, LATENT, generator=rng).to(BF16)
        self.k_pe = torch.randn(rows, 1, ROPE, generator=rng).to(BF16)
        slots = torch.randperm(8 * BLOCK, generator=rng)[:rows]
        slots[tokens:] = -1
        self.slots, self.layer = slots, layer
        self.metadata: Any = SimpleNamespace(
            num_actual_tokens=tokens, num_decode_tokens=decodes, num_decodes=decodes,
            num_prefills=int(tokens > decodes), decode=object(), prefill=None, read=slots[:tokens],
        )  # fmt: skip

    def run(self, *, op2: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """The two ops as the compiled model calls them; the output and the cache."""
        mla = sys.modules[MLA]
        context = sys.modules["vllm.forward_context"]
        cache = torch.full((8, BLOCK, LATENT + ROPE), float("nan"), dtype=BF16)
        output = torch.full((len(self.q), self.layer.num_heads * VALUE), float("nan"), dtype=BF16)
        self.layer.kv_cache = cache
        forward = SimpleNamespace(
            attn_metadata={NAME: self.metadata}, slot_mapping={NAME: self.slots}, virtual_engine=0,
            no_compile_layers={NAME: self.layer}, cudagraph_runtime_mode=MODE[0],
        )  # fmt: skip
        CALLS.clear()
        with context.override_forward_context(forward):
            mla.unified_mla_kv_cache_update(self.kv_c, self.k_pe, NAME, "auto", self.layer._k_scale)
            CALLS.append("between")
            if op2:
                mla.unified_mla_attention_with_output(self.q, self.kv_c, self.k_pe, output, NAME)
        return output, cache


MODE: list[Any] = [SimpleNamespace(name="FULL")]
HELD_BACK = ["between", "write", "attend"]
STOCK = ["write", "between", "attend"]


def same(got: Any, want: Any) -> None:
    for name, a, b in zip(("output", "cache"), got, want, strict=True):
        assert_same_bits(a, b, name)


def check(mla: Any, feature: Any, capture: Callable[[bool], None]) -> None:
    for heads, tokens, padding in ((16, 1, 0), (3, 8, 0), (12, 5, 3), (128, 2, 6)):
        stock_layer, layer = make_layer(mla, heads), make_layer(mla, heads)
        # A mark without our methods: the stock code path of the same class.
        setattr(stock_layer.impl, feature._MARK, "stock")
        want = Batch(stock_layer, tokens, tokens, padding).run()
        assert CALLS == STOCK

        # Before a layer has run once, it is stock.
        capture(True)
        same(Batch(layer, tokens, tokens, padding).run(), want)
        assert CALLS == STOCK
        same(Batch(layer, tokens, tokens, padding).run(), want)
        assert CALLS == HELD_BACK
        capture(False)
        same(Batch(layer, tokens, tokens, padding).run(), want)
        assert CALLS == STOCK


def check_other_batches(mla: Any, feature: Any, capture: Callable[[bool], None]) -> None:
    layer = make_layer(mla, 4)
    stock = make_layer(mla, 4)
    setattr(stock.impl, feature._MARK, "stock")
    Batch(layer, 1, 1).run()
    capture(True)
    # Prefill in the batch, or nothing else in it: written before anything else. Too many tokens: not forked.
    for tokens, decodes in ((5, 2), (5, 0)):
        want = Batch(stock, tokens, decodes).run()
        same(Batch(layer, tokens, decodes).run(), want)
        assert CALLS[:3] == ["between", "write", "prefill"]
    limit, feature.MAX_TOKENS = feature.MAX_TOKENS, 4
    want = Batch(stock, 5, 5).run()
    forks: list[Any] = []
    shared, feature._fork_join = feature._fork_join, forks.append
    same(Batch(layer, 5, 5).run(), want)
    assert not forks
    assert CALLS == HELD_BACK
    feature.MAX_TOKENS, feature._fork_join = limit, shared
    # The profile run has no metadata; its slots may have been given all the same.
    profile = Batch(layer, 3, 3)
    profile.metadata = None
    output, _ = profile.run()
    assert CALLS == ["between", "write"]
    assert not output.any()
    # A write whose attention never came is made up for by the next call, of whichever layer.
    lost = Batch(layer, 2, 2)
    _, cache = lost.run(op2=False)
    assert CALLS == ["between"]
    Batch(layer, 1, 1).run()
    assert CALLS[0] == "write"
    assert CALLS[1:] == HELD_BACK
    assert_same_bits(
        cache.view(-1, LATENT + ROPE)[lost.slots], torch.cat([lost.kv_c, lost.k_pe[:, 0]], dim=-1)
    )
    # An exception of attention leaves nothing behind.
    layer.impl.failing = True
    try:
        Batch(layer, 1, 1).run()
    except KeyError:
        layer.impl.failing = False
    assert not layer.impl.failing
    assert feature._thread.join is feature._thread.pending is None
    # Nor does one before attention, and the write is made all the same, as stock has made it by then.
    weight, layer.W_UK_T = layer.W_UK_T, None
    try:
        Batch(layer, 1, 1).run()
    except (AttributeError, AssertionError):
        layer.W_UK_T = weight
    assert layer.W_UK_T is weight
    assert CALLS == ["between", "write"]
    assert feature._thread.join is feature._thread.pending is None
    Batch(layer, 1, 1).run()
    assert CALLS == HELD_BACK
    capture(False)


EXCLUDED: dict[str, Callable[[Any], None]] = {
    "sparse attention": lambda layer: setattr(layer, "use_sparse", True),
    "the cache is tiered": lambda layer: setattr(layer, "hisparse_cache", SimpleNamespace()),
    "prefill context parallelism": lambda layer: setattr(layer, "use_pcp", True),
    "decode context parallelism": lambda layer: setattr(layer.impl, "dcp_world_size", 2),
    "is_amx_bmm_enabled": lambda layer: setattr(layer, "is_amx_bmm_enabled", True),
    "is_aiter_triton_fp8_bmm_enabled": lambda layer: setattr(layer, "is_aiter_triton_fp8_bmm_enabled", True),
    "not an opaque op": lambda layer: setattr(layer, "use_direct_call", True),
    "a cache write of its own": lambda layer: setattr(
        type(layer.impl), "do_kv_cache_update", lambda *_: CALLS.append("own")
    ),
}


def check_exclusions(mla: Any, feature: Any) -> None:
    for reason, change in EXCLUDED.items():
        layer = make_layer(mla, 2)
        assert not feature.excluded(layer)
        change(layer)
        assert reason in feature.excluded(layer), reason
        feature._prepare(layer)
        assert "forward_mqa" not in vars(layer.impl)
    # As vLLM 0.22.1 leaves it until a layer's first forward with a batch.
    for ranks, prepared in ((1, True), (2, False)):
        layer = make_layer(mla, 2)
        layer.impl.dcp_world_size = -1
        feature._prepare(layer)
        assert feature._MARK not in vars(layer.impl)
        layer.impl.dcp_world_size = ranks
        feature._prepare(layer)
        assert ("forward_mqa" in vars(layer.impl)) is prepared
    derived = make_layer(mla, 2, type("Derived", (mla.MLAAttention,), {}))
    assert "Derived has a decode path of its own" in feature.excluded(derived)


def check_capture(feature: Any) -> None:
    """What counts as a capture: a full one, of a CUDA cache, outside of breakable segments."""
    cache = SimpleNamespace(is_cuda=True)
    context = importlib.import_module("vllm.forward_context")
    capturing, torch.cuda.is_current_stream_capturing = torch.cuda.is_current_stream_capturing, lambda: True
    breakable = importlib.import_module("vllm.compilation.breakable_cudagraph").BreakableCUDAGraphCapture
    full, piecewise = context.CUDAGraphMode.FULL, context.CUDAGraphMode.PIECEWISE
    try:
        for mode, expected in ((full, True), (context.CUDAGraphMode.NONE, True), (piecewise, False)):
            with context.override_forward_context(SimpleNamespace(cudagraph_runtime_mode=mode)):
                assert feature._captures(cache) is expected
                assert not feature._captures(SimpleNamespace(is_cuda=False))
                breakable._tls.active = object()
                assert not feature._captures(cache)
                breakable._tls.active = None
        torch.cuda.is_current_stream_capturing = lambda: False
        with context.override_forward_context(SimpleNamespace(cudagraph_runtime_mode=full)):
            assert not feature._captures(cache)
    finally:
        torch.cuda.is_current_stream_capturing = capturing


def run() -> str:
    load_plugins()
    mla = importlib.import_module(MLA)
    from vllm import _custom_ops

    from vllm_hotpath.plugin.features import mla_two_stream as feature

    forward = mla.MLAAttention.forward_impl
    assert forward.__wrapped__.__code__.co_filename == mla.__file__
    _custom_ops.concat_and_cache_mla = write
    check_capture(feature)

    def capture(on: bool) -> None:
        feature._captures = lambda _: on

    for feature.LAUNCH in ("first", "last"):
        check(mla, feature, capture)
        check_other_batches(mla, feature, capture)
    check_exclusions(mla, feature)
    return "compared"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(run()))
