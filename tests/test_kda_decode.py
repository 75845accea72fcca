"""``kda_decode`` against the float64 reference on CPU and GPU: results, and every byte it must not touch."""

from __future__ import annotations

import math

import pytest
import torch

import vllm_hotpath
from tests.helpers import BF16, FP16, POISON, as_bits, assert_same_bits, random_patterns
from tests.kda_cases import (
    FORMS,
    HEADS,
    ROWS,
    STATE_DTYPES,
    D,
    Form,
    assert_out_close,
    assert_same_results,
    assert_state_close,
    check,
    check_far_slots,
    conv_windows,
    make_call,
    poisoned_out,
    tensors,
    whole,
)
from tests.reference import kda_decode as reference

CPU = torch.device("cpu")
FP32 = torch.float32


@pytest.mark.parametrize("allocate", [False, True], ids=["out", "allocated"])
@pytest.mark.parametrize("name", list(FORMS))
def test_every_form_equals_the_reference_and_spares_the_rest_of_the_pool(
    name: str, allocate: bool, device: torch.device, rng: torch.Generator
) -> None:
    check(make_call(device, rng, FORMS[name]), allocate=allocate)


@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS)
def test_every_head_and_row_count(
    heads: int, state_dtype: torch.dtype, device: torch.device, rng: torch.Generator
) -> None:
    largest = {FP32: 200, BF16: 60, FP16: 24}[state_dtype] if device == CPU else math.inf
    for rows in ROWS:
        if heads * rows <= max(largest, heads):
            null_rows = (1, rows - 1) if rows > 2 else ()
            check(
                make_call(device, rng, rows=rows, heads=heads, state_dtype=state_dtype, null_rows=null_rows)
            )


def test_without_rows_the_result_is_empty(device: torch.device, rng: torch.Generator) -> None:
    for form in (Form(rows=0), Form(rows=0, inputs="wide", leading_one=True, parts=True)):
        call = make_call(device, rng, form)
        out = check(call, allocate=True)
        assert out.shape == (0, 3, D)
        check(call)


@pytest.mark.parametrize("name", ["kimi k3", "bias", "window of 7", "three tensors", "bf16 state"])
def test_layouts_and_paging_do_not_change_a_bit(
    name: str, device: torch.device, rng: torch.Generator
) -> None:
    form = FORMS[name]
    seed = int(torch.randint(2**31, (), generator=rng))
    call = make_call(device, rng, form)
    other = make_call(device, torch.Generator().manual_seed(seed), form, layout="DS", paged=not form.paged)
    for argument in call.args.keys() - {"conv_state", "state"}:
        other.args[argument] = call[argument]
    for source, target in zip(conv_windows(call), conv_windows(other), strict=True):
        as_bits(target).copy_(as_bits(source))
    as_bits(other["state"]).copy_(as_bits(call["state"]))
    assert_same_results(call, other, check(call), check(other))


@pytest.mark.parametrize("layout", ["SD", "DS"])
def test_three_tensors_equal_one_bit_for_bit(layout: str, device: torch.device, rng: torch.Generator) -> None:
    packed = make_call(device, rng, bias=True, layout=layout, inputs="wide")
    split = packed.copy()
    split.args |= {name: list(split[name].chunk(3, dim=1)) for name in ("x", "conv_state")}
    split.args["conv_weight"] = [part.T.contiguous() for part in split["conv_weight"]]
    split.args["conv_bias"] = list(split["conv_bias"].chunk(3))
    shapes = split.copy()
    shapes.args["conv_weight"] = tuple(part.unsqueeze(1) for part in shapes["conv_weight"])
    want = check(packed)
    assert_same_results(packed, split, want, check(split))
    assert_same_results(packed, shapes, want, check(shapes))


def test_each_argument_may_be_three_tensors_by_itself(device: torch.device, rng: torch.Generator) -> None:
    packed = make_call(device, rng, bias=True)
    pieces = {
        "x": lambda call: list(call["x"].chunk(3, dim=1)),
        "conv_state": lambda call: list(call["conv_state"].chunk(3, dim=1)),
        "conv_weight": lambda call: [part.T.contiguous() for part in call["conv_weight"]],
        "conv_bias": lambda call: list(call["conv_bias"].chunk(3)),
    }
    calls = [packed.copy() for _ in pieces]
    want = check(packed)
    for (name, split), call in zip(pieces.items(), calls, strict=True):
        call.args[name] = split(call)
        assert_same_results(packed, call, want, check(call))


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_log_decay_and_activated_beta_equal_the_raw_gates(
    lower_bound: float | None, device: torch.device, rng: torch.Generator
) -> None:
    raw = make_call(device, rng, lower_bound=lower_bound, gate_dtype=FP32, beta_dtype=FP32)
    ready = raw.copy()
    factor = reference.decay(raw["raw_gate"], raw["a_log"], raw["dt_bias"], lower_bound, torch.float64)
    ready.args |= {
        "raw_gate": factor.clamp(min=1e-30).log().float(),
        "raw_beta": raw["raw_beta"].double().sigmoid().float(),
        "a_log": None,
        "dt_bias": None,
        "gate_is_log_decay": True,
        "beta_is_sigmoid": True,
    }
    # With a log decay the gate vectors and a bound may be there: they are not used.
    unused = raw.copy()
    unused.args |= {
        name: ready[name] for name in ("raw_gate", "raw_beta", "gate_is_log_decay", "beta_is_sigmoid")
    }
    want = raw.reference()
    out = check(ready)
    assert_out_close(out, want.out)
    assert_state_close(ready["state"][want.slots], want.state)
    assert_same_results(ready, unused, out, check(unused))


@pytest.mark.parametrize("layout", ["SD", "DS"])
@pytest.mark.parametrize("window", [3, 4])
def test_the_convolution_state_is_moved_bit_by_bit(
    window: int, layout: str, device: torch.device, rng: torch.Generator
) -> None:
    """Also NaN with its payload, infinities, subnormals and negative zero, which a conversion would lose."""
    call = make_call(device, rng, rows=9, heads=6, layout=layout, window=window, null_rows=(4,))
    x, conv = call["x"], call["conv_state"]
    as_bits(x).copy_(as_bits(random_patterns(tuple(x.shape), BF16, rng)))
    as_bits(conv).copy_(as_bits(random_patterns(tuple(conv.shape), BF16, rng)))
    before = conv.clone()
    want = call.reference()
    call.run()
    for part, seen in enumerate(conv_windows(call)):
        assert_same_bits(seen[want.slots], want.conv[:, part], f"conv_state of {'qkv'[part]}")
    assert_same_bits(conv[..., 3:], before[..., 3:], "columns beyond the window")
    dead = [slot for slot in range(conv.shape[0]) if slot not in want.slots.tolist()]
    assert_same_bits(conv[dead], before[dead], "dead slots")


@pytest.mark.parametrize("leading_one", [False, True])
@pytest.mark.parametrize(("row_gap", "offset"), [(0, 1), (1, 0), (8, 8), (131, 3)])
def test_out_rows_may_be_anywhere_and_the_gaps_stay(
    row_gap: int, offset: int, leading_one: bool, device: torch.device, rng: torch.Generator
) -> None:
    call = make_call(device, rng, rows=4, null_rows=(2,))
    out = poisoned_out(call, row_gap=row_gap, offset=offset, leading_one=leading_one)
    check(call, out=out)
    outside = torch.ones(out.untyped_storage().nbytes() // 2, dtype=torch.bool, device=device)
    outside.as_strided(out.shape, out.stride(), offset).fill_(False)
    assert (whole(out).view(BF16).view(torch.int16)[outside] == POISON * 257).all()


def test_out_may_be_a_column_of_a_wider_tensor(device: torch.device, rng: torch.Generator) -> None:
    call = make_call(device, rng, rows=5, heads=2)
    wide = torch.full((5, 2 * D + 100 + 2 * D), math.nan, dtype=BF16, device=device)
    check(call, out=wide[:, 100 : 100 + 2 * D].unflatten(1, (2, D)))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("indices", ["rows", "column", "stride 8", "block table"])
def test_indices_of_every_dtype_shape_and_stride(
    indices: str, dtype: torch.dtype, device: torch.device, rng: torch.Generator
) -> None:
    check(make_call(device, rng, rows=9, indices=indices, index_dtype=dtype, null_rows=(0, 5, 6)))


def test_index_strides_of_zero_and_odd_offsets(device: torch.device, rng: torch.Generator) -> None:
    call = make_call(device, rng, rows=4)
    storage = torch.full((64,), 2**30, dtype=torch.int32, device=device)
    view = storage.as_strided((4, 1), (5, 0), 3)
    view.copy_(call["state_indices"].unsqueeze(1))
    check(call.changed(state_indices=view))
    check(call.changed(state_indices=torch.zeros(1, dtype=torch.int64, device=device).expand(4)))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_null_rows_are_zero_and_leave_every_cache_byte_alone(
    poison: float, index_dtype: torch.dtype, device: torch.device, rng: torch.Generator
) -> None:
    """The exact case of the padded index arrays ``[0, 0, 2, -1]``."""
    call = make_call(device, rng, rows=4, extra_slots=1, index_dtype=index_dtype)
    indices = torch.tensor([0, 0, 2, -1], dtype=index_dtype, device=device)
    call.args["state_indices"] = indices
    for pool in (call["conv_state"], call["state"]):
        kept = pool[2].nan_to_num(0.5, 0.5, 0.5).clamp(-4, 4)
        pool.fill_(poison)
        pool[2].copy_(kept)
    for name in ("x", "raw_gate", "raw_beta", "output_gate"):
        call[name][[0, 1, 3]] = poison
    out = check(call)
    assert not as_bits(out)[[0, 1, 3]].any()
    assert out[2].abs().max() > 0
    assert (call["state"][[0, 1, 3, 4]].isfinite().logical_not()).all()


@pytest.mark.parametrize("null_index", [-1, 0, 1, 5])
def test_rows_up_to_the_null_index_are_padding(
    null_index: int, device: torch.device, rng: torch.Generator
) -> None:
    call = make_call(device, rng, rows=8, extra_slots=0, null_index=-1)
    call.args["null_index"] = null_index
    call.args["state_indices"] = torch.arange(8, dtype=torch.int32, device=device)
    want = call.reference()
    assert want.slots.tolist() == list(range(max(null_index + 1, 0), 8))
    check(call)


def test_the_lowest_indices_are_padding_too(device: torch.device, rng: torch.Generator) -> None:
    for dtype in (torch.int32, torch.int64):
        call = make_call(device, rng, rows=3, index_dtype=dtype, null_rows=(0, 2))
        call["state_indices"][0] = torch.iinfo(dtype).min
        check(call)


def test_weights_may_be_parameters(device: torch.device, rng: torch.Generator) -> None:
    names = ("conv_weight", "conv_bias", "a_log", "dt_bias", "norm_weight")
    for parts in (False, True):
        call = make_call(device, rng, bias=True, parts=parts)
        twin = call.copy()
        for name in names:
            made = [torch.nn.Parameter(tensor) for tensor in tensors(twin[name])]
            twin.args[name] = made if parts and name.startswith("conv") else made[0]
        assert_same_bits(twin.run(), check(call), "out")
        assert_same_bits(twin["state"], call["state"], "state")


def test_a_pool_of_one_slot_has_no_slot_stride(device: torch.device, rng: torch.Generator) -> None:
    call = make_call(device, rng, rows=1, extra_slots=0, null_index=-1, paged=False)
    for name in ("conv_state", "state"):
        pool = call[name]
        call.args[name] = pool.as_strided(pool.shape, (3, *pool.stride()[1:]))
    check(call)


def test_a_single_row_has_no_row_stride(device: torch.device, rng: torch.Generator) -> None:
    call = make_call(device, rng, rows=1)
    for name in ("x", "raw_gate", "raw_beta", "output_gate", "state_indices"):
        tensor = call[name]
        call.args[name] = tensor.as_strided(tensor.shape, (0, *tensor.stride()[1:]))
    check(call)


def test_one_row_of_inputs_may_serve_all_rows(device: torch.device, rng: torch.Generator) -> None:
    call = make_call(device, rng, rows=4)
    for name in ("x", "raw_gate", "raw_beta", "output_gate"):
        call.args[name] = call[name][:1].expand(call[name].shape)
    check(call)


def test_rows_do_not_see_each_other(device: torch.device, rng: torch.Generator) -> None:
    """A NaN in one row's inputs or slot stays there."""
    call = make_call(device, rng, rows=6, heads=2)
    twin = call.copy()
    want = check(call)
    for row, name in enumerate(("x", "raw_gate", "raw_beta", "output_gate")):
        twin[name][row] = math.nan
    twin["state"][int(twin["state_indices"][4])] = math.nan
    got = twin.run()
    assert_same_bits(got[5:], want[5:], "out")
    slot = int(call["state_indices"][5])
    assert_same_bits(twin["state"][slot], call["state"][slot], "state")
    assert got[:5].isnan().flatten(1).all(dim=1).all()


def test_row_order_does_not_change_a_bit(device: torch.device, rng: torch.Generator) -> None:
    call = make_call(device, rng, rows=17, null_rows=(2, 9))
    order = torch.randperm(17, generator=rng).to(device)
    twin = call.copy()
    for name in ("x", "raw_gate", "raw_beta", "output_gate", "state_indices"):
        twin.args[name] = twin[name][order]
    want, got = check(call), check(twin)
    assert_same_results(call, twin, want[order], got)


def test_equal_calls_give_equal_bits(device: torch.device, rng: torch.Generator) -> None:
    for form in (Form(rows=33, heads=3, inputs="wide"), Form(rows=5, heads=12, state_dtype=BF16)):
        call = make_call(device, rng, form)
        twins = [call.copy() for _ in range(4)]
        want = check(call)
        for twin in twins:
            assert_same_results(call, twin, want, twin.run())


def test_convolution_pools_may_have_any_inner_strides(device: torch.device, rng: torch.Generator) -> None:
    call = make_call(device, rng, rows=3, heads=2, window=3)
    slots, channels, window = call["conv_state"].shape
    for inner in ((1, channels), (window, 1), (1, channels + 8), (window + 2, 1), (2, 2 * channels + 1)):
        stride = 4 * channels * (window + 2) + 8
        memory = random_patterns((slots * stride,), BF16, rng).to(device)
        conv = memory.as_strided((slots, channels, window), (stride, *inner), 8)
        twin = call.copy()
        live = twin["state_indices"].long()
        conv[live] = call["conv_state"][live]
        check(twin.changed(conv_state=conv))


@pytest.mark.big(host_gib=2)
@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
def test_slots_beyond_2_31_elements_on_the_host(state_dtype: torch.dtype, rng: torch.Generator) -> None:
    """Pages are never touched but where a slot is, so the pool costs address space only."""
    check_far_slots(CPU, state_dtype, rng)


def test_the_public_name_is_this_op() -> None:
    from vllm_hotpath.ops import kda_decode as module

    assert vllm_hotpath.kda_decode is module.kda_decode
    assert vllm_hotpath.is_supported("kda_decode", "cpu") == (True, "")
