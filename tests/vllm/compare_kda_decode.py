"""Runs vLLM's KDA layers on CPU tensors, stock and with our decode, and compares outputs and caches.

Triton's kernels are plain torch here, as they need a GPU; the layers' code around them is vLLM's own.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tests.helpers import BF16, FP16
from tests.vllm.compare import counted
from tests.vllm.driver import K3_KDA, KIMI_LINEAR, OPS, modules

if TYPE_CHECKING:
    from collections.abc import Iterator

TRITON = "vllm.models.kimi_k3.nvidia.ops.third_party.kda"
FLAG = "VLLM_HOTPATH_KDA_DECODE"
HEADS, DIM, SLOTS = 3, 128, 7
WIDTH = HEADS * DIM
LAYER = "model.layers.1.self_attn"


# ---- vLLM's kernels in plain torch ----


def conv_update(
    x: Any, conv_state: Any, weight: Any, bias: Any, *, conv_state_indices: Any, **options: Any
) -> Any:
    assert options["activation"] == "silu"
    result = torch.zeros_like(x)
    for row, slot in enumerate(conv_state_indices.tolist()):
        if slot <= 0:
            continue
        window = torch.cat([conv_state[slot].float(), x[row].float()[:, None]], dim=-1)
        result[row] = nn.functional.silu((window * weight.float()).sum(-1)).to(x.dtype)
        conv_state[slot] = window[:, 1:].to(conv_state.dtype)
    return result


def unit(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def recurrence(q: Any, k: Any, v: Any, decay: Any, beta: Any, state: Any, indices: Any) -> torch.Tensor:
    """``[B, H, D]`` tensors; a row without a slot is zero."""
    result = torch.zeros(q.shape)
    for row, slot in enumerate(indices.tolist()):
        if slot <= 0:
            continue
        q1, k1 = (unit(x[row].float()) for x in (q, k))
        h = state[slot].float() * decay[row].float()[:, None, :]
        v1 = (v[row].float() - (h * k1[:, None]).sum(-1)) * beta[row].float()[:, None]
        h = h + v1[..., None] * k1[:, None]
        result[row] = (h * q1[:, None]).sum(-1) * DIM**-0.5
        state[slot] = h.to(state.dtype)
    return result.to(v.dtype)


def recurrent(
    q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any, ssm_state_indices: Any, **_: Any
) -> Any:
    """0.22.1's ``fused_recurrent_kda``."""
    rows = q.shape[1]
    decay, beta, indices = g[0, :rows].exp(), beta[0, :rows], ssm_state_indices[:rows]
    return recurrence(q[0], k[0], v[0], decay, beta, initial_state, indices)[None], initial_state


def packed_decode(
    mixed_qkv: Any, raw_g: Any, raw_beta: Any, A_log: Any, dt_bias: Any, lower_bound: Any, initial_state: Any,
    state_indices: Any,
) -> Any:  # fmt: skip
    """0.33.0's ``fused_recurrent_kda_packed_decode``."""
    q, k, v = (x.unflatten(-1, (HEADS, DIM)) for x in mixed_qkv.split(WIDTH, dim=-1))
    gate = raw_g[0].float() + dt_bias.view(HEADS, DIM)
    rate = A_log.exp()[:, None]
    if lower_bound is None:
        decay = (-rate * nn.functional.softplus(gate)).exp()
    else:
        decay = (lower_bound * (rate * gate).sigmoid()).exp()
    beta = raw_beta[0].float().sigmoid()
    return recurrence(q, k, v, decay, beta, initial_state, state_indices)[None], initial_state


class Norm(nn.Module):
    """``FusedRMSNormGated``."""

    eps = 1e-5

    def __init__(self, rng: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, generator=rng).to(BF16))

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        x = x.float()
        normed = x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight.float()
        return (normed * gate.float().sigmoid()).to(BF16)


# ---- Layers ----


def paged(*shapes: tuple[tuple[int, ...], torch.dtype], rng: torch.Generator) -> list[torch.Tensor]:
    """Caches side by side in the pages of one pool, as vLLM lays them out."""
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes]
    pool = torch.zeros(SLOTS, sum(sizes) + 64, dtype=torch.uint8)
    found, offset = [], 0
    for (shape, dtype), size in zip(shapes, sizes, strict=True):
        cache = pool[:, offset : offset + size].view(dtype).unflatten(1, shape)
        cache.copy_(torch.randn(SLOTS, *shape, generator=rng) / 4)
        found.append(cache)
        offset += size
    return found


def conv(channels: int, rng: torch.Generator) -> Any:
    weight = nn.Parameter(torch.randn(channels, 1, 4, generator=rng) / 2, requires_grad=False)
    return SimpleNamespace(weight=weight, bias=None)


def conv_shape(channels: int, layout: str) -> tuple[int, int]:
    return (channels, 3) if layout == "DS" else (3, channels)


class Layer:
    """A layer's call, made of the same numbers each time: ``run`` gives its output and caches."""

    def __init__(
        self,
        cls: Any,
        layout: str,
        rows: int,
        state: torch.dtype,
        bound: float | None,
        *,
        packed: bool,
        strided: bool = False,
    ) -> None:
        rng = torch.Generator().manual_seed(rows)
        self.packed, self.layout = packed, layout
        self.layer = layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.prefix, layer.head_dim, layer.conv_size = LAYER, DIM, 4
        layer.local_projection_size, layer.gate_lower_bound = WIDTH, bound
        layer.A_log = nn.Parameter(torch.randn(HEADS, generator=rng) / 4)
        layer.dt_bias = nn.Parameter(torch.randn(WIDTH, generator=rng))
        layer.o_norm = Norm(rng)
        self.indices = torch.tensor([[3, 9], [0, 9], [6, 9], [1, 9], [0, 9]])[:rows, 0].int()
        if strided:
            self.indices = self.indices.repeat_interleave(2)[::2]
        self.x = torch.randn(rows + 2, 3 * WIDTH + 17, generator=rng).to(BF16)[:, : 3 * WIDTH]
        if self.packed:
            layer.conv1d = conv(3 * WIDTH, rng)
            layer.kv_cache = paged((conv_shape(3 * WIDTH, layout), BF16), ((HEADS, DIM, DIM), state), rng=rng)
            self.g1 = torch.randn(1, rows + 2, HEADS, DIM, generator=rng).to(BF16)
            self.beta = torch.randn(1, rows + 2, HEADS, generator=rng).to(BF16)
        else:
            layer.q_conv1d, layer.k_conv1d, layer.v_conv1d = (conv(WIDTH, rng) for _ in range(3))
            shapes = [(conv_shape(WIDTH, layout), BF16)] * 3
            layer.kv_cache = paged(*shapes, ((HEADS, DIM, DIM), state), rng=rng)
            self.g1 = -torch.rand(1, rows + 2, HEADS, DIM, generator=rng)
            self.beta = torch.rand(1, rows + 2, HEADS, generator=rng)
        self.g2 = torch.randn(rows + 2, HEADS, DIM, generator=rng).to(BF16)
        self.out = torch.zeros(1, rows + 2, HEADS, DIM, dtype=BF16)
        self.metadata = SimpleNamespace(
            num_prefills=0, num_decodes=rows, num_spec_decodes=0, num_actual_tokens=rows,
            has_initial_state=None, non_spec_query_start_loc=torch.arange(rows + 1),
            non_spec_state_indices_tensor=self.indices, spec_sequence_masks=None, spec_token_indx=None,
            non_spec_token_indx=None, spec_state_indices_tensor=None, spec_query_start_loc=None,
            num_accepted_tokens=None,
        )  # fmt: skip

    def run(self, metadata: Any) -> list[torch.Tensor]:
        from vllm.forward_context import override_forward_context

        context = SimpleNamespace(attn_metadata=metadata, cudagraph_runtime_mode=None)
        with override_forward_context(context):
            if self.packed:
                self.layer._forward(self.x, self.g1, self.g2, self.beta, self.out)
            else:
                self.layer._forward(*self.x.split(WIDTH, dim=-1), self.g1, self.beta, self.out)
        return [self.out, *self.layer.kv_cache]


@contextlib.contextmanager
def kernels_of_torch(linear: Any, layout: str, newest: bool) -> Iterator[None]:
    utils = importlib.import_module("vllm.model_executor.layers.mamba.mamba_utils")
    metadata = inspect.unwrap(linear.KimiGatedDeltaNetAttention._forward).__globals__
    replaced: list[tuple[Any, str, Any]] = [
        (linear, "causal_conv1d_update", conv_update),
        (linear, "is_conv_state_dim_first", lambda: layout == "DS"),
        (utils, "is_conv_state_dim_first", lambda: layout == "DS"),
        (linear, "GDNAttentionMetadata", SimpleNamespace),
    ]
    if not newest:
        replaced.append((linear, "fused_recurrent_kda", recurrent))
    assert metadata is vars(linear)
    stock = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    triton = ModuleType(TRITON)
    triton.chunk_kda_with_fused_gate = triton.fused_recurrent_kda = None  # type: ignore[attr-defined]
    triton.fused_recurrent_kda_packed_decode = packed_decode  # type: ignore[attr-defined]
    before = sys.modules.get(TRITON)
    for owner, name, value in replaced:
        setattr(owner, name, value)
    if newest:
        sys.modules[TRITON] = triton
    try:
        yield
    finally:
        for owner, name, value in stock:
            setattr(owner, name, value)
        sys.modules.pop(TRITON, None)
        if before is not None:
            sys.modules[TRITON] = before


CASES = [
    (layout, rows, state, bound)
    for layout in ("SD", "DS")
    for rows, state, bound in ((1, torch.float32, -5.0), (5, BF16, None), (4, FP16, -1.0))
]


def run() -> None:
    """Stock first; then the flag comes into this process, whose modules are imported and stock."""
    from vllm_hotpath.plugin import register

    newest = K3_KDA in modules()
    linear = importlib.import_module(KIMI_LINEAR)
    cls = linear.KimiGatedDeltaNetAttention
    wants = {}
    for case in CASES:
        layout, rows, state, bound = case
        with kernels_of_torch(linear, layout, newest):
            one = Layer(cls, layout, rows, state, bound, packed=newest)
            wants[case] = [x.clone() for x in one.run({LAYER: one.metadata})]
    os.environ[FLAG] = "1"
    register()
    for case, want in wants.items():
        layout, rows, state, bound = case
        for strided in (False, True):
            with kernels_of_torch(linear, layout, newest), counted("kda_decode") as calls:
                one = Layer(cls, layout, rows, state, bound, packed=newest, strided=strided)
                check_close(one, one.run({LAYER: one.metadata}), want)
                assert len(calls) == 1
    check_stock_calls(cls, linear, newest)
    if newest:
        check_k3()


def check_close(one: Layer, got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    rows = len(one.indices)
    torch.testing.assert_close(got[0][:, :rows].float(), want[0][:, :rows].float(), atol=3e-2, rtol=3e-2)
    for conv_state, stock in zip(got[1:-1], want[1:-1], strict=True):
        assert torch.equal(conv_state, stock)
    torch.testing.assert_close(got[-1].float(), want[-1].float(), atol=2e-2, rtol=3e-2)
    # Slots that no row owns, the null block among them, keep every bit.
    fresh = Layer(type(one.layer), one.layout, rows, got[-1].dtype, None, packed=one.packed)
    others = [slot for slot in range(SLOTS) if slot not in one.indices.tolist() or slot == 0]
    for cache, untouched in zip(got[1:], fresh.layer.kv_cache, strict=True):
        assert torch.equal(cache[others], untouched[others])


def check_stock_calls(cls: Any, linear: Any, newest: bool) -> None:
    """Batches that are not ours reach vLLM's code: profile runs, prefill, speculative rows, fp32 caches."""
    reached = []

    def stock(*_: Any, **__: Any) -> None:
        reached.append(None)
        raise InterruptedError

    for change in ({"num_prefills": 1}, {"num_spec_decodes": 1}, {"num_decodes": 0}):
        one = Layer(cls, "DS", 1, torch.float32, None, packed=newest)
        vars(one.metadata).update(change)
        with kernels_of_torch(linear, "DS", newest), counted("kda_decode") as calls:
            linear.causal_conv1d_update = linear.causal_conv1d_fn = stock
            with contextlib.suppress(InterruptedError):
                one.run({LAYER: one.metadata})
        assert not calls
        assert reached.pop() is None
    one = Layer(cls, "DS", 1, torch.float32, None, packed=newest)
    with kernels_of_torch(linear, "DS", newest), counted("kda_decode") as calls:
        one.run(None)
    assert not calls
    one.layer.kv_cache = [cache.float() for cache in one.layer.kv_cache]
    with kernels_of_torch(linear, "DS", newest), counted("kda_decode") as calls:
        one.run({LAYER: one.metadata})
    assert not calls


# ---- Kimi-K3 ----


def check_k3() -> None:
    kda = importlib.import_module(K3_KDA)
    supported = kda.is_fused_kda_decode_supported
    for heads in (3, 6, 8, 12, 32, 96):
        for state in (torch.float32, BF16):
            assert supported(heads, 128, 4, 0, BF16, BF16, state)
            assert kda.resolve_kda_decode_backend("auto", heads, 128, 4, 0, BF16, BF16, state) == "native"
    for head_dim, width, spec, dtype in (
        (64, 4, 0, BF16),
        (128, 3, 0, BF16),
        (128, 4, 2, BF16),
        (128, 4, 0, FP16),
    ):
        assert not supported(12, head_dim, width, spec, dtype, dtype, torch.float32)
    check_refill(kda)
    check_k3_op(importlib.import_module(OPS))


def check_k3_op(ops: Any) -> None:
    """The op as Kimi-K3's layer calls it, against its steps."""
    for layout in ("SD", "DS"):
        ours, steps = (Layer(PlainLayer, layout, 5, torch.float32, -5.0, packed=True) for _ in range(2))
        rows, layer = 5, ours.layer
        weight = layer.conv1d.weight.view(3, WIDTH, 4).transpose(1, 2).contiguous()
        conv_state = layer.kv_cache[0] if layout == "DS" else layer.kv_cache[0].transpose(-1, -2)
        with counted("kda_decode") as calls:
            got = ops.fused_kda_decode(
                x=ours.x[:rows], weight=weight, bias=None, conv_state=conv_state, raw_g=ours.g1[:, :rows],
                raw_beta=ours.beta[:, :rows], A_log=layer.A_log, dt_bias=layer.dt_bias,
                state_indices=ours.indices.repeat_interleave(3)[::3], state=layer.kv_cache[1],
                out=ours.out[:, :rows], lower_bound=-5.0, output_gate=ours.g2[:rows],
                norm_weight=layer.o_norm.weight.float(), norm_eps=layer.o_norm.eps,
            )  # fmt: skip
            assert len(calls) == 1
        assert got.data_ptr() == ours.out.data_ptr()
        other = steps.layer
        state = other.kv_cache[0] if layout == "DS" else other.kv_cache[0].transpose(-1, -2)
        conv_weight = other.conv1d.weight[:, 0]
        mixed = conv_update(
            steps.x[:rows], state, conv_weight, None, conv_state_indices=steps.indices, activation="silu"
        )
        core, _ = packed_decode(
            mixed, steps.g1[:, :rows], steps.beta[:, :rows], other.A_log, other.dt_bias, -5.0,
            other.kv_cache[1], steps.indices,
        )  # fmt: skip
        want = other.o_norm(core, steps.g2[:rows])
        torch.testing.assert_close(got.float(), want.float(), atol=3e-2, rtol=3e-2)
        assert torch.equal(layer.kv_cache[0], other.kv_cache[0])
        torch.testing.assert_close(layer.kv_cache[1], other.kv_cache[1], atol=2e-2, rtol=3e-2)
        assert not got[0, [1, 4]].any()


def check_refill(kda: Any) -> None:
    """Decode's copies of the weights follow weights that no loader has seen."""
    from vllm_hotpath.plugin.features import kda_decode as feature

    assert kda.KimiK3DeltaAttention.__init__.__wrapped__.__code__.co_filename == kda.__file__
    rng = torch.Generator().manual_seed(0)
    seen = []

    def construct(self: Any, rng: torch.Generator, *, fused: bool) -> None:
        nn.Module.__init__(self)
        self.prefix, self.conv1d, self.o_norm = LAYER, conv(3 * WIDTH, rng), Norm(rng)
        self.conv1d.quant_method = SimpleNamespace(process_weights_after_loading=seen.append)
        self.decode_conv1d_weight = torch.full((3, 4, WIDTH), torch.nan) if fused else None
        self.decode_norm_weight = torch.full((DIM,), torch.nan) if fused else None

    for fused in (True, False):
        layer = PlainLayer.__new__(PlainLayer)
        feature._k3_init(construct)(layer, rng, fused=fused)
        for _ in range(2):
            layer.conv1d.weight.data.normal_(generator=rng)
            layer.o_norm.weight.data.normal_(generator=rng)
            layer.conv1d.quant_method.process_weights_after_loading(layer.conv1d)
            assert seen.pop() is layer.conv1d
            # A method that layers share is called with another layer's convolution too.
            other = conv(3 * WIDTH, rng)
            layer.conv1d.quant_method.process_weights_after_loading(other)
            assert seen.pop() is other
            if fused:
                taps = layer.conv1d.weight.view(3, WIDTH, 4)
                assert torch.equal(layer.decode_conv1d_weight, taps.transpose(1, 2))
                assert torch.equal(layer.decode_norm_weight, layer.o_norm.weight.float())


class PlainLayer(nn.Module):
    """Holds a layer's tensors."""
