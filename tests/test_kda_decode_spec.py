"""``kda_decode_spec`` against the float64 reference and ``kda_decode``, and every byte it must not touch."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import vllm_hotpath
from tests.helpers import BF16, FP16, as_bits, assert_same_bits
from tests.kda_cases import HEADS, STATE_DTYPES, D, Form, kda_decode, tensors
from tests.kda_spec_cases import (
    SPEC_FORMS,
    SpecCall,
    SpecForm,
    assert_same_caches,
    check_spec,
    make_spec_call,
    spec_out,
    windows,
)

FP32 = torch.float32
BY_TOKEN = ("x", "raw_gate", "raw_beta", "output_gate")


@pytest.mark.parametrize("name", list(SPEC_FORMS))
def test_every_form_equals_the_reference_and_spares_the_rest_of_the_pool(
    name: str, device: torch.device, rng: torch.Generator
) -> None:
    check_spec(make_spec_call(device, rng, SPEC_FORMS[name]))


@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS)
def test_every_head_count(
    heads: int, state_dtype: torch.dtype, device: torch.device, rng: torch.Generator
) -> None:
    spec = SpecForm(lengths=(2, 0, 3), accepted=(3, 1, 2))
    check_spec(make_spec_call(device, rng, spec, heads=heads, state_dtype=state_dtype))


def test_outputs_are_allocated_and_empty_without_tokens(device: torch.device, rng: torch.Generator) -> None:
    assert vllm_hotpath.is_supported("kda_decode_spec", device)
    call = make_spec_call(device, rng)
    want = check_spec(call.copy())
    got = call.run()
    assert got.is_contiguous()
    assert_same_bits(got, want, "out")
    empty = make_spec_call(device, rng, SpecForm(lengths=(), accepted=()))
    assert empty.run().shape == (0, 3, D)


def _one_token(call: SpecCall, token: int, slot: torch.Tensor) -> dict[str, object]:
    """The arguments of ``kda_decode`` for one token."""
    args = {name: value for name, value in call.args.items() if name not in ("out", "query_start_loc")}
    del args["num_accepted_tokens"]
    for name in BY_TOKEN:
        parts = [part[token : token + 1] for part in tensors(args[name])]
        args[name] = parts if isinstance(args[name], list) else (parts or [None])[0]
    return args | {"state_indices": slot}


@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "heads"), [(1, 1), (2, 12), (5, 12), (30, 12)])
def test_one_token_equals_kda_decode_bit_for_bit(
    rows: int, heads: int, state_dtype: torch.dtype, device: torch.device, rng: torch.Generator
) -> None:
    for layout, columns in (("SD", 1), ("DS", 3)):
        spec = SpecForm(lengths=(1,) * rows, accepted=(1,) * rows, columns=columns)
        call = make_spec_call(device, rng, spec, heads=heads, state_dtype=state_dtype, layout=layout)
        other = call.copy()
        got = call.run()
        args = other.args.copy()
        del args["query_start_loc"], args["num_accepted_tokens"]
        args["state_indices"] = args["state_indices"][:, 0]
        assert_same_bits(got, kda_decode(**args), "out")
        assert_same_caches(call, other)


@pytest.mark.parametrize("form", [Form(), Form(heads=12, layout="DS", bias=True, lower_bound=None)], ids=str)
def test_tokens_equal_steps_of_kda_decode_bit_for_bit(
    form: Form, device: torch.device, rng: torch.Generator
) -> None:
    """An fp32 state loses nothing between two calls, so that one call of several tokens is several of one."""
    spec = SpecForm(lengths=(3, 8, 1), accepted=(1, 1, 1), columns=8, form=form)
    call = make_spec_call(device, rng, spec)
    steps = call.copy()
    got = call.run()
    starts = steps["query_start_loc"].tolist()
    for row, (begin, end) in enumerate(pairwise(starts)):
        slots = steps["state_indices"][row]
        for position, token in enumerate(range(begin, end)):
            out = kda_decode(**_one_token(steps, token, slots[:1]))  # type: ignore[arg-type]
            assert_same_bits(out, got[token : token + 1], f"out of token {token}")
            target = slots[position]
            assert_same_bits(steps["state"][slots[0]], call["state"][target], f"state behind token {token}")
        ends = zip(windows(steps), windows(call), strict=True)
        for last, columns in ends:
            kept = columns[slots[0], :, end - begin - 1 : end - begin + 2]
            assert_same_bits(last[slots[0], :, :3], kept, "conv_state")


@pytest.mark.parametrize("accepted", [1, 2, 3, 4])
def test_the_next_step_goes_on_from_the_accepted_tokens(
    accepted: int, device: torch.device, rng: torch.Generator
) -> None:
    """Rejected tokens leave no trace: the step behind them equals one whose tokens were all right."""
    call = make_spec_call(device, rng, SpecForm(lengths=(4, 4), accepted=(1, 1)))
    clean = call.copy()
    call.run()
    # The same step with the accepted tokens alone.
    lengths = torch.tensor([0, accepted, 4 + accepted], dtype=torch.int32, device=device)
    rows = {"query_start_loc": lengths}
    if accepted < 4:
        order = [*range(accepted), *range(4, 8), *range(accepted, 4)]
        for name in BY_TOKEN:
            rows[name] = clean[name][order]
        rows["query_start_loc"] = lengths
    clean.run(**rows)
    following = torch.tensor([0, 2, 4], dtype=torch.int32, device=device)
    counts = torch.tensor([accepted, 4], dtype=torch.int32, device=device)
    changes = {"query_start_loc": following, "num_accepted_tokens": counts}
    first, second = call.run(**changes), clean.run(**changes)
    assert_same_bits(first[:4], second[:4], "out")


@pytest.mark.parametrize("state_dtype", [BF16, FP16], ids=str)
def test_a_16_bit_state_is_not_rounded_between_tokens(
    state_dtype: torch.dtype, device: torch.device, rng: torch.Generator
) -> None:
    spec = SpecForm(lengths=(8,), accepted=(1,), columns=8)
    call = make_spec_call(device, rng, spec, heads=1, state_dtype=state_dtype, paged=False)
    wide = call.copy()
    wide.args["state"] = call["state"].nan_to_num(0, 0, 0).float()
    got, want = call.run(), wide.run()
    slots = call["state_indices"][0].long()
    state, wide_state = call["state"][slots], wide["state"][slots].to(state_dtype)
    if device.type == "cpu":
        assert_same_bits(got, want, "out")
        assert_same_bits(state, wide_state, "state")
        return
    # The two dtypes' kernels sum in different orders: a last bit now and then. A state that is rounded
    # between tokens is off by one in a tenth of the elements and more.
    for ours, theirs in ((got, want), (state, wide_state)):
        differ = (as_bits(ours) != as_bits(theirs)).float().mean().item()
        assert differ < 0.005
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=2**-6, atol=1e-6)


def test_counts_that_no_row_may_have_touch_nothing(device: torch.device, rng: torch.Generator) -> None:
    call = make_spec_call(device, rng, SpecForm(lengths=(2, 2), accepted=(1, 1)))
    for starts in ([0, 5, 4], [-3, 2, 4], [0, 2, 7], [4, 2, 0], [2**31 - 1, -(2**31), 9]):
        changed = call.copy()
        changed.args["query_start_loc"] = torch.tensor(starts, dtype=torch.int32, device=device)
        want = changed.spec_reference()
        before = changed.copy()
        out = spec_out(changed)
        changed.run(out=out)
        untouched = [slot for slot in range(call["state"].shape[0]) if slot not in want.state]
        assert_same_bits(as_bits(changed["state"])[untouched], as_bits(before["state"])[untouched], "state")
        beyond = torch.empty(0, dtype=out.dtype, device=device).set_(out.untyped_storage())
        assert (as_bits(beyond)[out.numel() :] == 0x7F7F).all()
