"""The router of a mixture of experts: gate and expert selection in one launch.

The public function and its torch op. Checks and kernels live in ``src/ops/moe_router``.
"""

from __future__ import annotations

import torch

from vllm_hotpath import _core
from vllm_hotpath.ops import allocate, limit, plain, register, through_dispatcher

MAX_TOKENS = 32
"""Tokens of a call. Above, the gate is a matrix product that cuBLAS does well."""

LOGITS_DTYPES: dict[torch.dtype | None, str] = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
"""Of a gate's logits, by their names in the extension."""


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
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route up to 32 tokens to experts, as DeepSeek-V3, Kimi-K2 and Kimi-K3 do, in one launch.

    For each token::

        logits = hidden @ gate_weight.T              # fp32 sums, rounded once to logits_dtype
        scores = sigmoid(logits) or softmax(logits)
        sums = scores + bias
        the topk_group groups of the best sum of their two best sums (without bias: of the best score)
        topk_ids = the top_k experts of the best sums in these groups; of equal sums, the lower expert
        topk_weights = scores[topk_ids]; renormalised to a sum of 1; times routed_scaling_factor

    Given the same logits, ids and weights of sigmoid scoring with a bias are those of vLLM 0.33.0's
    ``grouped_topk`` on the GPU, bit by bit with more than 128 experts; with one group of fewer, weights
    differ by one unit in the last place now and then. Logits that are not finite: in one group they come last
    with weight zero, in groups a NaN is above all others, and in large calls (groups of more than 32 experts,
    or more than 8 experts a token from groups, or more than 16 from one) they are never selected and scores
    and sums are rounded to ``logits_dtype`` in between (``docs/numerics.md`` has every rule, and where vLLM
    differs). A zero sum renormalises to zeros.

    ``M`` is the number of tokens, ``E`` that of experts, ``K`` the hidden size.

    Args:
        hidden_states: bf16 ``[M, K]``, ``M`` from 0 to 32, ``K`` a multiple of 8 up to
            2^30. Row stride free, column stride 1, any alignment; rows 16 bytes aligned are faster.
        gate_weight: bf16 or fp32 ``[E, K]``, ``E`` from 8 to 1024. Row stride free, column stride 1. Must
            not be written by the kernel that runs before in the stream: it is read early.
        top_k: experts a token, from 1 to 32 and at most ``topk_group * E / n_group``.
        bias: fp32 ``[E]``, contiguous; selects, but is not part of the weights. As ``gate_weight``, it is
            read early.
        n_group: groups of ``E / n_group`` consecutive experts, from 1 to 32.
        topk_group: groups that are selected from.
        scoring: ``"sigmoid"`` or ``"softmax"``.
        renormalize: divide a token's weights by their sum.
        routed_scaling_factor: of the weights.
        logits_dtype: ``torch.bfloat16`` or ``torch.float32``; None is the dtype of ``gate_weight``.
        out_logits: ``[M, E]`` of ``logits_dtype``, row stride free, column stride 1, for the logits.
        topk_weights: fp32 ``[M, top_k]``, contiguous. None allocates.
        topk_ids: int32 ``[M, top_k]``, contiguous. None allocates.
        workspace: int64, at least ``2 * M * E`` elements, contiguous, for CUDA; its contents do
            not matter before and after. None allocates from torch's pool.

    Returns:
        ``(topk_weights, topk_ids)``, best first. Without tokens nothing is launched.

    Raises:
        TypeError: a dtype that is not supported.
        ValueError: a shape, stride, alignment, device, overlap or option that is not supported; more than 32
            tokens (``is_supported("moe_router", device, tokens=M)`` says so beforehand).
        RuntimeError: CUDA refused the launch, or this build has no kernel for the GPU.
    """
    if logits_dtype is not None and not (
        isinstance(logits_dtype, torch.dtype) and logits_dtype in LOGITS_DTYPES
    ):
        raise TypeError(
            f"moe_router: logits_dtype: expected torch.bfloat16 or torch.float32, got {logits_dtype}"
        )
    if through_dispatcher(hidden_states, gate_weight, bias, out_logits, topk_weights, topk_ids, workspace):
        if topk_weights is None:
            shape = (hidden_states.shape[0], top_k)
            topk_weights = hidden_states.new_empty(shape, dtype=torch.float32)
        if topk_ids is None:
            shape = (hidden_states.shape[0], top_k)
            topk_ids = hidden_states.new_empty(shape, dtype=torch.int32)
        torch.ops.vllm_hotpath.moe_router(
            hidden_states,
            gate_weight,
            topk_weights,
            topk_ids,
            top_k,
            bias,
            n_group,
            topk_group,
            scoring,
            renormalize,
            routed_scaling_factor,
            logits_dtype,
            out_logits,
            workspace,
        )
        return topk_weights, topk_ids
    made: tuple[torch.Tensor, torch.Tensor] = _core.moe_router(
        hidden_states,
        gate_weight,
        top_k,
        bias,
        n_group,
        topk_group,
        scoring,
        renormalize,
        routed_scaling_factor,
        LOGITS_DTYPES.get(logits_dtype),
        out_logits,
        topk_weights,
        topk_ids,
        workspace,
        allocate,
    )
    return made


def _moe_router(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    top_k: int,
    bias: torch.Tensor | None,
    n_group: int,
    topk_group: int,
    scoring: str,
    renormalize: bool,
    routed_scaling_factor: float,
    logits_dtype: torch.dtype | None,
    out_logits: torch.Tensor | None,
    workspace: torch.Tensor | None,
) -> None:
    _core.moe_router(
        plain(hidden_states),
        plain(gate_weight),
        top_k,
        plain(bias),
        n_group,
        topk_group,
        scoring,
        renormalize,
        routed_scaling_factor,
        None if logits_dtype is None else LOGITS_DTYPES.get(logits_dtype, str(logits_dtype)),
        plain(out_logits),
        plain(topk_weights),
        plain(topk_ids),
        plain(workspace),
        allocate,
    )


def _fake_moe_router(*arguments: object) -> None:
    pass


limit("moe_router", tokens=(0, MAX_TOKENS), experts=(8, 1024), top_k=(1, 32), n_group=(1, 32))

register(
    "moe_router",
    "(Tensor hidden_states, Tensor gate_weight, Tensor(a!) topk_weights, Tensor(b!) topk_ids, int top_k, "
    "Tensor? bias, int n_group, int topk_group, str scoring, bool renormalize, float routed_scaling_factor, "
    "ScalarType? logits_dtype, Tensor(c!)? out_logits, Tensor(d!)? workspace) -> ()",
    _moe_router,
    _fake_moe_router,
)
