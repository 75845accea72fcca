"""The benchmark of the MoE router without a GPU: gates, bytes, judged selections, floor, peer and page."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.test_bench import FACTS
from vllm_hotpath.bench import peers, report, runner, timing
from vllm_hotpath.bench.models import MODELS, Gate
from vllm_hotpath.bench.ops import load, moe_router
from vllm_hotpath.bench.timing import Timing
from vllm_hotpath.cli.bench import select
from vllm_hotpath.ops import moe_router as op

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_hotpath.bench.spec import BenchCase, BufferSet

LINEAR, DEEPSEEK, K3 = (MODELS[name].gate for name in ("kimi-linear", "deepseek-v3", "kimi-k3"))
CPU = torch.device("cpu")


def cases(gate: Gate | None, tokens: int, weight: str = "bf16") -> list[BenchCase]:
    assert gate is not None
    every = load("moe_router").bench_cases("moe_router", gate, False)
    return [case for case in every if (case.params["M"], case.params["weight"]) == (tokens, weight)]


def first_set(gate: Gate | None, tokens: int, weight: str = "bf16") -> BufferSet:
    (case,) = cases(gate, tokens, weight)
    return case.make(CPU, 1)[0]


def router_row(tokens: int = 8, peer: float | None = 9.9) -> runner.Row:
    def timing_of(us: float) -> Timing:
        return Timing(us, us - 0.1, us + 0.1, 20, 500)

    times = {"ours": 3.5, "read": 2.5} | ({"peer": peer} if peer else {})
    candidates = {loads: timing_of(us) for loads, us in (("1", 3.0), ("4", 2.5), ("8", 2.6))}
    return runner.Row(
        "moe_router",
        {"E": 384, "K": 7168, "top_k": 8, "groups": "1 of 1", "weight": "bf16", "M": tokens},
        5_600_000,
        512,
        {name: timing_of(us) for name, us in times.items()},
        {},
        load("moe_router").floor,
        candidates,
    )


def test_bytes_of_a_known_call() -> None:
    gate, recipe = Gate(384, 7168, 8), moe_router.Recipe()
    weight = 384 * 7168 * 2
    assert moe_router.bytes_moved(gate, recipe, 1) == (weight + 384 * 4 + 7168 * 2, 8 * 8)
    assert moe_router.bytes_moved(gate, recipe._replace(weight=torch.float32), 32) == (
        2 * weight + 384 * 4 + 32 * 7168 * 2,
        32 * 8 * 8,
    )


def test_gates_of_the_models() -> None:
    gates = {name: model.gate for name, model in MODELS.items()}
    assert gates == {
        "kimi-k3": Gate(896, 7168, 16, fp32_logits=True),
        "kimi-k2.6": Gate(384, 7168, 8, scaling=2.827),
        "deepseek-v3": Gate(256, 7168, 8, 8, 4, 2.5),
        "kimi-linear": Gate(256, 2304, 8, scaling=2.446),
    }


def test_the_table_has_every_gate_at_every_size() -> None:
    table = select("moe_router", None, None, quick=False)
    assert all(list(case.params) == ["E", "K", "top_k", "groups", "weight", "M"] for case in table)
    assert len({tuple(case.params.values()) for case in table}) == len(table)
    assert {case.params["E"] for case in table} == {32, 64, 128, 256, 384, 896}
    of_384 = [case.params["M"] for case in table if case.params["E"] == 384]
    assert of_384 == [1, 2, 4, 8, 16, 32]
    assert all(case.bytes_moved == case.set_bytes < runner.MAX_SET_BYTES for case in table)
    fp32 = {(case.params["E"], case.params["M"]) for case in table if case.params["weight"] == "fp32"}
    assert fp32 == {(256, 1), (256, 8), (256, 32)}
    assert len(select("moe_router", None, None, quick=True)) < len(table)
    # The gate is not split over ranks.
    one, eight = (select("moe_router", ["deepseek-v3"], tp, quick=True) for tp in (1, 8))
    assert [case.params for case in one] == [case.params for case in eight]
    assert {case.params["groups"] for case in one} == {"4 of 8"}


@pytest.mark.parametrize("gate", [LINEAR, DEEPSEEK, K3, Gate(32, 2880, 4)], ids=str)
def test_calls_agree_with_the_reference_and_each_set_has_its_own_weight(gate: Gate) -> None:
    for tokens in (1, 32):
        (case,) = cases(gate, tokens)
        sets = case.make(CPU, 2)
        assert runner.check(sets, "ours") == ""
        assert sets[0].outputs[0].data_ptr() != sets[1].outputs[0].data_ptr()
        assert list(sets[0].floors) == ["1", "2", "4", "8"]
    if gate == DEEPSEEK:
        assert runner.check([first_set(gate, 8, "fp32")], "ours") == ""


def exchange(weights: torch.Tensor, ids: torch.Tensor) -> None:
    """The best and the last expert change places, with their weights."""
    for one in (weights, ids):
        one[2, [0, -1]] = one[2, [-1, 0]]


def another_expert(weights: torch.Tensor, ids: torch.Tensor) -> None:
    ids[2, 7] = next(i for i in range(256) if i not in ids[2])


def twice(weights: torch.Tensor, ids: torch.Tensor) -> None:
    ids[2, 7], weights[2, 7] = ids[2, 6], weights[2, 6]


def no_expert(weights: torch.Tensor, ids: torch.Tensor) -> None:
    ids[2, 7] = -1


def wrong_weight(weights: torch.Tensor, ids: torch.Tensor) -> None:
    weights[2, 3] *= 1.02


def not_a_number(weights: torch.Tensor, ids: torch.Tensor) -> None:
    weights[2, 3] = torch.nan


SPOILS = (exchange, another_expert, twice, no_expert, wrong_weight, not_a_number)


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_wrong_selection_is_found_before_anything_is_timed(
    spoil: Callable[[torch.Tensor, torch.Tensor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    right: Callable[..., tuple[torch.Tensor, torch.Tensor]] = op.moe_router

    def wrong(*arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = right(*arguments, **options)
        spoil(weights, ids)
        return weights, ids

    monkeypatch.setattr(op, "moe_router", wrong)
    assert "ours, output " in runner.check([first_set(LINEAR, 8)], "ours")


@pytest.mark.parametrize("spoil", SPOILS)
def test_verify_finds_a_wrong_selection(
    spoil: Callable[[torch.Tensor, torch.Tensor], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from vllm_hotpath.__main__ import main

    right: Callable[..., tuple[torch.Tensor, torch.Tensor]] = op.moe_router

    def wrong(*arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = right(*arguments, **options)
        if len(ids) == 5:
            spoil(weights, ids)
        return weights, ids

    monkeypatch.setattr(op, "moe_router", wrong)
    asked = ["--op", "moe_router", "--model", "kimi-linear", "--tp", "1", "--device", "cpu", "--json"]
    assert main(["verify", *asked]) == 1
    (unit,) = json.loads(capsys.readouterr().out)["units"]
    assert unit["failed"] == 1
    assert {failure["case"] for failure in unit["failures"]} == {"M=5 odd"}


def test_a_peer_is_called_as_published_and_its_selection_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[Any, ...]] = []

    def peer(logits: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        given.append((logits, *rest))
        n_group, topk_group, top_k, renormalize, scaling, bias, _ = rest
        experts = logits.shape[1]
        return op.moe_router(
            torch.eye(len(logits), 8).to(torch.bfloat16),
            torch.nn.functional.pad(logits.float().T, (0, 8 - len(logits))).contiguous(),
            top_k=top_k,
            bias=bias[:experts],
            n_group=n_group,
            topk_group=topk_group,
            renormalize=renormalize,
            routed_scaling_factor=scaling,
        )

    def of(namespace: str, name: str) -> Any:
        assert (namespace, name) == ("_moe_C", "grouped_topk")
        return peer

    monkeypatch.setattr(peers, "op", of)
    one = first_set(DEEPSEEK, 8)
    assert runner.check([one], "peer") == ""
    logits, n_group, topk_group, top_k, renormalize, scaling, bias, scoring = given[0]
    assert (logits.shape, logits.dtype, bias.shape) == ((8, 256), torch.bfloat16, (256,))
    assert (n_group, topk_group, top_k, renormalize, scaling, scoring) == (8, 4, 8, True, 2.5, 1)
    monkeypatch.setattr(moe_router, "peer_logits", lambda p: torch.zeros(8, 256, dtype=torch.bfloat16))
    assert "peer, output 0" in runner.check([one], "peer")


def test_without_a_peer_nothing_else_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "op", lambda namespace, name: None)
    assert list(first_set(LINEAR, 1).subjects) == ["ours"]


def test_the_fastest_read_is_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "op", lambda namespace, name: None)
    (case,) = cases(LINEAR, 1)
    times = {"ours": 3.0, "read 1": 2.5, "read 2": 2.4, "read 4": 1.7, "read 8": 1.8}

    def fake(subjects: dict[str, timing.Subject], **_: object) -> dict[str, Timing]:
        assert list(subjects) == list(times)
        return {name: Timing(us, us, us, 20, 10) for name, us in times.items()}

    class Properties:
        L2_cache_size = case.bytes_moved // 2

    monkeypatch.setattr(runner, "measure", fake)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    measured = runner.run_case(case, CPU)
    assert measured.timings.keys() == {"ours", "read"}
    assert (measured.us("read"), measured.choice) == (1.7, "4")


def test_page_names_the_floor_and_its_loads() -> None:
    page = report.markdown(load("moe_router"), FACTS, [router_row(8), router_row(32)], chart="x.svg")
    assert (
        "| E | K | top_k | groups | weight | M | us | p10-p90 | TB/s | read us | x read | loads | peer us | "
        "peer/ours" in page
    )
    assert (
        "| 384 | 7168 | 8 | 1 of 1 | bf16 | 8 | 3.50 | 3.40-3.60 | 1.60 | 2.50 | 1.400 | 4 | 9.90 | 2.829 |"
        in page
    )
    assert "| M | highest x read | lowest peer/ours |" in page
    assert "`read` is the floor" in page
    value = json.loads(json.dumps(router_row().to_json()))
    assert value["read_loads"] == "4"
    assert value["ratios"].keys() == {"ours/read", "peer/ours", "peer/read"}


@pytest.mark.gpu("moe_router")
def test_a_case_is_timed_against_the_best_read() -> None:
    for case in (*cases(LINEAR, 1), *cases(DEEPSEEK, 8), *cases(K3, 32), *cases(DEEPSEEK, 8, "fp32")):
        measured = runner.run_case(case, torch.device("cuda", torch.cuda.current_device()), replays=5)
        assert {"ours", "read"} <= set(measured.timings), case
        assert measured.us("read") == min(timing.median_us for timing in measured.candidates.values())
        assert 0.5 < (measured.ratio("ours", "read") or 0) < 10, case
        assert not measured.notes, measured.notes
