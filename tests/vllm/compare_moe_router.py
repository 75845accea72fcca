"""Runs vLLM's MoE runner on CPU tensors, stock and with the router feature, and compares what experts get.

The experts, Kimi-K3's projection and the metadata are stand-ins; gate, runner and routers are vLLM's own.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tests.helpers import BF16
from tests.vllm.compare import counted
from tests.vllm.driver import GROUPED_ROUTER, K3_MODEL, MOE_RUNNER, TOPK_ROUTER, modules

if TYPE_CHECKING:
    from collections.abc import Iterator

FLAG = "VLLM_HOTPATH_MOE_ROUTER"
HIDDEN = 64


@functools.cache
def vllm_config() -> Any:
    from vllm.config import DeviceConfig, VllmConfig

    return VllmConfig(device_config=DeviceConfig("cpu"))


def make_gate(experts: int, dtype: torch.dtype = BF16, out_dtype: torch.dtype | None = None) -> Any:
    """A gate as the model's constructor makes it; no two weights of a channel are equal."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

    parallel_state._TP = SimpleNamespace(rank_in_group=0, world_size=1)
    with set_current_vllm_config(vllm_config()):
        gate = GateLinear(HIDDEN, experts, bias=False, out_dtype=out_dtype, params_dtype=dtype, prefix="gate")
    generator = torch.Generator().manual_seed(experts)
    columns = [torch.randperm(experts, generator=generator) for _ in range(HIDDEN)]
    gate.weight.data.copy_((torch.stack(columns, dim=1) - experts / 2) / 16)
    return gate


def make_router(experts: int, groups: int = 1, kept: int = 1, **options: Any) -> Any:
    cls = importlib.import_module(GROUPED_ROUTER).GroupedTopKRouter
    generator = torch.Generator().manual_seed(groups)
    bias = nn.Parameter(torch.randn(experts, generator=generator), requires_grad=False)
    given = {
        "top_k": 6,
        "renormalize": True,
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 2.5,
        "e_score_correction_bias": bias,
        **options,
    }
    return cls(global_num_experts=experts, num_expert_group=groups, topk_group=kept, **given)


class Experts:
    """Modular experts: what they get comes back through the runner."""

    def __init__(self, indices: torch.dtype | None) -> None:
        self.quant_method = self
        self.is_monolithic = False
        self.topk_indices_dtype = indices
        self.supports_internal_mk = True
        self.routed: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward_modular(self, x: Any, topk_weights: Any, topk_ids: Any, **_: Any) -> Any:
        self.routed.append((topk_weights, topk_ids))
        return x

    def apply(self, layer: Any, x: Any, topk_weights: Any, topk_ids: Any, **_: Any) -> Any:
        return self.forward_modular(x, topk_weights, topk_ids)

    def forward_monolithic(self, x: Any, router_logits: Any, **_: Any) -> Any:
        self.routed.append((router_logits, router_logits))
        return x

    def apply_monolithic(self, layer: Any, x: Any, router_logits: Any, **_: Any) -> Any:
        return self.forward_monolithic(x, router_logits)

    def _ensure_moe_quant_config_init(self) -> None: ...

    ensure_moe_quant_config_init = _ensure_moe_quant_config_init


def make_runner(gate: Any, router: Any, indices: torch.dtype | None = None, **config: Any) -> Any:
    cls = importlib.import_module(MOE_RUNNER).MoERunner
    runner = cls.__new__(cls)
    nn.Module.__init__(runner)
    parallel = SimpleNamespace(use_all2all_kernels=config.pop("all2all", False))
    runner.moe_config = SimpleNamespace(
        **{
            "dp_size": 1,
            "pcp_size": 1,
            "is_sequence_parallel": False,
            "moe_parallel_config": parallel,
            **config,
        }
    )
    runner.router, runner.gate, runner.layer_name = router, gate, "model.layers.3.mlp.experts"
    runner._fse_fuse_gate, runner._shared_experts = False, None
    experts = Experts(indices)
    if "routed_experts" in inspect.signature(cls.__init__).parameters:
        runner.routed_experts = experts
    else:
        runner._quant_method = experts
        router.indices_type_getter = lambda: indices
    runner.experts_stand_in = experts
    return runner


@contextlib.contextmanager
def context(is_padding: torch.Tensor | None = None) -> Iterator[None]:
    from vllm.forward_context import override_forward_context

    with override_forward_context(SimpleNamespace(dp_metadata=None, is_padding=is_padding)):
        yield


def run_layer(
    runner: Any, x: torch.Tensor, logits: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The body of the opaque op; weights and ids in the order of the ids."""
    layer = (
        ()
        if "layer" not in inspect.signature(type(runner)._forward_impl).parameters
        else (runner.experts_stand_in,)
    )
    experts = runner.experts_stand_in
    runner._forward_impl(*layer, x, x if logits is None else logits, None)
    weights, ids = experts.routed.pop()
    assert not experts.routed
    order = ids.argsort(dim=-1)
    return weights.gather(-1, order), ids.gather(-1, order)


# ---- What is compared ----


def activations(tokens: int) -> torch.Tensor:
    """One channel a row: its logits are that channel of the gate, exactly, in any order of summation."""
    rng = torch.Generator().manual_seed(tokens)
    x = torch.zeros(tokens, 2 * HIDDEN, dtype=BF16)[:, :HIDDEN]
    channels = torch.randint(HIDDEN, (tokens,), generator=rng)
    x[torch.arange(tokens), channels] = torch.tensor([0.5, 1.0, 2.0])[torch.arange(tokens) % 3].to(BF16)
    return x


class Case:
    """One layer, made twice from the same numbers: to be run before and after the plugin comes."""

    def __init__(self, name: str, gate: dict[str, Any], router: dict[str, Any], **runner: Any) -> None:
        self.name, self._gate, self._router, self._runner = name, gate, router, runner
        self.experts = router["experts"]
        self.hooked = runner.pop("hooked", True)
        self.is_padding = runner.pop("is_padding", None)
        self.logits_outside = runner.pop("logits_outside", False)
        self.monolithic = runner.pop("monolithic", False)
        self.want: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def make(self) -> Any:
        router = dict(self._router)
        make = make_topk_router if router.pop("plain", False) else make_router
        gate = make_gate(self.experts, **self._gate)
        runner = make_runner(gate, make(**router), **self._runner)
        runner.experts_stand_in.is_monolithic = self.monolithic
        if self.logits_outside:
            runner.gate, runner.outside = None, [gate]
        return runner

    def run(self, runner: Any, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = activations(tokens)
        with context(None if self.is_padding is None else self.is_padding[:tokens]):
            logits = runner.outside[0](x)[0] if self.logits_outside else None
            return run_layer(runner, x, logits)


def make_topk_router(experts: int, **options: Any) -> Any:
    cls = importlib.import_module(TOPK_ROUTER).FusedTopKRouter
    given = {"top_k": 4, "renormalize": False, "scoring_func": "softmax", **options}
    return cls(global_num_experts=experts, **given)


TOKENS = (1, 5, 32, 33)
PADDING = torch.arange(64) % 4 == 3


def cases(newest: bool) -> list[Case]:
    fp32 = {"out_dtype": torch.float32}
    half = torch.float16
    unbiased = {"e_score_correction_bias": None}
    bf16_bias = {"e_score_correction_bias": nn.Parameter(torch.randn(32).bfloat16())}
    found = [
        Case("bf16 logits", {}, {"experts": 32}),
        Case("fp32 logits", fp32, {"experts": 64, "routed_scaling_factor": 1.0}),
        Case("fp32 gate", {"dtype": torch.float32, **fp32}, {"experts": 32}, indices=torch.int32),
        Case("int64 indices", fp32, {"experts": 64, "groups": 8, "kept": 4}, indices=torch.int64),
        Case("all groups", {}, {"experts": 64, "groups": 4, "kept": 4, "renormalize": False}),
        Case("no bias", {}, {"experts": 32, **unbiased}),
        Case("softmax", fp32, {"experts": 64, "scoring_func": "softmax", **unbiased}),
        Case("plain softmax", {}, {"experts": 64, "plain": True}),
        Case("monolithic", {}, {"experts": 32}, hooked=False, monolithic=True),
        Case("gate outside", {}, {"experts": 32}, hooked=False, logits_outside=True),
        Case("best of groups", fp32, {"experts": 64, "groups": 8, "kept": 3, **unbiased}),
        Case("odd groups", fp32, {"experts": 60, "groups": 7, "kept": 3}, hooked=False),
        Case("few experts", fp32, {"experts": 7}, hooked=False),
        Case("fp16 logits", {"dtype": half, "out_dtype": half}, {"experts": 32}, hooked=False),
        Case("bf16 bias", fp32, {"experts": 32, **bf16_bias}, hooked=False),
        Case("sequence parallel", {}, {"experts": 32}, hooked=False, is_sequence_parallel=True),
        Case("all2all", {}, {"experts": 32}, hooked=False, all2all=True),
    ]  # fmt: skip
    if newest:
        found += [
            Case("padding", fp32, {"experts": 32, "skip_padding": True}, is_padding=PADDING),
            Case("padding that is kept", fp32, {"experts": 32}, is_padding=PADDING),
        ]
    return found


@contextlib.contextmanager
def kernels_of_torch() -> Iterator[None]:
    """In place of vLLM's CUDA kernels, which compute in fp32 whatever the logits' dtype."""
    grouped, topk = importlib.import_module(GROUPED_ROUTER), importlib.import_module(TOPK_ROUTER)
    stock = grouped.grouped_topk, grouped.fused_topk_bias, topk.fused_topk
    uncompiled = inspect.unwrap(grouped.grouped_topk)

    def in_fp32(hidden_states: Any, gating_output: torch.Tensor, **options: Any) -> Any:
        return uncompiled(hidden_states=hidden_states, gating_output=gating_output.float(), **options)

    def plain(gating_output: torch.Tensor, topk: int, renormalize: bool, **_: Any) -> Any:
        weights, ids = gating_output.float().softmax(-1).topk(topk, dim=-1)
        return (weights / weights.sum(-1, keepdim=True) if renormalize else weights), ids.int(), ids

    def biased(
        gating_output: torch.Tensor, e_score_correction_bias: Any, topk: int, renormalize: bool, **_: Any
    ) -> Any:
        scores = gating_output.float().sigmoid()
        ids = (scores + e_score_correction_bias).topk(topk, dim=-1).indices
        weights = scores.gather(-1, ids)
        return (weights / weights.sum(-1, keepdim=True) if renormalize else weights), ids.int()

    grouped.grouped_topk, grouped.fused_topk_bias, topk.fused_topk = in_fp32, biased, plain
    try:
        yield
    finally:
        grouped.grouped_topk, grouped.fused_topk_bias, topk.fused_topk = stock


def check_same(case: Case, tokens: int, got: tuple[torch.Tensor, torch.Tensor]) -> None:
    where = f"{case.name}, {tokens} tokens"
    want_weights, want_ids = case.want[tokens]
    assert got[1].dtype == want_ids.dtype, where
    assert torch.equal(got[1], want_ids), where
    torch.testing.assert_close(
        got[0], want_weights, atol=1e-6, rtol=1e-5, msg=lambda text: f"{where}: {text}"
    )


def run() -> None:
    """Stock first; then the flag comes into this process, whose modules are imported and stock."""
    from vllm_hotpath.plugin import register

    newest = K3_MODEL in modules()
    every = cases(newest)
    with kernels_of_torch():
        for case in every:
            runner = case.make()
            for tokens in TOKENS:
                case.want[tokens] = case.run(runner, tokens)
        os.environ[FLAG] = "1"
        register()
        for case in every:
            check_case(case)
        check_derived_logits()
        check_errors()
        if newest:
            check_k3()
            check_through_the_dispatcher()


def check_case(case: Case) -> None:
    runner = case.make()
    for tokens in TOKENS:
        with counted("moe_router") as calls:
            check_same(case, tokens, case.run(runner, tokens))
        assert len(calls) == int(case.hooked and tokens <= 32), f"{case.name}, {tokens} tokens"
    gate = runner.outside[0] if case.logits_outside else runner.gate
    assert ("forward" in vars(gate)) == case.hooked, case.name


def check_derived_logits() -> None:
    """Logits that are not the gate's own tensor any more are selected from by vLLM."""
    runner = Case("", {"out_dtype": torch.float32}, {"experts": 32}).make()
    x = activations(5)
    with context():
        run_layer(runner, x)
        logits, _ = runner.gate(x)
        routed = runner.router._compute_routing(x, logits, None)
        assert routed[1].data_ptr() != runner.router._compute_routing(x, logits.clone(), None)[1].data_ptr()
        assert routed[1].data_ptr() == runner.router._compute_routing(x, logits, None)[1].data_ptr()
        # Neither are another layer's.
        other = make_router(32, e_score_correction_bias=-runner.router.e_score_correction_bias)
        assert not torch.equal(other._compute_routing(x, logits, None)[1], routed[1])
        torch.testing.assert_close(logits, x.float() @ runner.gate.weight.float().T)


def check_errors() -> None:
    runner = Case("", {}, {"experts": 32}).make()
    x = activations(1)
    with context():
        run_layer(runner, x)
        runner.router.top_k = 0
        runner.gate.forward._op = _fail
        try:
            run_layer(runner, x)
        except ValueError as error:
            assert str(error) == "model.layers.3.mlp.experts: moe_router: top_k"  # noqa: PT017
        else:
            raise AssertionError("no error")


def _fail(*_: Any, **__: Any) -> None:
    raise ValueError("moe_router: top_k")


def make_k3(runner: Any, gate: Any, *, latent: bool = True, mega: bool = False) -> Any:
    k3 = importlib.import_module(K3_MODEL)
    layer = k3.KimiMoE.__new__(k3.KimiMoE)
    nn.Module.__init__(layer)
    layer.gate, layer.experts, layer.use_mega_moe = gate, runner, mega
    layer.routed_expert_down_proj = None
    if latent:
        layer.routed_expert_down_proj = lambda x: (x[:, :8] * 2, None)
        layer._down_proj_events, layer._down_proj_stream = (None, None), None
    return layer


def check_k3() -> None:
    """Kimi-K3's layer: the gate reads the un-projected rows, the runner gets the latent ones."""
    for latent in (False, True):
        case = Case("Kimi-K3", {"out_dtype": torch.float32}, {"experts": 32}, logits_outside=True)
        runner = case.make()
        gate = runner.outside[0]
        layer = make_k3(runner, gate, latent=latent)
        for tokens in TOKENS:
            x = activations(tokens)
            with context(), counted("moe_router") as calls:
                rows, logits, _ = layer._maybe_overlap_router_and_down_proj(x)
                assert rows.shape[1] == (8 if latent else HIDDEN)
                runner._forward_impl(rows, logits, x)
                assert len(calls) == int(tokens <= 32)
                weights, ids = runner.experts_stand_in.routed.pop()
                want = runner.router._compute_routing(rows, logits.clone(), None)
            order, wanted = ids.argsort(-1), want[1].argsort(-1)
            assert torch.equal(ids.gather(-1, order), want[1].gather(-1, wanted))
            torch.testing.assert_close(weights.gather(-1, order), want[0].gather(-1, wanted))


def check_through_the_dispatcher() -> None:
    """What the gate has selected reaches a runner behind a custom op: Kimi-K3's is applied before it."""
    library = torch.library.Library("vllm_hotpath_test", "DEF")
    seen = []

    def through(logits: torch.Tensor) -> torch.Tensor:
        seen.append(getattr(logits, "_vllm_hotpath_routed", None))
        return logits.clone()

    library.define("through(Tensor logits) -> Tensor")
    library.impl("through", through, "CPU")
    with torch.inference_mode():
        logits = torch.ones(3)
        logits._vllm_hotpath_routed = mark = object()  # type: ignore[attr-defined]
        torch.ops.vllm_hotpath_test.through(logits)
    assert seen == [mark]
