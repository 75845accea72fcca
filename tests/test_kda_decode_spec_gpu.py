"""CUDA behaviour of ``kda_decode_spec``: parity with the CPU, plans, capture and replay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import cuda_probe
from tests.helpers import POISON, as_bits, assert_same_bits, capture
from tests.kda_cases import (
    STATE_DTYPES,
    STATE_TOLERANCE,
    assert_out_close,
    one_step,
    refill,
)
from tests.kda_spec_cases import (
    SPEC_FORMS,
    SpecForm,
    assert_same_caches,
    check_spec,
    make_spec_call,
    spec_out,
    windows,
)

pytestmark = pytest.mark.gpu("kda_decode_spec")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
# Rows and heads on both sides of every change of plan.
SIZES = ((1, 1), (3, 12), (4, 12), (18, 12), (19, 12), (32, 12), (8, 96))


def _mixed(rows: int, rng: torch.Generator, columns: int = 4) -> SpecForm:
    def numbers(low: int, high: int) -> tuple[int, ...]:
        return tuple(torch.randint(low, high + 1, (rows,), generator=rng).tolist())

    return SpecForm(
        lengths=numbers(0, columns), accepted=numbers(1, columns), columns=columns, tail=3, null=((0, 1),)
    )


@pytest.mark.parametrize("name", list(SPEC_FORMS))
def test_every_form_agrees_with_the_cpu(name: str, rng: torch.Generator) -> None:
    call = make_spec_call(CPU, rng, SPEC_FORMS[name])
    call.args["out"] = spec_out(call)
    on_gpu = call.copy(CUDA)
    want = call.spec_reference()
    call.run()
    on_gpu.run()
    got = on_gpu.copy(CPU)
    assert_out_close(got["out"], call["out"].double())
    for one, other in zip(windows(got), windows(call), strict=True):
        assert_same_bits(one, other, "conv_state")
    for slot in want.state:
        mine, theirs = got["state"][slot].double(), call["state"][slot].double()
        allowed = theirs.abs().amax((-1, -2), keepdim=True) * 2 * STATE_TOLERANCE
        if call["state"].dtype != torch.float32:
            allowed = allowed + one_step(theirs.abs() + allowed, call["state"].dtype)
        assert ((mine - theirs).abs() <= allowed.clamp(min=1e-37)).all()


@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "heads"), SIZES)
def test_every_plan_equals_the_reference_and_itself(
    rows: int, heads: int, state_dtype: torch.dtype, rng: torch.Generator
) -> None:
    call = make_spec_call(
        CUDA, rng, _mixed(rows, rng, 4 if rows > 1 else 8), heads=heads, state_dtype=state_dtype
    )
    twin = call.copy()
    got = check_spec(call)
    assert_same_bits(twin.run(), got, "out")
    assert_same_caches(twin, call)


@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
def test_a_row_gets_the_same_bits_in_every_batch(state_dtype: torch.dtype, rng: torch.Generator) -> None:
    rows, columns = 40, 4
    spec = SpecForm(lengths=(3,) * rows, accepted=(1,) * rows, columns=columns)
    call = make_spec_call(CUDA, rng, spec, heads=12, state_dtype=state_dtype)
    start, whole_batch = call.copy(), call.copy()
    want = whole_batch.run()
    for part in (1, 2, 3, 4, 10, 18, 19, 30):
        one = start.copy()
        changes: dict[str, Any] = {
            name: one[name][:part] for name in ("state_indices", "num_accepted_tokens")
        }
        for name in ("x", "raw_gate", "raw_beta", "output_gate"):
            changes[name] = one[name][: part * 3]
        got = one.run(**changes, query_start_loc=one["query_start_loc"][: part + 1])
        assert_same_bits(got, want[: part * 3], "out")
        slots = one["state_indices"][:part, :3].reshape(-1).long()
        assert_same_bits(one["state"][slots], whole_batch["state"][slots], "state")


@pytest.mark.parametrize(("rows", "heads"), SIZES)
def test_a_call_is_one_kernel_node(rows: int, heads: int, rng: torch.Generator) -> None:
    for state_dtype in STATE_DTYPES:
        call = make_spec_call(CUDA, rng, _mixed(rows, rng), heads=heads, state_dtype=state_dtype)
        graph, _ = capture(call.run, keep_graph=True)
        assert cuda_probe.node_types(graph) == [cuda_probe.KERNEL_NODE]


@pytest.mark.parametrize("rows", [2, 12, 40])
def test_replay_sees_changed_indices_lengths_acceptance_and_padding(rows: int, rng: torch.Generator) -> None:
    columns = 4
    spec = SpecForm(lengths=(columns,) * rows, accepted=(1,) * rows, columns=columns)
    call = make_spec_call(CUDA, rng, spec, heads=12)
    call.args["out"] = spec_out(call)
    # Whatever slot becomes live later holds finite values.
    for name in ("conv_state", "state"):
        call[name].copy_(call[name].nan_to_num(0.5, 0.5, 0.5).clamp(-2, 2))
    graph, _ = capture(call.run)

    def replay() -> torch.Tensor:
        graph.replay()
        out: torch.Tensor = call["out"]
        return out

    slots = call["state"].shape[0]
    for live in (rows, 1, 0, rows // 2, rows):
        refill(call, rng)
        table = torch.randperm(slots - 1, generator=rng)[: rows * columns].view(rows, columns) + 1
        lengths = torch.randint(0, columns + 1, (rows,), generator=rng)
        table[live:], lengths[live:] = 0, 0
        accepted = torch.randint(1, columns + 1, (rows,), generator=rng)
        call["state_indices"].copy_(table)
        call["query_start_loc"][1:].copy_(lengths.cumsum(0))
        call["num_accepted_tokens"].copy_(accepted)
        as_bits(call["out"]).fill_(POISON * 257)
        check_spec(call, out=call["out"], run=replay)


@pytest.mark.parametrize("rows", [2, 40])
def test_chained_steps_in_a_graph_equal_eager_ones(rows: int, rng: torch.Generator) -> None:
    """Every step reads caches and gates that the step right before it wrote."""
    spec = SpecForm(lengths=(2,) * rows, accepted=(2,) * rows, columns=2)
    call = make_spec_call(CUDA, rng, spec, heads=12)
    start, eager = call.copy(), call.copy()
    for name in ("conv_state", "state"):
        for one in (call, start, eager):
            one[name].copy_(start[name].nan_to_num(0.5, 0.5, 0.5).clamp(-2, 2))

    def steps(one: Any, synchronize: bool) -> list[torch.Tensor]:
        outs = [one["output_gate"]]
        for _ in range(40):
            outs.append(one.run(raw_gate=outs[-1], output_gate=outs[-1]))
            if synchronize:
                torch.cuda.synchronize()
        return outs[1:]

    want = steps(eager, True)
    results: list[torch.Tensor] = []
    graph, _ = capture(lambda: results.extend(steps(call, False)))
    for _ in range(3):
        for name in ("conv_state", "state"):
            call[name].copy_(start[name])
        graph.replay()
        for got, right in zip(results, want, strict=True):
            assert_same_bits(got, right, "out")
        assert_same_caches(call, eager)
