"""The benchmark of the KDA decode without a GPU: table, bytes, reference, floor, peer and pages."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.test_bench import FACTS, row
from vllm_hotpath.bench import kda_calls, peers, report, runner, timing
from vllm_hotpath.bench.ops import kda_decode, load
from vllm_hotpath.bench.timing import Timing
from vllm_hotpath.cli.bench import select

if TYPE_CHECKING:
    from vllm_hotpath.bench.spec import BenchCase


def kda_cases(heads: int, rows: int) -> list[BenchCase]:
    spec = load("kda_decode")
    cases = spec.bench_cases("kda_decode", spec.bench_shapes[0].__class__(heads), False)
    return [case for case in cases if case.params["B"] == rows]


def draw(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype)


def kda_row(rows: int = 64, peer: float | None = 30.0) -> runner.Row:
    def timing_of(us: float) -> Timing:
        return Timing(us, us - 0.1, us + 0.1, 20, 500)

    times = {"ours": 27.0, "rmw": 26.0} | ({"peer": peer} if peer else {})
    candidates = {split: timing_of(us) for split, us in (("1", 30.0), ("8", 26.5), ("16", 26.0))}
    return runner.Row(
        "kda_decode",
        {"H": 12, "state": "fp32", "layout": "SD", "rows": "live", "B": rows},
        50_000_000,
        50_000_000,
        {name: timing_of(us) for name, us in times.items()},
        {},
        load("kda_decode").floor,
        candidates,
    )


def test_bytes_of_a_known_kda_call() -> None:
    recipe = kda_calls.Recipe()
    # A head and row: 64 KiB of state, 3 x 128 channels of 3 bf16 columns; q, k, v, two gates and a beta.
    caches = 65536 + 3 * 128 * 3 * 2
    weights = (3 * 4 * 128 + 1 + 128) * 4 + 128 * 4
    assert kda_decode.bytes_moved(recipe, 1, 1) == (caches + 641 * 2 + 4 + weights, caches + 256)
    read, written = kda_decode.bytes_moved(recipe._replace(half_null=True), 1, 8)
    assert (read, written) == (4 * (caches + 641 * 2) + 8 * 4 + weights, 4 * caches + 8 * 256)


def test_kda_table_has_every_variant_and_only_models_with_such_layers() -> None:
    cases = select("kda_decode", None, None, quick=False)
    assert all(list(case.params) == ["H", "state", "layout", "rows", "B"] for case in cases)
    assert all(
        case.bytes_moved / 2 < case.set_bytes < min(2 * case.bytes_moved, runner.MAX_SET_BYTES)
        for case in cases
        if case.params["B"] != 1
    )
    assert len({tuple(case.params.values()) for case in cases}) == len(cases)
    of_12 = [tuple(case.params.values())[1:] for case in cases if case.params["H"] == 12]
    every = [2**i for i in range(9)]
    assert [size for *variant, size in of_12 if variant == ["fp32", "SD", "live"]] == every
    assert [size for *variant, size in of_12 if variant == ["fp32", "DS", "live"]] == every
    assert [size for *variant, size in of_12 if variant == ["bf16", "SD", "live"]] == every[5:]
    assert [size for *variant, size in of_12 if variant == ["fp32", "SD", "half null"]] == [64, 256]
    assert {case.params["H"] for case in cases} == {3, 6, 8, 12, 16, 24, 32, 96}
    assert len(select("kda_decode", None, None, quick=True)) < len(cases)

    def heads(model: str, tp: int | None) -> set[int | str]:
        return {case.params["H"] for case in select("kda_decode", [model], tp, quick=True)}

    assert heads("kimi-k3", None) == {96, 48, 24, 12, 6, 3}
    assert heads("kimi-linear", None) == {32, 16, 8, 4}
    assert heads("deepseek-v3", None) == set()


def test_kda_calls_agree_with_the_reference_and_each_set_has_its_own_pool() -> None:
    for case in (*kda_cases(3, 8), *kda_cases(12, 64)):
        sets = case.make(torch.device("cpu"), 2)
        assert runner.check(sets, "ours") == "", case
        assert sets[0].outputs[0].data_ptr() != sets[1].outputs[0].data_ptr()
        assert list(sets[0].floors) == ["1", "2", "4", "8", "16"]
        if case.params["rows"] == "half null":
            _, _, _, null = sets[0].want()
            assert null.shape == (32, 12, 128)


def test_bytes_of_a_known_call_of_several_tokens() -> None:
    recipe = kda_calls.Recipe(columns=4)
    weights = (3 * 4 * 128 + 1 + 128) * 4 + 128 * 4
    # One state read and four written; three columns read and six written; 4 slots, 2 starts and a count.
    read = 65536 + 3 * 768 + 4 * (641 * 2 + 4) + 3 * 4 + weights
    assert kda_decode.spec_bytes_moved(recipe, 1, 1) == (read, 4 * (65536 + 256) + 6 * 768)


def test_calls_of_several_tokens_agree_with_the_reference() -> None:
    spec = load("kda_decode")
    cases = list(spec.bench_cases("kda_decode_spec", spec.bench_shapes[0].__class__(12), False))
    assert len({tuple(case.params.values()) for case in cases}) == len(cases)
    assert {case.params["tokens"] for case in cases} == {2, 4, 8}
    for case in cases:
        assert case.bytes_moved < case.set_bytes < min(2 * case.bytes_moved, runner.MAX_SET_BYTES)
        if case.params["B"] == 4:
            sets = case.make(torch.device("cpu"), 2)
            assert runner.check(sets, "ours") == "", case
            assert list(sets[0].floors) == ["1", "2", "4", "8", "16"]


def test_a_wrong_token_of_several_is_found_before_anything_is_timed() -> None:
    recipe = kda_calls.Recipe(columns=3)
    problem = next(iter(kda_calls.spec_problems(recipe, 3, 2, draw, 1, full=True)))
    out = torch.empty(6, 3, 128, dtype=torch.bfloat16)
    one = kda_decode.spec_buffer_set(problem, out)
    assert runner.check([one], "ours") == ""

    def wrong() -> tuple[torch.Tensor]:
        kda_calls.call_spec(problem, out)
        problem.tokens.conv_state[problem.indices[1, 0], 7, 4] += 1
        return (out,)

    one.subjects["ours"] = wrong  # type: ignore[index]
    assert "ours, output 1: first at [1, 7, 4]: expected " in runner.check([one], "ours")


def test_a_wrong_state_is_found_before_anything_is_timed() -> None:
    problem = next(iter(kda_calls.problems(kda_calls.Recipe(), 3, 1, draw, 1)))
    out = torch.empty(1, 1, 3, 128, dtype=torch.bfloat16)
    one = kda_decode.buffer_set(problem, out)
    assert runner.check([one], "ours") == ""

    def wrong() -> tuple[torch.Tensor]:
        kda_calls.call(problem, out)
        state = problem.state[1, 2]
        state[5, 7] += 2e-5 * state.abs().max()
        return (out,)

    one.subjects["ours"] = wrong  # type: ignore[index]
    assert "ours, output 2: first at [0, 2, 5, 7]: expected " in runner.check([one], "ours")


def test_the_fastest_candidate_is_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = kda_cases(3, 1)
    times = {"ours": 3.0, "rmw 1": 2.5, "rmw 2": 2.4, "rmw 4": 1.9, "rmw 8": 1.7, "rmw 16": 1.8}

    def fake(subjects: dict[str, timing.Subject], **_: object) -> dict[str, Timing]:
        assert list(subjects) == list(times)
        assert all(len(subject.calls) == 2 for subject in subjects.values())
        return {name: Timing(us, us, us, 20, 10) for name, us in times.items()}

    class Properties:
        L2_cache_size = case.bytes_moved // 2

    monkeypatch.setattr(runner, "measure", fake)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    measured = runner.run_case(case, torch.device("cpu"))
    assert measured.timings.keys() == {"ours", "rmw"}
    assert (measured.us("rmw"), measured.choice) == (1.7, "8")
    assert measured.ratio("ours", "rmw") == pytest.approx(3.0 / 1.7)


def test_a_peer_is_called_as_published_and_may_round_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[object, ...]] = []
    problem = next(iter(kda_calls.problems(kda_calls.Recipe("DS"), 12, 3, draw, 1)))

    def peer(*arguments: Any) -> None:
        given.append(arguments)
        out, state = arguments[10], arguments[9]
        kda_calls.call(problem, out)
        state[1:] += 2e-5 * state[1:].abs().amax((2, 3), keepdim=True)

    monkeypatch.setattr(peers, "op", lambda namespace, name: peer)
    one = kda_decode.buffer_set(problem, torch.empty(1, 3, 12, 128, dtype=torch.bfloat16))
    assert runner.check([one], "peer") == ""
    shapes = [list(x.shape) if isinstance(x, torch.Tensor) else x for x in given[0]]
    slots, channels = 4, 3 * 12 * 128
    assert shapes == [
        *([3, channels], [3, 4, 12 * 128], None, [slots, channels, 3], [1, 3, 12, 128], [1, 3, 12]),
        *([12], [12 * 128], [3], [slots, 12, 128, 128], [1, 3, 12, 128], -5.0, [3, 12, 128], [128], 1e-5),
    ]
    one.subjects["ours"] = one.subjects["peer"]  # type: ignore[index]
    assert "ours, output 2: " in runner.check([one], "ours")


def test_a_peer_is_asked_only_where_it_has_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "op", lambda namespace, name: print)
    asked = {}
    for heads in (8, 12):
        for case in kda_cases(heads, 64):
            one = case.make(torch.device("cpu"), 1)[0]
            asked[heads, case.params["state"], case.params["rows"]] = "peer" in one.subjects
    assert asked == {
        (8, "fp32", "live"): False,
        (12, "fp32", "live"): True,
        (12, "bf16", "live"): False,
        (12, "fp32", "half null"): False,
    }


def test_page_names_the_floor_of_the_op_and_its_best_candidate() -> None:
    page = report.markdown(load("kda_decode"), FACTS, [kda_row(8), kda_row(64)], chart="x.svg")
    assert (
        "| H | state | layout | rows | B | us | p10-p90 | TB/s | rmw us | x rmw | split | peer us | peer/ours"
        in page
    )
    assert (
        "| 12 | fp32 | SD | live | 64 | 27.00 | 26.90-27.10 | 3.70 | 26.00 | 1.038 | 16 | 30.00 | 1.111 |"
        in page
    )
    assert "| B | highest x rmw | lowest peer/ours |" in page
    assert "![Time over the rmw floor by size](x.svg)" in page
    assert "`rmw` is the floor" in page
    for absent in ("copy", "stream", "torch: ", "bit by bit before"):
        assert absent not in page.partition("\n## ")[0].partition("Time is")[2]


def test_json_keeps_all_candidates_of_a_floor() -> None:
    value = json.loads(json.dumps(kda_row().to_json()))
    assert value["rmw_split"] == "16"
    assert value["rmw_candidates_us"] == {"1": 30.0, "8": 26.5, "16": 26.0}
    assert value["ratios"].keys() == {"ours/rmw", "peer/ours", "peer/rmw"}
    assert not any("candidates" in name or "choice" in name for name in row().to_json())


def test_chart_titles_name_variants_by_their_value() -> None:
    drawn = report.chart("kda_decode", FACTS, [kda_row(8), kda_row(64)])
    assert ">kda_decode H=12 fp32 SD live<" in drawn
    assert "time / read and rewrite of the states (lower is better)" in drawn
    both = report.chart("all", FACTS, [kda_row(), row()])
    assert "time / read and rewrite of the states or device copy of the same bytes" in both


@pytest.mark.gpu
def test_a_kda_case_is_timed_against_the_best_read_and_rewrite() -> None:
    for case in (*kda_cases(12, 1), *kda_cases(12, 64)):
        measured = runner.run_case(case, torch.device("cuda", torch.cuda.current_device()), replays=5)
        assert {"ours", "rmw"} <= set(measured.timings), case
        assert measured.us("rmw") == min(timing.median_us for timing in measured.candidates.values())
        assert 0.7 < (measured.ratio("ours", "rmw") or 0) < 10, case
        assert not measured.notes, measured.notes
