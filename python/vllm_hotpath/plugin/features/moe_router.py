"""The gate of a MoE layer and its selection of experts in one launch, for few tokens.

The gate's call gives the logits, as ever, and with them the experts that the same launch has selected; they
travel as an attribute of the logits' tensor. The router's ``_compute_routing`` takes them from there, if the
logits that it is given are that very tensor. Logits that were gathered, cast or sliced in between, or that
something else reads, are simply logits. What vLLM does around ``_compute_routing`` (its capture of expert
ids, the dtype of the indices) stays vLLM's.

A gate is hooked per layer, when its runner runs for the first time: the checks of ``_reason`` decide by the
layer's configuration, those of ``_Gate`` by the call. Logits differ from cuBLAS's in the order of summation.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_hotpath import envs
from vllm_hotpath.plugin import moe_gate
from vllm_hotpath.plugin.plan import Feature, Patch, Plan
from vllm_hotpath.plugin.targets import Target

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

NAME = "moe_router"
_MOE = "vllm.model_executor.layers.fused_moe"
_K3_MODEL = "vllm.models.kimi_k3.nvidia.model"
_ROUTING = ("self, hidden_states, router_logits, indices_type, *, input_ids=None",)

RUNNER = moe_gate.RUNNER
GROUPED = Target(
    module=f"{_MOE}.router.grouped_topk_router",
    names=("GroupedTopKRouter._compute_routing",),
    signatures=_ROUTING,
    hashes={"ec1d048fb40e46d6": "0.33.0", "baf0bd61a688634a": "0.22.1"},
)
TOPK = Target(
    module=f"{_MOE}.router.fused_topk_router",
    names=("FusedTopKRouter._compute_routing",),
    signatures=_ROUTING,
    hashes={"7c4887985b02e931": "0.33.0 and 0.22.1"},
)
# Kimi-K3 and, in 0.33.0, Kimi-Linear apply the gate before the runner, beside the latent down projection.
K3_GATE = Target(
    module=_K3_MODEL,
    names=("KimiMoE._maybe_overlap_router_and_down_proj",),
    signatures=("self, hidden_states",),
    hashes={"4b99eabca7af478d": "0.33.0"},
)

# Attribute of a runner that has been looked at, and of the logits.
_SEEN = "_vllm_hotpath_router_seen"
_ROUTED = "_vllm_hotpath_routed"


class _Routed(NamedTuple):
    """What was selected along with the logits, for the one router that it was selected for."""

    router: Any
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor


# ---- Which layers ----


def _reason(runner: Any, gate: Any) -> str:
    """Why a layer keeps vLLM's gate and selection; empty if it does not."""
    from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
    from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter

    if reason := moe_gate.reason(runner, gate):
        return reason
    router = runner.router
    if runner._quant_method.is_monolithic:
        return "its kernel selects the experts itself"
    if type(router) not in {GroupedTopKRouter, FusedTopKRouter}:
        return f"its router is a {type(router).__name__}"
    if router.eplb_state is not None:
        return "EPLB moves its experts"
    return _reason_of_numbers(router, gate)


def _reason_of_numbers(router: Any, gate: Any) -> str:
    import torch
    from vllm import envs as vllm_envs

    from vllm_hotpath.ops import is_supported

    if vllm_envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT=1"
    if not getattr(vllm_envs, "VLLM_USE_FUSED_MOE_GROUPED_TOPK", True):
        return "VLLM_USE_FUSED_MOE_GROUPED_TOPK=0"
    weight, bias = gate.weight, getattr(router, "e_score_correction_bias", None)
    if reason := moe_gate.weight_reason(gate, {torch.bfloat16, torch.float32}):
        return reason
    if weight.dtype == torch.float32 and moe_gate.out_dtype(gate) != torch.float32:
        return "its gate weight is fp32, its logits are not"
    experts, hidden = weight.shape
    groups, _ = _groups(router)
    if hidden % 8 or router.top_k > experts:
        return f"{experts} experts in {groups} groups, top {router.top_k}, of {hidden} channels"
    if groups > 1 and (experts <= groups or experts % groups):
        return f"{experts} experts do not make {groups} groups"
    if groups > 1 and router.top_k > experts // groups * router.topk_group:
        return f"top {router.top_k} of {router.topk_group} groups of {experts // groups} experts"
    if bias is not None and (
        bias.dtype != torch.float32 or bias.shape != (experts,) or not bias.is_contiguous()
    ):
        return f"its bias is {bias.dtype} {tuple(bias.shape)}"
    if router.scoring_func not in {"sigmoid", "softmax"}:
        return f"its scores are {router.scoring_func}"
    if getattr(router, "num_fused_shared_experts", 0):
        return "shared experts are among its experts"
    support = is_supported(NAME, weight.device, experts=experts, top_k=router.top_k, n_group=groups)
    return "" if support.ok else support.reason


def _groups(router: Any) -> tuple[int, int]:
    """Groups, and how many of them are kept. Where all are, there are none to choose."""
    groups, kept = getattr(router, "num_expert_group", 1) or 1, getattr(router, "topk_group", 1) or 1
    return (1, 1) if kept >= groups else (groups, kept)


# ---- The gate ----


class _Gate(moe_gate.Gate):
    def __init__(self, runner: Any, gate: Any) -> None:
        from vllm_hotpath.ops.moe_router import MAX_TOKENS, moe_router

        super().__init__(runner, gate)
        self._op, self._max_tokens, self._router = moe_router, MAX_TOKENS, runner.router

    def __call__(self, x: torch.Tensor) -> Any:
        import torch

        if not self.takes(x, self._max_tokens):
            return self.stock(x)
        router, weight = self._router, self.gate.weight
        tokens, top_k = x.shape[0], router.top_k
        logits = torch.empty(tokens, weight.shape[0], dtype=self.logits_dtype(tokens), device=x.device)
        # One buffer, so that one launch can take the padding rows out of both.
        chosen = torch.empty(2, tokens, top_k, dtype=torch.int32, device=x.device)
        topk_weights, topk_ids = chosen[0].view(torch.float32), chosen[1]
        groups, kept = _groups(router)
        try:
            self._op(
                x,
                weight,
                top_k=top_k,
                bias=getattr(router, "e_score_correction_bias", None),
                n_group=groups,
                topk_group=kept,
                scoring=router.scoring_func,
                renormalize=router.renormalize,
                routed_scaling_factor=getattr(router, "routed_scaling_factor", 1.0),
                logits_dtype=logits.dtype,
                out_logits=logits,
                topk_weights=topk_weights,
                topk_ids=topk_ids,
            )
        except moe_gate.OP_ERRORS as error:
            moe_gate.raise_named(error, self.layer_name)
        _take_padding_out(router, chosen)
        setattr(logits, _ROUTED, _Routed(router, topk_weights, topk_ids))
        return self.result(logits)


def _take_padding_out(router: Any, chosen: torch.Tensor) -> None:
    """Expert -1 with weight 0 for the rows that pad a CUDA graph's batch, where stock does the same."""
    from vllm import envs as vllm_envs
    from vllm.forward_context import get_forward_context, is_forward_context_available

    # A router without the option masks if vLLM has a mask.
    if not getattr(router, "skip_padding", True) or not getattr(vllm_envs, "VLLM_MOE_SKIP_PADDING", False):
        return
    mask = getattr(get_forward_context(), "is_padding", None) if is_forward_context_available() else None
    if mask is None:
        return
    import torch

    mask = mask[: chosen.shape[1]].view(1, -1, 1)
    fill = _padding_fill(chosen.device)
    if fill is None:
        chosen[0].masked_fill_(mask[0], 0)
        chosen[1].masked_fill_(mask[0], -1)
    else:
        torch.where(mask, fill, chosen, out=chosen)


_fills: dict[torch.device, torch.Tensor] = {}


def _padding_fill(device: torch.device) -> torch.Tensor | None:
    """Bits of weight 0 and id -1. None where it would have to be made inside a CUDA graph."""
    import torch

    if device not in _fills:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        _fills[device] = torch.arange(0, -2, -1, dtype=torch.int32, device=device).view(2, 1, 1)
    return _fills[device]


# ---- What is patched ----

_say = moe_gate.Notices(NAME)


def _hook(runner: Any, gate: Any) -> None:
    setattr(runner, _SEEN, True)
    moe_gate.hook(runner, gate, _reason, _Gate, _say)


def _runner(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _forward_impl(self: Any, *arguments: Any, **options: Any) -> Any:
        if not hasattr(self, _SEEN):
            _hook(self, self.gate)
        return original(self, *arguments, **options)

    return _forward_impl


def _k3_gate(original: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    @functools.wraps(original)
    def _maybe_overlap_router_and_down_proj(self: Any, hidden_states: torch.Tensor) -> Any:
        # MegaMoE selects by itself, from these logits.
        if not (torch.compiler.is_compiling() or self.use_mega_moe or hasattr(self.experts, _SEEN)):
            _hook(self.experts, self.gate)
        return original(self, hidden_states)

    return _maybe_overlap_router_and_down_proj


def _routing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _compute_routing(
        self: Any,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: torch.Tensor | None = None,
    ) -> Any:
        routed = getattr(router_logits, _ROUTED, None)
        if routed is None or routed.router is not self:
            return original(self, hidden_states, router_logits, indices_type, input_ids=input_ids)
        return routed.topk_weights, routed.topk_ids

    return _compute_routing


def _plan(environ: Mapping[str, str]) -> Plan | None:
    if not envs.read(envs.MOE_ROUTER, environ):
        return None
    return Plan(
        (
            Patch(RUNNER, _runner),
            Patch(GROUPED, _routing),
            Patch(TOPK, _routing),
            Patch(K3_GATE, _k3_gate, optional=True),
        )
    )


MOE_ROUTER = Feature(NAME, (envs.MOE_ROUTER,), _plan)
