"""Accuracy of ``kda_decode``: extremes, long chains, what must not be rounded, origin of the tolerances."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from tests.helpers import BF16, FP16
from tests.kda_cases import (
    D,
    Form,
    assert_out_close,
    assert_state_close,
    check,
    make_call,
    one_step,
    refill,
)
from tests.reference import kda_decode as reference

FP32, FP64 = torch.float32, torch.float64
DRIFT = 2e-4
BOUNDS = pytest.mark.parametrize("lower_bound", [-5.0, None, -0.001, -80.0])


@BOUNDS
@pytest.mark.parametrize("gate", [1e4, -1e4, 0.0, 20.0, -20.0])
@pytest.mark.parametrize("a_log", [-10.0, 0.0, 10.0])
def test_extreme_gates_are_finite_and_right(
    gate: float, a_log: float, lower_bound: float | None, device: torch.device, rng: torch.Generator
) -> None:
    call = make_call(device, rng, lower_bound=lower_bound, state_amplitude=1.0)
    call["raw_gate"].fill_(gate)
    call["raw_gate"][1] *= -1
    call["a_log"].fill_(a_log)
    check(call)


@pytest.mark.parametrize("gate_dtype", [BF16, FP32], ids=str)
def test_extreme_log_decays_are_finite_and_right(
    gate_dtype: torch.dtype, device: torch.device, rng: torch.Generator
) -> None:
    call = make_call(device, rng, rows=6, log_decay=True, gate_dtype=gate_dtype, state_amplitude=1.0)
    for row, gate in enumerate((0.0, -1e4, -1000.0, -math.inf, -1e-6, -80.0)):
        call["raw_gate"][row] = gate
    check(call)


def test_a_decay_of_zero_forgets_the_state_and_one_keeps_it(
    device: torch.device, rng: torch.Generator
) -> None:
    call = make_call(device, rng, rows=2, log_decay=True, state_amplitude=1e15)
    call["raw_gate"][0] = -1000.0
    call["raw_gate"][1] = 0.0
    # Without k the state takes nothing in.
    channels = 3 * D
    call["x"][1, channels : 2 * channels] = 0
    slots = call["state_indices"].long()
    call["conv_state"][slots[1], channels : 2 * channels] = 0
    before = call["state"].clone()
    check(call)
    assert call["state"][slots[0]].abs().max() < 100
    assert torch.equal(call["state"][slots[1]], before[slots[1]])


@pytest.mark.parametrize("beta", [50.0, -50.0, 200.0, -200.0, 1e4, -1e4, 0.0])
@pytest.mark.parametrize("beta_dtype", [BF16, FP32], ids=str)
def test_extreme_betas_are_finite_and_right(
    beta: float, beta_dtype: torch.dtype, device: torch.device, rng: torch.Generator
) -> None:
    call = make_call(device, rng, beta_dtype=beta_dtype)
    call["raw_beta"].fill_(beta)
    check(call)


@pytest.mark.parametrize("beta", [0.5, -0.5])
@pytest.mark.parametrize("state_dtype", [FP32, BF16], ids=str)
def test_beta_is_never_rounded_to_16_bits(
    beta: float, state_dtype: torch.dtype, device: torch.device, rng: torch.Generator
) -> None:
    call = make_call(device, rng, state_amplitude=0.0, state_dtype=state_dtype)
    call["raw_beta"].fill_(beta)
    want = call.reference()
    check(call)
    rounded = torch.full_like(call["raw_beta"], beta).sigmoid().to(BF16)
    assert rounded[0, 0].item() != pytest.approx(1 / (1 + math.exp(-beta)), rel=1e-4)
    spoiled = call.reference(raw_beta=rounded, beta_is_sigmoid=True, state=torch.zeros_like(call["state"]))
    with pytest.raises(AssertionError, match="state"):
        assert_state_close(spoiled.state.to(state_dtype), want.state)


@pytest.mark.parametrize("parts", ["q", "k", "v", "qk", "qkv"])
@pytest.mark.parametrize("norm", [False, True])
def test_zero_queries_keys_and_values(
    norm: bool, parts: str, device: torch.device, rng: torch.Generator
) -> None:
    call = make_call(device, rng, norm=norm)
    for part in parts:
        columns = slice("qkv".index(part) * 3 * D, ("qkv".index(part) + 1) * 3 * D)
        call["x"][:, columns] = 0
        call["conv_state"][call["state_indices"].long(), columns] = 0
    out = check(call)
    if "q" in parts:
        assert not out.any()


@pytest.mark.parametrize("activation", [BF16, FP16], ids=str)
@pytest.mark.parametrize(
    ("amplitude", "state_amplitude"),
    [(1e-4, 1e-4), (1e-4, 1.0), (1e-2, 0.0), (100.0, 0.1), (1.0, 1e4), (1e3, 1e-30)],
)
def test_every_amplitude_is_right(
    amplitude: float,
    state_amplitude: float,
    activation: torch.dtype,
    device: torch.device,
    rng: torch.Generator,
) -> None:
    options = {"amplitude": amplitude, "state_amplitude": state_amplitude, "activation": activation}
    check(make_call(device, rng, **options))
    if activation == BF16 or max(amplitude, state_amplitude) <= 1:
        check(make_call(device, rng, norm=False, lower_bound=None, **options))


def test_saturated_convolutions_are_finite(device: torch.device, rng: torch.Generator) -> None:
    """SiLU of sums around +-1e5, whose exponentials leave fp32."""
    call = make_call(device, rng, rows=4, bias=True, amplitude=1e4)
    call["conv_bias"].mul_(1e5)
    check(call)


@pytest.mark.parametrize("scale", [1.0, 1e-3, -0.5, 0.0])
def test_scale_multiplies_the_query(scale: float, device: torch.device, rng: torch.Generator) -> None:
    for norm in (False, True):
        check(make_call(device, rng, scale=scale, norm=norm))


@pytest.mark.parametrize("eps", [1e-12, 1e-6, 1.0])
def test_eps_is_added_to_the_mean_of_squares(eps: float, device: torch.device, rng: torch.Generator) -> None:
    check(make_call(device, rng, amplitude=1e-2, state_amplitude=1e-3, options={"norm_eps": eps}))


def test_the_norms_of_query_and_key_are_taken(device: torch.device, rng: torch.Generator) -> None:
    """A 128-fold q and k change little where the convolution is linear in them."""
    call = make_call(device, rng, rows=2)
    call["x"].abs_().add_(8)
    call["conv_weight"].fill_(1)
    call["conv_state"][call["state_indices"].long()] = 0
    twin = call.copy()
    twin["x"][:, : 6 * D] *= 128
    check(call)
    check(twin)
    slots = call["state_indices"].long()
    assert (twin["state"][slots] - call["state"][slots]).abs().max() < 1e-3


def test_state_rows_are_values_and_columns_are_keys(device: torch.device, rng: torch.Generator) -> None:
    """One key channel and one value channel meet in one element of ``[V, K]``."""
    call = make_call(device, rng, rows=1, heads=1, state_amplitude=0.0, log_decay=True)
    slot = int(call["state_indices"][0])
    call["conv_state"][slot] = 0
    call["x"].zero_()
    call["x"][0, D + 5] = 4
    call["x"][0, 2 * D + 77] = 4
    call["conv_weight"].fill_(1)
    check(call)
    assert call["state"][slot, 0].nonzero().tolist() == [[77, 5]]


CHAINS = {
    "bounded": Form(inputs="wide"),
    "unbounded": Form(lower_bound=None, layout="DS"),
    "slow decay": Form(lower_bound=-0.01, heads=1),
    "no decay": Form(log_decay=True),
    "no norm": Form(norm=False, bias=True),
    "kimi linear": Form(parts=True, log_decay=True, gate_dtype=FP32, sigmoid_beta=True, beta_dtype=FP32),
}


@pytest.mark.parametrize("extreme", [False, True], ids=["random gates", "gates of 1e4"])
@pytest.mark.parametrize("name", list(CHAINS))
def test_64_chained_steps_do_not_drift(
    name: str, extreme: bool, device: torch.device, rng: torch.Generator
) -> None:
    form = dataclasses.replace(CHAINS[name], rows=2, heads=2)
    call = make_call(device, rng, form)
    exact = call["state"].double().nan_to_num(0, 0, 0)
    for _ in range(64):
        refill(call, rng)
        if extreme or name == "no decay":
            signs = torch.randint(2, (2, 2, D), generator=rng).to(device) * 2 - 1
            gates = (1e4 * signs).clamp(max=0 if form.log_decay else 1e4)
            call["raw_gate"].copy_(gates if extreme else 0 * gates)
        want = call.reference(state=exact)
        out = call.run()
        exact[want.slots] = want.state
        got = call["state"][want.slots].double()
        error = (got - want.state).flatten(2).norm(dim=-1) / want.state.flatten(2).norm(dim=-1)
        assert error.max() <= DRIFT
    assert_out_close(out, want.out)
    assert got.isfinite().all()


@pytest.mark.parametrize("state_dtype", [BF16, FP16], ids=str)
def test_each_step_rounds_the_16_bit_state_once(
    state_dtype: torch.dtype, device: torch.device, rng: torch.Generator
) -> None:
    call = make_call(device, rng, rows=2, heads=2, state_dtype=state_dtype)
    for _ in range(8):
        refill(call, rng)
        check(call)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_the_tolerances_are_those_of_fp32_arithmetic(lower_bound: float | None, rng: torch.Generator) -> None:
    """The reference itself in fp32 passes with a factor of ten to spare, so that a failure is no noise."""
    call = make_call(torch.device("cpu"), rng, rows=4, lower_bound=lower_bound)
    exact, single = call.reference(), call.reference(dtype=FP32)
    assert_state_close(single.state, exact.state, 1e-6)
    assert_out_close(single.out.to(BF16), exact.out)


def test_separate_kernels_are_less_accurate_and_the_cause_is_their_rounding(
    device: torch.device, rng: torch.Generator
) -> None:
    """Rounding q, k, v and o to bf16 between kernels stays within 3e-2, but is further off than the op."""
    call = make_call(device, rng, rows=16, heads=3, lower_bound=-5.0)
    exact, stepwise = call.reference(), call.reference(reference.chain)
    for got, want in ((stepwise.out, exact.out), (stepwise.state, exact.state)):
        assert ((got - want).abs() <= 3e-2 + 3e-2 * want.abs()).all()
    out = call.run().double()
    state = call["state"][exact.slots].double()

    def error(got: torch.Tensor, want: torch.Tensor) -> float:
        return ((got - want).norm() / want.norm()).item()

    assert error(out, exact.out) < error(stepwise.out, exact.out)
    assert error(state, exact.state) * 100 < error(stepwise.state, exact.state)
    # Without the rounding between them, the same steps are the reference.
    single = call.reference(reference.chain, dtype=FP64, x=call["x"].double(), state=call["state"].double())
    fused = call.reference(dtype=FP64, x=call["x"].double(), state=call["state"].double())
    assert torch.equal(single.out, fused.out)


def test_one_step_is_the_distance_of_neighbours() -> None:
    for dtype in (BF16, FP16):
        values = torch.tensor([1.0, 1.5, 255.0, 0.3, 2.0**-20, 6e-8], dtype=dtype)
        bits = values.view(torch.int16) + 1
        neighbours = bits.view(dtype)
        assert torch.equal(one_step(values.double(), dtype), neighbours.double() - values.double())
    assert one_step(torch.zeros(1), FP16).item() == 2.0**-24
