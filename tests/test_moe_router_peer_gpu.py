"""``moe_router`` on a GPU beside vLLM's ``grouped_topk`` and cuBLAS logits."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.helpers import BF16, SEED, as_bits
from tests.moe_router_cases import (
    FORMS,
    FP32,
    INF,
    NAN,
    Call,
    call_of_logits,
    make_call,
)
from tests.reference import moe_router as reference
from vllm_hotpath.bench import peers

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.gpu("moe_router")

ROOT = Path(__file__).parents[1]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
# Experts, top_k, n_group, topk_group.
SIZES = (
    (384, 8, 1, 1),
    (256, 8, 8, 4),
    (896, 16, 1, 1),
    (256, 8, 1, 1),
    (512, 22, 1, 1),
    (896, 8, 1, 1),
    (384, 9, 1, 1),
    (384, 24, 1, 1),
    (640, 20, 1, 1),
    (64, 6, 1, 1),
    (72, 6, 1, 1),
    (8, 2, 1, 1),
    (128, 8, 1, 1),
    (120, 12, 1, 1),
    (160, 8, 1, 1),
    (255, 8, 1, 1),
    (200, 22, 1, 1),
    (256, 16, 1, 1),
    (128, 4, 8, 2),
    (160, 6, 8, 3),
    (256, 8, 4, 2),
    (256, 12, 8, 5),
    (512, 8, 16, 4),
    (1024, 32, 1, 1),
)
# Called by the models; the peer has to take them.
MODEL_SIZES = SIZES[:4]
SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, 30.0, -30.0, 90.0, -200.0, 3e38, 1e-40, INF, -INF, NAN)


def _peer() -> Callable[..., Any]:
    op = peers.op("_moe_C", "grouped_topk")
    if op is None:
        pytest.skip(f"no _moe_C::grouped_topk to compare with: {peers.load().problem or peers.load().label}")
    return op


def _assert_equals_peer(call: Call) -> bool:
    """Ids and weights are those of vLLM's kernel; False if that does not take the sizes."""
    call = call.with_outputs()
    weights, ids = call.run()
    arguments = ("n_group", "topk_group", "top_k", "renormalize", "routed_scaling_factor", "bias")
    try:
        want = _peer()(call["out_logits"], *[call[name] for name in arguments], 1)
    except RuntimeError:
        return False
    theirs_weights, theirs_ids = want
    differ = (ids != theirs_ids).any(1)
    if differ.any():
        row = int(differ.nonzero()[0, 0])
        raise AssertionError(
            f"row {row} of {call.options[2:]} {call.shape}: ids {ids[row].tolist()}, peer "
            f"{theirs_ids[row].tolist()}; logits {call['out_logits'][row].tolist()}, "
            f"bias {call['bias'].tolist()} (HOTPATH_TEST_SEED={SEED})"
        )
    same = (as_bits(weights) == as_bits(theirs_weights)) | (weights.isnan() & theirs_weights.isnan())
    assert same.all(), f"weights {weights[~same][:4].tolist()}, peer {theirs_weights[~same][:4].tolist()}"
    return True


@pytest.mark.parametrize("logits", [BF16, FP32], ids=str)
@pytest.mark.parametrize(("experts", "top_k", "n_group", "topk_group"), SIZES)
def test_random_logits_route_as_vllm_routes_them(
    experts: int, top_k: int, n_group: int, topk_group: int, logits: torch.dtype, rng: torch.Generator
) -> None:
    sizes = {"experts": experts, "top_k": top_k, "n_group": n_group, "topk_group": topk_group}
    taken = [
        _assert_equals_peer(
            make_call(
                CUDA,
                rng,
                hidden=64,
                tokens=tokens,
                logits=logits,
                spread=spread,
                scaling=scaling,
                renormalize=renormalize,
                **sizes,
            )
        )
        for tokens in (1, 8, 13, 32)
        for spread in (0.1, 2.0, 12.0)
        for scaling in (1.0, 2.827)
        for renormalize in (True, False)
    ]
    assert all(taken) or (tuple(sizes.values()) not in MODEL_SIZES and not any(taken))


@pytest.mark.parametrize("logits", [BF16, FP32], ids=str)
@pytest.mark.parametrize(("experts", "top_k", "n_group", "topk_group"), SIZES)
def test_awkward_logits_route_as_vllm_routes_them(
    experts: int, top_k: int, n_group: int, topk_group: int, logits: torch.dtype, rng: torch.Generator
) -> None:
    """Ties, infinities and NaN, few and many of them.

    No bias excludes whole groups: the peer would return an expert several times.
    """

    def some(values: tuple[float, ...]) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(len(values), (experts,), generator=rng)]

    sizes = {"top_k": top_k, "n_group": n_group, "topk_group": topk_group}
    finite, special = SPECIAL[:11], SPECIAL
    if n_group > 1 and experts // n_group == 32 and (experts, top_k, n_group, topk_group) not in MODEL_SIZES:
        # Where a group is a warp's width, the peer's general kernel lets a NaN's place decide.
        special = SPECIAL[:-1]
    cases = [
        (torch.full((experts,), value), torch.full((experts,), bias))
        for value in (0.0, 1.0, -200.0, 90.0, INF, -INF, NAN)
        for bias in (0.0, 0.5, -3.0)
    ]
    for values in (finite, special, (1.0, -1.0), (1.0, special[-1]), (INF, 1.0), (-INF, 2.0)):
        for biases in ((0.0,), (0.0, 0.25, -0.5), (11.0, 11.0 + 2.0**-20), (0.0, -INF)):
            cases += [(some(values), some(biases)) for _ in range(4)]
    sparse = torch.full((experts,), -INF)
    for count in (0, 1, 2, top_k - 1, top_k):
        few = sparse.clone()
        few[torch.randperm(experts, generator=rng)[:count]] = 1.5
        cases.append((few, torch.zeros(experts)))
        poor = torch.randn(experts, generator=rng)
        poor[few == -INF] = special[-1]
        cases.append((poor, torch.zeros(experts)))
    factors = (1.0, 0.5, 1.0, -1.0)
    for values, bias in cases:
        call = call_of_logits(
            values, CUDA, bias=bias, factors=factors, dtype=logits, routed_scaling_factor=2.5, **sizes
        )
        taken = _assert_equals_peer(call)
        assert taken or (experts, top_k, n_group, topk_group) not in MODEL_SIZES


@pytest.mark.parametrize("name", ["kimi k2.6", "deepseek v3", "kimi k3", "kimi linear"])
def test_ids_are_those_of_cublas_logits_up_to_near_ties(name: str, rng: torch.Generator) -> None:
    form = dataclasses.replace(FORMS[name], tokens=32)
    differing = rows = 0
    for _ in range(12):
        call = make_call(CUDA, rng, form)
        for _ in range(16):
            hidden = torch.randn(32, form.hidden, device=CUDA).to(BF16)
            call.args["hidden_states"] = hidden
            _, ids = call.run()
            if call.logits_dtype == FP32:
                logits = torch.mm(hidden, call["gate_weight"].T, out_dtype=FP32)
            else:
                logits = torch.nn.functional.linear(hidden, call["gate_weight"])
            # The same selection of cuBLAS logits.
            weight = torch.zeros(form.experts, 32, device=CUDA)
            weight.copy_(logits.T)
            exact = call.changed(
                hidden_states=torch.eye(32, dtype=BF16, device=CUDA),
                gate_weight=weight,
                logits_dtype=call.logits_dtype,
            )
            _, want = exact.run()
            differ = (ids != want).any(1)
            differing += int(differ.sum())
            rows += 32
            if not differ.any():
                continue
            true, _ = reference.gate(hidden[differ], call["gate_weight"])
            sums = torch.sigmoid(true) + call["bias"]
            here, there = (sums.gather(1, one[differ].long()) for one in (ids, want))
            # A logit moves by at most one step, its score by at most a quarter of that.
            step = 2.0**-7 if call.logits_dtype == BF16 else 2.0**-18
            margin = step * true.abs().amax(1, keepdim=True) * 0.5
            if form.n_group > 1:
                margin = margin * 2
            changed = ids[differ] != want[differ]
            assert ((here - there).abs() <= margin)[changed].all()
    assert differing <= rows / 1000, f"{differing} of {rows} rows differ"
