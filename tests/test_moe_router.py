"""``moe_router`` against the reference: logits within a rounding of fp64, ids exact, weights within a few."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st

import vllm_hotpath
from tests.helpers import BF16, SEED, assert_same_bits
from tests.moe_router_cases import (
    FORMS,
    FP32,
    INF,
    LAYOUTS,
    NAN,
    Form,
    assert_routing,
    call_of_logits,
    check,
    make_call,
    scores_of,
    workspace_elements,
)
from tests.reference import moe_router as reference
from tests.reference.moe_router import Options

EXPERTS = (8, 9, 31, 32, 33, 64, 77, 128, 255, 256, 257, 383, 384, 385, 512, 513, 777, 896, 1000, 1024)
# What vLLM has kernels for: one group, groups as DeepSeek-V3's, and any sizes.
SINGLE = {"top_k": 8}
GROUPED = {"top_k": 8, "n_group": 4, "topk_group": 4}
GENERAL = {"top_k": 23}
KINDS = pytest.mark.parametrize("sizes", [SINGLE, GROUPED, GENERAL], ids=["single", "grouped", "general"])
# More than the 32 lanes of a warp, and its last slot not full.
SOME = 45


@pytest.mark.parametrize("name", list(FORMS))
def test_every_form(name: str, device: torch.device, rng: torch.Generator) -> None:
    check(make_call(device, rng, FORMS[name]))


@pytest.mark.parametrize("experts", EXPERTS)
def test_every_number_of_experts(experts: int, device: torch.device, rng: torch.Generator) -> None:
    for hidden, weight in ((8, BF16), (24, FP32), (512, BF16), (1032, FP32)):
        top_k = int(torch.randint(1, min(experts, 32) + 1, (), generator=rng))
        for logits in (BF16, FP32):
            check(
                make_call(
                    device, rng, experts=experts, hidden=hidden, weight=weight, logits=logits, top_k=top_k
                )
            )


@pytest.mark.parametrize("weight", [BF16, FP32], ids=str)
@pytest.mark.parametrize("hidden", [8, 16, 24, 32, 40, 248, 264, 1000, 2056, 2304, 7168, 8192])
def test_every_hidden_size(
    hidden: int, weight: torch.dtype, device: torch.device, rng: torch.Generator
) -> None:
    for tokens in (1, 9, 32):
        check(make_call(device, rng, tokens=tokens, experts=SOME, hidden=hidden, weight=weight))


@pytest.mark.parametrize("weight", [BF16, FP32], ids=str)
def test_every_number_of_tokens(weight: torch.dtype, device: torch.device, rng: torch.Generator) -> None:
    for tokens in range(33):
        check(make_call(device, rng, tokens=tokens, experts=SOME, hidden=264, weight=weight))


@pytest.mark.parametrize("weight", [BF16, FP32], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_row_stride_and_base(
    layout: str, weight: torch.dtype, device: torch.device, rng: torch.Generator
) -> None:
    for hidden_layout, weight_layout in ((layout, "contiguous"), ("contiguous", layout), (layout, layout)):
        for tokens in (1, 5, 12, 31):
            form = Form(tokens=tokens, experts=SOME, hidden=136, weight=weight)
            layouts = {"hidden_layout": hidden_layout, "weight_layout": weight_layout}
            check(make_call(device, rng, form, **layouts))


def test_every_top_k(device: torch.device, rng: torch.Generator) -> None:
    for top_k in range(1, 33):
        for experts, logits in ((32, BF16), (100, FP32), (640, BF16)):
            check(make_call(device, rng, experts=experts, hidden=64, top_k=top_k, logits=logits))


def test_every_group_size(device: torch.device, rng: torch.Generator) -> None:
    for experts in (8, 96, 256, 384, 1024):
        for n_group in (group for group in range(1, 33) if experts % group == 0):
            topk_group = int(torch.randint(1, n_group + 1, (), generator=rng))
            most = min(32, experts // n_group * topk_group)
            for top_k in {1, min(8, most), most}:
                groups = {"n_group": n_group, "topk_group": topk_group, "top_k": top_k}
                for bias in (True, False):
                    check(make_call(device, rng, tokens=2, experts=experts, hidden=32, bias=bias, **groups))


def test_all_experts_may_be_selected(device: torch.device, rng: torch.Generator) -> None:
    for experts in (8, 13, 22, 32):
        _, ids = check(make_call(device, rng, experts=experts, hidden=64, top_k=experts))
        assert torch.equal(ids.sort().values.cpu(), torch.arange(experts, dtype=torch.int32).expand(3, -1))


def test_renormalised_weights_sum_to_the_scaling(device: torch.device, rng: torch.Generator) -> None:
    for name in ("kimi k2.6", "deepseek v3", "many with bf16 logits"):
        weights, _ = make_call(device, rng, FORMS[name]).run()
        want = torch.full((3,), FORMS[name].scaling, dtype=torch.float64)
        torch.testing.assert_close(weights.double().sum(1).cpu(), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("scaling", [0.0, 1.0, 2.827, -1.5, 1e-30, 1e30, 1 / 3])
def test_every_scaling(scaling: float, device: torch.device, rng: torch.Generator) -> None:
    for renormalize, top_k in itertools.product((True, False), (8, 23)):
        check(make_call(device, rng, scaling=scaling, renormalize=renormalize, top_k=top_k))


@KINDS
def test_bias_selects_and_is_no_part_of_the_weights(
    sizes: dict[str, int], device: torch.device, rng: torch.Generator
) -> None:
    order = torch.randperm(48, generator=rng)
    bias = torch.empty(48)
    bias[order] = torch.arange(48, 0, -1).float() * 2
    logits = torch.randn(48, generator=rng)
    call = call_of_logits(logits, device, bias=bias, renormalize=False, **sizes)
    weights, ids = check(call)
    k = sizes["top_k"]
    assert ids[0].tolist() == order[:k].tolist()
    want = torch.sigmoid(logits[order[:k]].double())
    # In one group of so few experts the weight is what the sum, here up to 97, has kept of the score.
    atol = 2.0**-18 if sizes == SINGLE else 2.0**-23
    torch.testing.assert_close(weights[0].double().cpu(), want, rtol=0, atol=atol)


@KINDS
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_of_equal_sums_the_lower_expert_wins(
    dtype: torch.dtype, sizes: dict[str, int], device: torch.device, rng: torch.Generator
) -> None:
    k = sizes["top_k"]
    for experts in (24, 32, 33, SOME, 128, 384, 1000):
        if experts % sizes.get("n_group", 1):
            continue
        for bias in (None, [0.25] * experts):
            call = call_of_logits([1.5] * experts, device, dtype=dtype, bias=bias, **sizes)
            weights, ids = check(call)
            assert ids[0].tolist() == list(range(k))
            torch.testing.assert_close(weights[0].cpu(), torch.full((k,), 1 / k))
        values = torch.tensor([-1.0, 0.5, 2.0])[torch.randint(3, (experts,), generator=rng)]
        check(call_of_logits(values, device, dtype=dtype, factors=(1.0, 0.5, -1.0), **sizes))


def test_rows_of_equal_weights_tie(device: torch.device, rng: torch.Generator) -> None:
    """Every expert there three times: their logits have the same bits wherever they are computed."""
    for experts, hidden, weight in ((48, 512, BF16), (384, 7168, BF16), (96, 512, FP32)):
        form = Form(experts=experts, hidden=hidden, weight=weight, bias=False, logits=FP32, spread=0.5)
        call = make_call(device, rng, form)
        rows = call["gate_weight"][torch.arange(experts, device=device) % (experts // 3)]
        _, ids = check(call.changed(gate_weight=rows, top_k=6))
        third = experts // 3
        want = torch.stack([ids[:, 0] + third * i for i in range(3)], 1)
        assert torch.equal(ids[:, :3], want)


@KINDS
def test_all_minus_infinity(sizes: dict[str, int], device: torch.device) -> None:
    """In one group there is nothing to select, in groups scores are zero, in general expert 0 fills up."""
    weights, ids = check(call_of_logits([-INF] * 64, device, **sizes), finite=False)
    k = sizes["top_k"]
    assert ids[0].tolist() == ([0] * k if sizes == GENERAL else list(range(k)))
    assert weights[0].tolist() == [1 / k if sizes == SINGLE else 0.0] * k


@KINDS
def test_a_zero_sum_renormalises_to_zeros(sizes: dict[str, int], device: torch.device) -> None:
    call = call_of_logits([-120.0] * 64, device, bias=[11.0 + i % 7 for i in range(64)], **sizes)
    weights, ids = check(call)
    assert weights[0].tolist() == [0.0] * sizes["top_k"]
    assert len(set(ids[0].tolist())) == sizes["top_k"]
    scaled = call.changed(renormalize=False, routed_scaling_factor=2.5)
    assert check(scaled)[0][0].tolist() == [0.0] * sizes["top_k"]


def test_nan_is_above_everything_in_groups_and_last_or_never_elsewhere(device: torch.device) -> None:
    logits = [0.1 * i for i in range(64)]
    logits[5] = logits[40] = NAN
    logits[50] = INF
    weights, ids = check(call_of_logits(logits, device, renormalize=False, **GROUPED), finite=False)
    assert ids[0].tolist() == [5, 40, 50, 63, 62, 61, 60, 59]
    assert weights[0, :2].isnan().all()
    assert weights[0, 2] == 1
    assert not weights[0, 2:].isnan().any()
    for sizes in (SINGLE, GENERAL):
        weights, ids = check(call_of_logits(logits, device, **sizes), finite=False)
        assert ids[0].tolist() == [i for i in range(63, 38, -1) if i not in (40, 50)][: sizes["top_k"]]
        assert weights.isfinite().all()


def test_a_nan_spoils_only_its_token(device: torch.device, rng: torch.Generator) -> None:
    call = make_call(device, rng, tokens=9, experts=SOME)
    want = call.run()
    for value in (NAN, INF, -INF):
        spoilt = call["hidden_states"].clone()
        spoilt[4, 77] = value
        got = call.run(hidden_states=spoilt)
        for row in (0, 1, 2, 3, 5, 6, 7, 8):
            assert_same_bits(got[0][row], want[0][row], "weights")
            assert_same_bits(got[1][row], want[1][row], "ids")


def test_without_candidates_the_first_experts_are_returned(device: torch.device) -> None:
    for sizes, logits, bias in (
        *((sizes, *case) for sizes in (SINGLE, GENERAL) for case in ((NAN, 0.0), (1.0, -INF), (1.0, NAN))),
        (SINGLE, INF, 0.0),
    ):
        call = call_of_logits([logits] * 64, device, bias=[bias] * 64, routed_scaling_factor=2.5, **sizes)
        k = sizes["top_k"]
        for renormalize in (True, False):
            weights, ids = check(call.changed(renormalize=renormalize), finite=False)
            assert ids[0].tolist() == list(range(k))
            share = 1 / k if renormalize or sizes == GENERAL else 0.0
            torch.testing.assert_close(weights[0].cpu(), torch.full((k,), share))


def test_too_few_candidates(device: torch.device) -> None:
    """In one group what is not finite follows with weight zero; in general expert 0 fills up."""
    logits = [INF] * 64
    logits[7], logits[30], logits[60] = 1.0, 2.0, -3.0
    weights, ids = check(call_of_logits(logits, device, **SINGLE), finite=False)
    assert ids[0].tolist() == [30, 7, 60, 0, 1, 2, 3, 4]
    assert weights[0, 3:].tolist() == [0.0] * 5
    weights, ids = check(call_of_logits(logits, device, **GENERAL), finite=False)
    assert ids[0].tolist() == [30, 7, 60] + [0] * 20
    assert weights[0, 3:].tolist() == [weights[0, 3]] * 20


def test_one_live_group(device: torch.device, rng: torch.Generator) -> None:
    """Scores of all other groups are zero; ties between them go to the lower group."""
    for live, (n_group, topk_group) in itertools.product((0, 3, 7), ((8, 1), (8, 2), (8, 4))):
        logits = torch.full((256,), -200.0)
        logits[live * 32 : live * 32 + 32] = torch.randn(32, generator=rng)
        call = call_of_logits(logits, device, bias=[0.0] * 256, n_group=n_group, topk_group=topk_group)
        _, ids = check(call)
        assert (ids // 32 == live).all()


@pytest.mark.parametrize("top_k", [4, 9])
def test_groups_that_bias_excludes(top_k: int, device: torch.device, rng: torch.Generator) -> None:
    """A bias of -inf excludes experts, in turn all, all but one or all but two of a group."""
    logits = torch.randn(64, generator=rng)
    for kept, topk_group in itertools.product((0, 1, 2), (2, 3)):
        bias = torch.randn(64, generator=rng)
        for group in range(1, 8):
            bias[group * 8 + kept : group * 8 + 8] = -INF
        call = call_of_logits(logits, device, bias=bias, top_k=top_k, n_group=8, topk_group=topk_group)
        check(call)


SPECIAL = (0.0, -0.0, 1.0, -1.0, 20.0, -20.0, 90.0, -90.0, 3e38, -3e38, 1e-40, INF, -INF, NAN, -NAN)


@st.composite
def _calls(draw: st.DrawFn) -> dict[str, Any]:
    experts = draw(st.sampled_from((8, 16, 24, 33, 64, 96, 256, 320, 520)))
    n_group = draw(st.sampled_from([group for group in range(1, 33) if experts % group == 0]))
    topk_group = draw(st.integers(1, n_group))
    top_k = draw(st.integers(1, min(32, experts // n_group * topk_group)))
    values = st.lists(st.sampled_from(SPECIAL), min_size=1, max_size=8)
    logits, bias = draw(values), draw(st.none() | values)
    shuffle = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def spread(few: list[float]) -> torch.Tensor:
        return torch.tensor(few)[torch.randint(len(few), (experts,), generator=shuffle)]

    return {
        "logits": spread(logits),
        "bias": None if bias is None else spread(bias),
        "n_group": n_group,
        "topk_group": topk_group,
        "top_k": top_k,
        "renormalize": draw(st.booleans()),
        "routed_scaling_factor": draw(st.sampled_from((1.0, 2.827, 0.0))),
        "logits_dtype": draw(st.sampled_from((None, BF16, FP32))),
    }


@seed(SEED)
@settings(max_examples=250, deadline=None, derandomize=False, database=None)
@given(options=_calls(), factors=st.lists(st.sampled_from((1.0, 0.5, 2.0, -1.0)), min_size=1, max_size=3))
def test_awkward_logits_and_biases(options: dict[str, Any], factors: list[float]) -> None:
    check(call_of_logits(factors=factors, **options), finite=False)


def test_scores_are_the_sigmoid(device: torch.device) -> None:
    logits = torch.cat([torch.linspace(-30, 30, 4001), torch.logspace(-30, 4, 200), torch.tensor(SPECIAL)])
    logits = torch.cat([logits, -logits]).to(device)
    scores = scores_of(logits)
    want = reference.scores(logits, "sigmoid").cpu()
    torch.testing.assert_close(scores.double(), want, rtol=0, atol=2.0**-23, equal_nan=True)
    finite = logits[~logits.isnan()]
    ordered = scores_of(finite.sort().values)
    assert (ordered.diff() > -(2.0**-24)).all()
    assert scores_of(torch.zeros(1, device=device)).item() == 0.5


@pytest.mark.parametrize("bias", [False, True])
def test_softmax_scores_are_those_of_fp64(bias: bool, device: torch.device, rng: torch.Generator) -> None:
    for experts, spread in ((8, 1.0), (100, 5.0), (512, 0.1), (1024, 30.0)):
        form = Form(experts=experts, scoring="softmax", bias=bias, renormalize=False, logits=FP32)
        call = make_call(device, rng, form, spread=spread)
        logits = torch.empty(call.shape, device=device)
        weights, ids = call.run(out_logits=logits)
        want = reference.scores(logits, "softmax").gather(1, ids.long())
        torch.testing.assert_close(weights.double(), want, rtol=1e-5, atol=1e-37)
        check(call)


def test_softmax_of_nothing_finite_is_nan(device: torch.device) -> None:
    for value in (-INF, INF, NAN):
        for groups in ({}, {"n_group": 8, "topk_group": 4}):
            weights, ids = call_of_logits([value] * 64, device, scoring="softmax", **groups).run()
            assert ids[0].tolist() == list(range(8))
            assert weights.isnan().all()


def test_logits_are_rounded_once_and_before_the_scores(device: torch.device) -> None:
    """Logits that only fp32 tells apart tie when they are bf16."""
    values = [1.0 + i * 2.0**-12 for i in range(8)] + [0.0] * 8
    fp32 = call_of_logits(values, device, top_k=8, logits_dtype=FP32)
    assert check(fp32)[1][0].tolist() == [7, 6, 5, 4, 3, 2, 1, 0]
    bf16 = fp32.changed(logits_dtype=BF16)
    logits = torch.empty(1, 16, dtype=BF16, device=device)
    _, ids = bf16.run(out_logits=logits)
    assert ids[0].tolist() == list(range(8))
    assert_same_bits(logits[0].cpu(), torch.tensor(values).to(BF16), "logits")


@pytest.mark.parametrize("weight", [BF16, FP32], ids=str)
def test_activations_that_are_not_finite_make_the_logits_of_a_sum(
    weight: torch.dtype, device: torch.device
) -> None:
    """An fp32 weight may be multiplied in parts, of which some are zero."""
    hidden = torch.zeros(4, 40, dtype=BF16, device=device)
    hidden[:, 35] = torch.tensor([INF, -INF, NAN, 2.0])
    gate = torch.ones(9, 40, dtype=weight, device=device)
    # Exact in bf16, in sixteen bits and in fp32; either sign; zero, which makes NaN of infinity.
    gate[:, 35] = torch.tensor([1.5, -1.5, 1 + 2**-12, -(1 + 2**-12), 1 + 2**-23, 2.0**-100, 3e38, -0.0, 0.0])
    logits = torch.empty(4, 9, device=device)
    vllm_hotpath.moe_router(hidden, gate, top_k=2, logits_dtype=FP32, out_logits=logits)
    want = hidden[:, 35:36].float() * gate[:, 35].float()
    torch.testing.assert_close(logits, want, rtol=0, atol=0, equal_nan=True)


def test_logits_may_go_into_rows_of_a_wider_tensor(device: torch.device, rng: torch.Generator) -> None:
    for gap in (0, 1, 64, 4096):
        check(make_call(device, rng, tokens=7), gap=gap)


def test_weights_may_be_parameters(device: torch.device, rng: torch.Generator) -> None:
    call = make_call(device, rng)
    want = call.run()
    weight = torch.nn.Parameter(call["gate_weight"])
    got = call.run(gate_weight=weight, bias=torch.nn.Parameter(call["bias"]))
    for one, other in zip(got, want, strict=True):
        assert_same_bits(one, other)
        assert not one.requires_grad


def test_no_tokens_make_empty_results(device: torch.device, rng: torch.Generator) -> None:
    call = make_call(device, rng, tokens=0)
    weights, ids = check(call)
    assert (weights.shape, ids.shape) == ((0, 8), (0, 8))
    assert (weights.dtype, ids.dtype) == (FP32, torch.int32)
    assert weights.device.type == ids.device.type == device.type


def test_a_workspace_may_be_given(device: torch.device, rng: torch.Generator) -> None:
    """Larger than needed and full of anything."""
    call = make_call(device, rng, tokens=5)
    want = call.run()
    for extra in (0, 100):
        size = workspace_elements(5, 64)
        workspace = torch.full((size + extra,), -1, dtype=torch.int64, device=device)
        got = call.run(workspace=workspace)
        assert (workspace[size:] == -1).all()
        for one, other in zip(got, want, strict=True):
            assert_same_bits(one, other)


def test_equal_calls_give_equal_bits(device: torch.device, rng: torch.Generator) -> None:
    for name, form in FORMS.items():
        call = make_call(device, rng, form)
        first = call.run()
        for _ in range(3):
            for one, other in zip(call.run(), first, strict=True):
                assert_same_bits(one, other, name)


def test_a_token_routes_the_same_in_every_batch(device: torch.device, rng: torch.Generator) -> None:
    """The logits of a token may be summed in another order in a larger batch; on the CPU they are not."""
    call = make_call(device, rng, tokens=32, experts=384, hidden=512, logits=FP32)
    logits = torch.empty(call.shape, device=device)
    weights, ids = call.run(out_logits=logits)
    for tokens in (1, 8, 9, 16, 17, 31):
        part = torch.empty(tokens, 384, device=device)
        got = call.run(hidden_states=call["hidden_states"][:tokens], out_logits=part)
        assert_routing(*got, scores_of(part), part, call.options)
        if device.type == "cpu":
            assert_same_bits(part, logits[:tokens], "logits")
            assert_same_bits(got[0], weights[:tokens], "weights")
            assert_same_bits(got[1], ids[:tokens], "ids")


def test_is_supported_says_what_a_call_would() -> None:
    def answer(**sizes: int) -> vllm_hotpath.Support:
        return vllm_hotpath.is_supported("moe_router", "cpu", **sizes)

    assert answer()
    assert answer(tokens=32, experts=1024, top_k=32)
    for sizes, reason in (
        ({"tokens": 33}, "tokens: expected 0 to 32, got 33"),
        ({"experts": 7}, "experts: expected 8 to 1024, got 7"),
        ({"experts": 1025}, "experts: expected 8 to 1024, got 1025"),
        ({"top_k": 33}, "top_k: expected 1 to 32, got 33"),
        ({"top_k": 0}, "top_k: expected 1 to 32, got 0"),
        ({"n_group": 33}, "n_group: expected 1 to 32, got 33"),
        ({"tokens": 1, "experts": 5}, "experts: expected 8 to 1024, got 5"),
    ):
        assert not answer(**sizes)
        assert answer(**sizes).reason == f"moe_router: {reason}"
    with pytest.raises(TypeError, match="hidden: moe_router has limits on tokens, experts, top_k, n_group"):
        answer(hidden=8)
    with pytest.raises(TypeError, match="tokens: kda_decode has limits on no sizes"):
        vllm_hotpath.is_supported("kda_decode", "cpu", tokens=1)


def test_the_reference_agrees_with_an_example_by_hand() -> None:
    scores = torch.tensor([[0.5, 0.9, 0.1, 0.8, 0.7, 0.6, 0.2, 0.3]])
    logits = torch.logit(scores)
    bias = torch.tensor([0.0, -0.8, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0])
    # Sums .5 .1 | .1 .8 | .7 .6 | 1.2 .3: the last two groups have 1.3 and 1.5.
    grouped = Options(3, bias, n_group=4, topk_group=2)
    ids, weights = reference.select(scores, logits, grouped)
    assert ids.tolist() == [[6, 4, 5]]
    want = torch.tensor([[0.2, 0.7, 0.6]], dtype=torch.float64) / 1.5
    torch.testing.assert_close(weights, want, rtol=1e-6, atol=0)
    # Without a bias a group counts by its best: .9 and .8.
    ids, _ = reference.select(scores, logits, Options(3, None, n_group=4, topk_group=2))
    assert ids.tolist() == [[1, 3, 0]]
    assert math.isclose(float(reference.scores(logits, "softmax").sum()), 1)
