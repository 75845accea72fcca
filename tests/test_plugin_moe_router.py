"""The router feature without vLLM: which layers it takes, what it hands over, and when it steps aside."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests import fake_vllm
from tests.fake_vllm import CONTEXT, ENVS, GATE, GROUPED, K3_MODEL, LINEAR, RUNNER, TOPK, wrapped_once
from tests.helpers import BF16, FP16
from vllm_hotpath import plugin
from vllm_hotpath.ops import moe_router as ops
from vllm_hotpath.plugin.features import moe_router as feature

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fake_vllm import Process

EXPERTS, HIDDEN = 16, 32


@pytest.fixture
def on(process: Process, monkeypatch: pytest.MonkeyPatch) -> Process:
    monkeypatch.setattr(feature._say, "said", set())
    process.set(VLLM_HOTPATH_MOE_ROUTER="1")
    plugin.register()
    return process


class Experts:
    def __init__(self) -> None:
        self.is_monolithic = False


def make_gate(dtype: torch.dtype = BF16, out_dtype: torch.dtype | None = torch.float32) -> Any:
    rng = torch.Generator().manual_seed(1)
    return fake_vllm.load(GATE).GateLinear(torch.randn(EXPERTS, HIDDEN, generator=rng).to(dtype), out_dtype)


def make_runner(gate: Any = None, router: Any = None) -> Any:
    runner = fake_vllm.load(RUNNER).MoERunner()
    runner.gate = gate or make_gate()
    runner.router = router or fake_vllm.load(GROUPED).GroupedTopKRouter()
    runner._quant_method = Experts()
    parallel = SimpleNamespace(use_all2all_kernels=False)
    runner.moe_config = SimpleNamespace(is_sequence_parallel=False, pcp_size=1, moe_parallel_config=parallel)
    return runner


def activations(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens)).to(BF16)


def selected(runner: Any, x: torch.Tensor) -> Any:
    return runner._forward_impl(x, x, None)


def expected(gate: Any, x: torch.Tensor, scaling: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    weights, ids = (x.float() @ gate.weight.float().T).sigmoid().topk(2, dim=-1)
    return weights / weights.sum(-1, keepdim=True) * scaling, ids.int()


# ---- What is handed over ----


@pytest.mark.parametrize("tokens", [1, 2, 31, 32])
def test_experts_come_from_one_call(on: Process, tokens: int) -> None:
    runner = make_runner()
    x = activations(tokens)
    weights, ids = selected(runner, x)
    want_weights, want_ids = expected(runner.gate, x)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want_weights)
    assert not on.warnings


@pytest.mark.parametrize("tokens", [0, 33])
def test_other_numbers_of_tokens_stay_stock(on: Process, tokens: int) -> None:
    runner = make_runner()
    assert selected(runner, activations(tokens))[0] == "stock"
    assert len(selected(runner, activations(1))[0]) == 1
    assert selected(runner, activations(tokens))[0] == "stock"


def test_logits_are_logits_to_whoever_reads_them(on: Process) -> None:
    runner = make_runner()
    x = activations(3)
    selected(runner, x)
    logits, bias = runner.gate(x)
    assert bias is None
    torch.testing.assert_close(logits, x.float() @ runner.gate.weight.float().T)
    for other in (logits.clone(), logits[:], logits.to(BF16), torch.cat([logits, logits])):
        assert runner.router._compute_routing(x, other, None) == ("stock", other)
    other_router = fake_vllm.load(GROUPED).GroupedTopKRouter()
    assert other_router._compute_routing(x, logits, None) == ("stock", logits)
    assert torch.equal(runner.router._compute_routing(x, logits, None)[1], expected(runner.gate, x)[1])


def test_calls_that_the_op_does_not_take_stay_stock(on: Process) -> None:
    runner = make_runner()
    x = activations(2)
    selected(runner, x)
    columns = torch.empty(HIDDEN, 2, dtype=BF16).T.copy_(x)
    for other in (x.to(FP16), x.float(), columns):
        assert selected(runner, other)[0] == "stock"


def test_padding_rows_select_no_expert_where_the_router_skips_them(on: Process) -> None:
    context = fake_vllm.load(CONTEXT)
    context.CONTEXT = SimpleNamespace(is_padding=torch.tensor([False, True, False, True]))
    for skip in (False, True):
        runner = make_runner()
        runner.router.skip_padding = skip
        x = activations(3)
        weights, ids = selected(runner, x)
        want_weights, want_ids = expected(runner.gate, x)
        if skip:
            want_weights[1], want_ids[1] = 0, -1
        assert torch.equal(ids, want_ids)
        torch.testing.assert_close(weights, want_weights)


def test_padding_inside_a_capture_needs_no_constant(on: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    context = fake_vllm.load(CONTEXT)
    context.CONTEXT = SimpleNamespace(is_padding=torch.tensor([True, False]))
    monkeypatch.setattr(feature, "_padding_fill", lambda _: None)
    runner = make_runner()
    runner.router.skip_padding = True
    weights, ids = selected(runner, activations(2))
    assert ids[0].tolist() == [-1, -1]
    assert weights[0].tolist() == [0, 0]
    assert ids[1].min() >= 0


def test_k3_reads_the_rows_before_the_projection(on: Process) -> None:
    runner = make_runner()
    gate, runner.gate = runner.gate, None
    layer = fake_vllm.load(K3_MODEL).KimiMoE()
    layer.gate, layer.experts = gate, runner
    x = activations(2)
    rows, logits, _ = layer._maybe_overlap_router_and_down_proj(x)
    assert rows.shape == (2, 8)
    weights, ids = runner._forward_impl(rows, logits, x)
    want_weights, want_ids = expected(gate, x)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want_weights)
    assert len(on.lines) == 1


def test_k3_mega_moe_selects_by_itself(on: Process) -> None:
    layer = fake_vllm.load(K3_MODEL).KimiMoE()
    layer.gate, layer.experts, layer.use_mega_moe = make_gate(), SimpleNamespace(), True
    layer._maybe_overlap_router_and_down_proj(activations(2))
    assert "forward" not in vars(layer.gate)


# ---- Which layers ----


def _set(path: str, value: Any) -> Callable[[Any], None]:
    def change(runner: Any) -> None:
        owner = runner
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, name, value() if callable(value) else value)

    return change


def _other_gate(runner: Any) -> None:
    base = fake_vllm.load(LINEAR).ReplicatedLinear
    runner.gate = type("ReplicatedLinearWithLoRA", (base,), {})(runner.gate.weight.data, torch.float32)


def _other_router(runner: Any) -> None:
    runner.router = type("CustomRoutingRouter", (fake_vllm.load(TOPK).FusedTopKRouter,), {})()


REASONS: dict[str, tuple[Callable[[Any], None], str]] = {
    "monolithic": (_set("_quant_method.is_monolithic", True), "its kernel selects the experts itself"),
    "shared gate": (_set("_fse_fuse_gate", True), "its gate is fused with that of the shared experts"),
    "outside": (_set("gate", None), "its gate is applied outside of it"),
    "LoRA": (_other_gate, "its gate is a ReplicatedLinearWithLoRA (LoRA, or a gate of its own)"),
    "quantised": (_set("gate.quant_method", object), "its gate is quantised or has a bias"),
    "gate bias": (
        _set("gate.bias", lambda: torch.nn.Parameter(torch.zeros(EXPERTS))),
        "its gate is quantised or has a bias",
    ),
    "router": (_other_router, "its router is a CustomRoutingRouter"),
    "EPLB": (_set("router.eplb_state", object), "EPLB moves its experts"),
    "sequence": (_set("moe_config.is_sequence_parallel", True), "gathered from other ranks"),
    "dispatch": (_set("do_naive_dispatch_combine", True), "gathered from other ranks"),
    "context": (_set("moe_config.pcp_size", 2), "gathered from other ranks"),
    "all2all": (_set("moe_config.moe_parallel_config.use_all2all_kernels", True), "all2all kernels"),
    "fp16 weight": (_set("gate", lambda: make_gate(FP16)), "its gate weight is torch.float16"),
    "bf16 logits of an fp32 gate": (_set("gate", lambda: make_gate(torch.float32, BF16)), "is fp32, its"),
    "fp16 logits": (_set("gate", lambda: make_gate(BF16, FP16)), "its logits are torch.float16"),
    "groups": (_set("router.num_expert_group", 3), "16 experts do not make 3 groups"),
    "top k": (_set("router.top_k", 17), "16 experts in 1 groups, top 17"),
    "bf16 bias": (
        _set("router.e_score_correction_bias", lambda: torch.zeros(EXPERTS, dtype=BF16)),
        "its bias is torch.bfloat16",
    ),
    "scores": (_set("router.scoring_func", "sqrtsoftplus"), "its scores are sqrtsoftplus"),
    "shared experts": (_set("router.num_fused_shared_experts", 1), "shared experts are among its experts"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REASONS)
def test_layers_step_aside_with_a_reason(on: Process, kind: str) -> None:
    change, reason = REASONS[kind]
    for _ in range(2):
        runner = make_runner()
        change(runner)
        result = selected(runner, activations(2))
        assert result[0] == "stock"
        assert runner.gate is None or "forward" not in vars(runner.gate)
    assert len(on.lines) == 2
    assert on.lines[1].startswith("moe_router: model.layers.3.mlp.experts stays stock: ")
    assert reason in on.lines[1]


@pytest.mark.parametrize(
    ("name", "value"), [("VLLM_BATCH_INVARIANT", True), ("VLLM_USE_FUSED_MOE_GROUPED_TOPK", False)]
)
def test_vllms_own_switches_hold(on: Process, name: str, value: bool) -> None:
    setattr(fake_vllm.load(ENVS), name, value)
    assert selected(make_runner(), activations(2))[0] == "stock"
    assert on.lines[-1].endswith(f"stays stock: {name}={int(value)}")


def test_what_goes_wrong_while_hooking_is_one_warning(on: Process) -> None:
    for _ in range(2):
        runner = make_runner()
        del runner.moe_config
        assert selected(runner, activations(2))[0] == "stock"
    reason = "AttributeError: 'MoERunner' object has no attribute 'moe_config'"
    assert on.warnings == [f"moe_router: model.layers.3.mlp.experts stays stock: {reason}"]


def test_errors_of_the_op_name_the_layer(on: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("moe_router: top_k")

    monkeypatch.setattr(ops, "moe_router", fail)
    runner = make_runner()
    with pytest.raises(ValueError, match=r"^model\.layers\.3\.mlp\.experts: moe_router: top_k"):
        selected(runner, activations(2))


# ---- What is patched ----


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (RUNNER, "router_logits, shared_experts_input, input_ids=None", "router_logits, input_ids=None"),
        (GROUPED, "indices_type, *, input_ids", "indices_type, *, tokens, input_ids"),
        (RUNNER, "if self.gate is not None", "if self.gate"),
        (K3_MODEL, "(self, hidden_states)", "(self, hidden_states, stream)"),
    ],
)
def test_another_signature_or_source_turns_it_off(process: Process, module: str, old: str, new: str) -> None:
    process.edit(module, old, new)
    process.set(VLLM_HOTPATH_MOE_ROUTER="1")
    plugin.register()
    assert len(process.lines) == 1
    assert process.lines[0].startswith("moe_router: stock: ")
    assert not hasattr(fake_vllm.load(RUNNER).MoERunner._forward_impl, "__wrapped__")


def test_its_objects_are_wrapped_once(on: Process) -> None:
    plugin.register()
    assert wrapped_once(fake_vllm.load(RUNNER).MoERunner._forward_impl)
    assert wrapped_once(fake_vllm.load(GROUPED).GroupedTopKRouter._compute_routing)
    assert wrapped_once(fake_vllm.load(TOPK).FusedTopKRouter._compute_routing)
    assert wrapped_once(fake_vllm.load(K3_MODEL).KimiMoE._maybe_overlap_router_and_down_proj)


def test_a_method_that_another_feature_of_ours_has_wrapped_is_wrapped_again(process: Process) -> None:
    cls = fake_vllm.load(RUNNER).MoERunner
    first = cls._forward_impl = feature._runner(cls._forward_impl)
    process.set(VLLM_HOTPATH_MOE_ROUTER="1")
    plugin.register()
    assert cls._forward_impl.__wrapped__ is first
    assert process.lines[0].startswith("moe_router: on: ")
