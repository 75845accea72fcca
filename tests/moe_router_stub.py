"""``moe_router`` of the contract in plain torch."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch

CALLS: list[dict[str, Any]] = []


def moe_router(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    *,
    top_k: int,
    bias: torch.Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    scoring: str = "sigmoid",
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
    logits_dtype: torch.dtype | None = None,
    out_logits: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    topk_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    CALLS.append({"x": hidden_states, "weight": gate_weight, "bias": bias, "top_k": top_k, "n_group": n_group})
    logits = (hidden_states.float() @ gate_weight.float().T).to(logits_dtype or gate_weight.dtype)
    if out_logits is not None:
        out_logits.copy_(logits)
    scores = logits.float().sigmoid() if scoring == "sigmoid" else logits.float().softmax(dim=-1)
    keys = scores if bias is None else scores + bias
    groups = keys.view(len(keys), n_group, -1)
    best = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1).topk(topk_group, dim=-1).indices
    kept = torch.zeros(groups.shape[:2], dtype=torch.bool).scatter(1, best, True)
    ids = groups.masked_fill(~kept[..., None], -torch.inf).flatten(1).topk(top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights * routed_scaling_factor
    if topk_weights is None or topk_ids is None:
        return weights, ids.int()
    return topk_weights.copy_(weights), topk_ids.copy_(ids)


def install() -> None:
    from vllm_hotpath import ops

    module = ModuleType("vllm_hotpath.ops.moe_router")
    module.moe_router = moe_router  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    ops.STEMS["moe_router"] = "moe_router"
