"""The KDA decode feature without vLLM: what is chosen, what is called, and when it steps aside."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests import fake_vllm
from tests.fake_vllm import BREAKABLE, CONTEXT, K3_KDA, KIMI_LINEAR, OPS, wrapped_once
from tests.helpers import BF16, FP16
from vllm_hotpath import plugin
from vllm_hotpath.ops import kda_decode as ops
from vllm_hotpath.plugin.features import kda_decode as feature

if TYPE_CHECKING:
    from tests.fake_vllm import Process

HEADS, DIM, SLOTS = 2, 128, 4
WIDTH = HEADS * DIM
FP32 = torch.float32
LAYER = "model.layers.1.self_attn"


@pytest.fixture
def on(process: Process, monkeypatch: pytest.MonkeyPatch) -> Process:
    monkeypatch.setattr(feature, "_said", set())
    process.set(VLLM_HOTPATH_KDA_DECODE="1")
    plugin.register()
    return process


def k3_call(**changes: Any) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(0)
    call = {
        "x": torch.randn(2, 3 * WIDTH, generator=rng).to(BF16),
        "weight": torch.randn(3, 4, WIDTH, generator=rng),
        "bias": None,
        "conv_state": torch.randn(SLOTS, 3 * WIDTH, 3, generator=rng).to(BF16),
        "raw_g": torch.randn(1, 2, HEADS, DIM, generator=rng).to(BF16),
        "raw_beta": torch.randn(1, 2, HEADS, generator=rng).to(BF16),
        "A_log": torch.zeros(HEADS),
        "dt_bias": torch.zeros(WIDTH),
        "state_indices": torch.tensor([2, 0], dtype=torch.int32),
        "state": torch.randn(SLOTS, HEADS, DIM, DIM, generator=rng),
    }
    return {**call, **changes}


# ---- Kimi-K3 ----


def test_any_head_count_and_state_is_native_and_others_ask_vllm(on: Process) -> None:
    supported = fake_vllm.load(K3_KDA).is_fused_kda_decode_supported
    for heads in (1, 3, 12, 96):
        for state in (FP32, BF16, FP16):
            assert supported(heads, 128, 4, 0, BF16, BF16, state)
    for heads in (5, 6):
        for other in (
            (64, 4, 0, BF16, BF16, FP32),
            (128, 3, 0, BF16, BF16, FP32),
            (128, 4, 0, FP16, FP16, FP32),
        ):
            assert supported(heads, *other) == (heads == 5)
        assert supported(heads, 128, 4, 0, BF16, BF16, torch.float64) == (heads == 5)
    assert len(on.lines) == 1


def test_speculative_rows_stay_stock_with_a_reason(on: Process) -> None:
    supported = fake_vllm.load(K3_KDA).is_fused_kda_decode_supported
    for _ in range(2):
        assert not supported(12, 128, 4, 3, BF16, BF16, FP32)
    assert on.lines[1:] == ["kda_decode: Kimi-K3 stays stock with 3 speculative tokens"]


def test_a_gpu_without_kernels_is_left_to_vllm(on: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature, "_runs_on", lambda _: False)
    supported = fake_vllm.load(K3_KDA).is_fused_kda_decode_supported
    assert not supported(6, 128, 4, 0, BF16, BF16, FP32)
    assert supported(5, 128, 4, 0, BF16, BF16, FP32)
    assert fake_vllm.load(OPS).fused_kda_decode(**k3_call()) == "stock"


def test_the_op_is_ours_and_null_rows_touch_nothing(on: Process) -> None:
    call = k3_call()
    before = {name: call[name].clone() for name in ("conv_state", "state")}
    out = fake_vllm.load(OPS).fused_kda_decode(**call)
    assert out.shape == (1, 2, HEADS, DIM)
    assert out[0, 0].any()
    assert not out[0, 1].any()
    for name, tensor in before.items():
        assert torch.equal(call[name][[0, 1, 3]], tensor[[0, 1, 3]])
        assert not torch.equal(call[name][2], tensor[2])
    given = torch.empty(1, 2, HEADS, DIM, dtype=BF16)
    call = k3_call(out=given)
    assert fake_vllm.load(OPS).fused_kda_decode(**call) is given
    assert torch.equal(given, out)


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.zeros(2, 3 * WIDTH)},
        {"weight": torch.zeros(3, 4, WIDTH, dtype=BF16)},
        {"conv_state": torch.zeros(SLOTS, 3 * WIDTH, 3)},
        {"raw_g": torch.zeros(1, 2, HEADS, 64, dtype=BF16)},
        {"state": torch.zeros(SLOTS * HEADS * DIM * DIM + 1)[1:].view(SLOTS, HEADS, DIM, DIM)},
        {"state": torch.zeros(SLOTS, HEADS, DIM, DIM, dtype=torch.float64)},
    ],
    ids=["x", "weight", "conv_state", "head_dim", "alignment", "state"],
)
def test_calls_that_are_not_ours_reach_vllms_op(on: Process, change: dict[str, Any]) -> None:
    assert fake_vllm.load(OPS).fused_kda_decode(**k3_call(**change)) == "stock"


def test_errors_of_the_op_name_the_layer(on: Process) -> None:
    weight = k3_call()["weight"]
    weight._vllm_hotpath_layer = LAYER
    with pytest.raises(ValueError, match=rf"^{LAYER}: kda_decode: "):
        fake_vllm.load(OPS).fused_kda_decode(**k3_call(weight=weight, dt_bias=torch.zeros(3)))
    with pytest.raises(ValueError, match=r"^a KDA layer: kda_decode: "):
        fake_vllm.load(OPS).fused_kda_decode(**k3_call(dt_bias=torch.zeros(3)))


def test_a_layer_without_decode_weights_is_only_constructed(on: Process) -> None:
    layer = fake_vllm.load(K3_KDA).KimiK3DeltaAttention(None, None, prefix=LAYER)
    assert layer.prefix == LAYER


# ---- Kimi-Linear ----


def make_layer(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> tuple[Any, tuple[torch.Tensor, ...], Any]:
    rng = torch.Generator().manual_seed(0)
    layer = fake_vllm.load(KIMI_LINEAR).KimiGatedDeltaNetAttention()
    layer.prefix, layer.head_dim, layer.conv_size, layer.local_projection_size = LAYER, DIM, 4, WIDTH
    layer.gate_lower_bound, layer.A_log, layer.dt_bias = None, torch.zeros(HEADS), torch.zeros(WIDTH)
    layer.conv1d = SimpleNamespace(weight=torch.randn(3 * WIDTH, 1, 4, generator=rng), bias=None)
    layer.o_norm = SimpleNamespace(weight=torch.ones(DIM, dtype=BF16), eps=1e-5)
    call = k3_call()
    layer.kv_cache = [call["conv_state"], call["state"]]
    metadata = SimpleNamespace(
        num_prefills=0, num_decodes=2, num_spec_decodes=0, num_actual_tokens=2,
        non_spec_state_indices_tensor=call["state_indices"],
    )  # fmt: skip
    vars(metadata).update(changes)
    monkeypatch.setattr(fake_vllm.load(CONTEXT), "CONTEXT", SimpleNamespace(attn_metadata={LAYER: metadata}))
    gate = torch.randn(2, HEADS, DIM, generator=rng).to(BF16)
    out = torch.zeros(1, 2, HEADS, DIM, dtype=BF16)
    return layer, (call["x"], call["raw_g"], gate, call["raw_beta"], out), metadata


def test_decode_is_one_call_inside_of_what_ends_a_graphs_segment(
    on: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, tensors, _ = make_layer(monkeypatch)
    layer._forward(*tensors)
    out = tensors[-1]
    assert out[0, 0].any()
    assert not out[0, 1].any()
    (segment_end,) = fake_vllm.load(BREAKABLE).BREAKS
    assert segment_end.__wrapped__.__code__.co_filename == fake_vllm.load(KIMI_LINEAR).__file__


@pytest.mark.parametrize(
    "change",
    [
        {"num_prefills": 1},
        {"num_decodes": 0},
        {"num_spec_decodes": 1},
        {"non_spec_state_indices_tensor": None},
        {"num_actual_tokens": 3},
    ],
    ids=str,
)
def test_other_batches_stay_stock(
    on: Process, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    layer, tensors, _ = make_layer(monkeypatch, **change)
    layer._forward(*tensors)
    assert tensors[-1].eq(7).all()
    spec = ["kda_decode: Kimi-Linear's speculative rows stay stock"]
    assert on.lines[1:] == (spec if "num_spec_decodes" in change else [])


def test_profile_runs_and_other_caches_stay_stock(on: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, tensors, _ = make_layer(monkeypatch)
    layer.kv_cache = [cache.float() for cache in layer.kv_cache]
    layer._forward(*tensors)
    assert tensors[-1].eq(7).all()
    for metadata in (None, {}):
        layer, tensors, _ = make_layer(monkeypatch)
        fake_vllm.load(CONTEXT).CONTEXT.attn_metadata = metadata
        layer._forward(*tensors)
        assert tensors[-1].eq(7).all()


def test_errors_of_kimi_linear_name_the_layer(on: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("kda_decode: CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr(ops, "kda_decode", fail)
    layer, tensors, _ = make_layer(monkeypatch)
    with pytest.raises(RuntimeError, match=rf"^{LAYER}: kda_decode: CUDA_ERROR"):
        layer._forward(*tensors)


# ---- What is patched ----


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (KIMI_LINEAR, "mixed_qkv, g1, g2, beta", "mixed_qkv, g1, g2, g3, beta"),
        (KIMI_LINEAR, "fill_(7)", "fill_(8)"),
        (K3_KDA, "num_heads, head_dim", "heads, head_dim"),
        (OPS, "norm_eps=1e-5", "norm_eps=1e-6"),
    ],
)
def test_another_signature_or_source_turns_it_off(process: Process, module: str, old: str, new: str) -> None:
    process.edit(module, old, new)
    process.set(VLLM_HOTPATH_KDA_DECODE="1")
    plugin.register()
    assert len(process.lines) == 1
    assert process.lines[0].startswith("kda_decode: stock: ")
    assert wrapped_once(fake_vllm.load(KIMI_LINEAR).KimiGatedDeltaNetAttention._forward)
    assert not hasattr(fake_vllm.load(OPS).fused_kda_decode, "__wrapped__")


def test_a_decorated_method_that_another_plugin_has_replaced_is_left_to_it(process: Process) -> None:
    cls = fake_vllm.load(KIMI_LINEAR).KimiGatedDeltaNetAttention
    stock = cls._forward

    def theirs(self: Any, *arguments: Any) -> None: ...

    theirs.__wrapped__ = stock  # type: ignore[attr-defined]
    cls._forward = theirs
    process.set(VLLM_HOTPATH_KDA_DECODE="1")
    plugin.register()
    assert cls._forward is theirs
    assert "has been replaced by a function of" in process.lines[0]
    assert not process.warnings
