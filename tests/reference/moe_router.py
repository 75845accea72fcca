"""What ``moe_router`` must return: logits in fp64, and the selection rule by rule, a token after the other.

The selection starts from the fp32 scores that the op has for a logit: those are a function of the logit alone
and compared with fp64 by themselves, so that ids need no tolerance.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch


class Options(NamedTuple):
    top_k: int
    bias: torch.Tensor | None = None
    n_group: int = 1
    topk_group: int = 1
    scoring: str = "sigmoid"
    renormalize: bool = True
    routed_scaling_factor: float = 1.0


class Routing(NamedTuple):
    ids: torch.Tensor
    weights: torch.Tensor
    """In fp64."""


def gate(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits in fp64, and the sums of the products' magnitudes, which bound the error of fp32 sums."""
    x, w = hidden.detach().double(), weight.detach().double()
    return x @ w.T, x.abs() @ w.abs().T


def scores(logits: torch.Tensor, scoring: str) -> torch.Tensor:
    """Sigmoid or softmax in fp64."""
    wide = logits.double()
    return torch.sigmoid(wide) if scoring == "sigmoid" else torch.softmax(wide, -1)


def is_general(options: Options, experts: int) -> bool:
    """Whether vLLM takes its kernel for all sizes, which has rules of its own; never for softmax scores."""
    if options.scoring == "softmax":
        return False
    if options.n_group == 1:
        return options.top_k > (22 if experts <= 512 else 16)
    size = experts // options.n_group
    return (
        experts > 256
        or size > 32
        or size * options.topk_group > 128
        or options.top_k > 8
        or options.topk_group > 4
    )


def _order(value: np.float32) -> tuple[bool, float]:
    """Sorts as the selection does: NaN above everything."""
    nan = math.isnan(value)
    return nan, 0.0 if nan else float(value)


def _best(values: dict[int, np.float32], count: int) -> list[int]:
    """Places of the largest values, best first; of equal values the lower place."""
    return sorted(values, key=lambda at: (tuple(-part for part in _order(values[at])), at))[:count]


def _round(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return torch.from_numpy(np.atleast_1d(values)).to(dtype).float().numpy()


def select(given: torch.Tensor, logits: torch.Tensor, options: Options) -> Routing:
    """Experts and weights of every token.

    Args:
        given: fp32 ``[M, E]``, the score of every logit.
        logits: ``[M, E]`` in the dtype that they are rounded to.
        options: of the call.
    """
    ids, weights = [], []
    for row, logit in zip(given.cpu().float(), logits.cpu(), strict=True):
        chosen, values = _select_row(row.numpy(), logit, options)
        ids.append(chosen)
        weights.append(values)
    shape = (len(ids), options.top_k)
    return Routing(
        torch.tensor(ids, dtype=torch.int32).view(shape),
        torch.tensor(weights, dtype=torch.float64).view(shape),
    )


def _select_row(score: np.ndarray, logit: torch.Tensor, options: Options) -> tuple[list[int], list[float]]:
    experts, k = len(score), options.top_k
    general = is_general(options, experts)
    bias = np.zeros(experts, np.float32)
    if options.bias is not None:
        bias = options.bias.detach().cpu().float().numpy()
    rounding = logit.dtype if general else torch.float32
    with np.errstate(all="ignore"):
        score = _round(score, rounding)
        sums = _round(score + _round(bias, rounding), rounding)
        if options.n_group == 1 and not general and options.scoring == "sigmoid":
            finite = torch.isfinite(logit).numpy() & np.isfinite(sums)
            score = np.where(finite, score, 0).astype(np.float32)
            if experts < 256:
                # There vLLM's kernel does not keep the score but subtracts the bias from the sum again.
                score = np.where(finite, sums - bias, 0).astype(np.float32)
            sums = np.where(finite, sums, -np.inf).astype(np.float32)
        allowed = np.full(experts, True)
        if general:
            sums = np.where(np.isnan(sums), -np.inf, sums).astype(np.float32)
            allowed = torch.isfinite(logit).numpy() & (sums > -np.inf)

        size = experts // options.n_group
        group_scores = {}
        for group in range(options.n_group):
            members = {i: sums[i] for i in range(group * size, (group + 1) * size)}
            two = [members[i] for i in _best(members, 2)]
            total = two[0]
            if options.bias is not None:
                total = two[0] + two[1] if len(two) == 2 else two[0] - np.float32(np.inf)
            group_scores[group] = _round(np.float32(total), rounding)[0]
    groups = _best(group_scores, options.topk_group)
    nothing = options.n_group == 1 and not general and (sums == -np.inf).all()
    if nothing:
        return list(range(k)), [1 / k if options.renormalize else 0.0] * k
    if general and any(group_scores[group] == -np.inf for group in groups):
        return list(range(k)), [1 / k] * k

    candidates = {
        i: sums[i] for group in groups for i in range(group * size, (group + 1) * size) if allowed[i]
    }
    chosen = _best(candidates, k)
    chosen += [0] * (k - len(chosen))
    values = [float(score[i]) for i in chosen]
    divisor = sum(values) + 1e-20 if options.renormalize else 1.0
    return chosen, [value * options.routed_scaling_factor / divisor for value in values]
