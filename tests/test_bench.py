"""The benchmark core without a GPU: byte models, statistics, references, peers and result pages."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest
import torch

from vllm_hotpath.bench import environment, peers, report, runner, svg, timing
from vllm_hotpath.bench.numerics import Guarded, Tolerance, awkward, compare, e4m3
from vllm_hotpath.bench.ops import load
from vllm_hotpath.bench.ops.mla_kv_pack import Shape, bytes_moved
from vllm_hotpath.bench.timing import Timing
from vllm_hotpath.cli.bench import select

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
FACTS = {
    "command": "python benchmarks/bench_mla_kv_pack.py --quick",
    "commit": "0123456789abcdef-dirty",
    "device": "NVIDIA <H200> & co",
    "driver": "CUDA 13.0",
    "torch": "2.11.0+cu130",
    "CUDA": "13.0",
    "package": "vllm-hotpath 0.1.0",
    "peer": "vLLM 0.33.0",
    "date": "2026-01-02 03:04 UTC",
}


def row(op: str = "mla_kv_concat", heads: int = 12, tokens: int = 64, peer: float | None = 3.0) -> runner.Row:
    times = {"ours": 2.0, "copy": 1.6, "stream": 1.8, "torch": 10.0} | ({"peer": peer} if peer else {})
    timings = {name: Timing(us, us - 0.1, us + 0.1, 20, 500) for name, us in times.items()}
    return runner.Row(op, {"H": heads, "T": tokens}, 4_000_000, 2_000_000, timings, {})


def test_bytes_of_a_known_shape() -> None:
    shape = Shape(12)
    # One token: 12 heads of 128 + 128 bf16 in, k_pe of 64 bf16 once; 12 heads of 192 + 128 e4m3 out.
    assert bytes_moved("mla_kv_concat_quant_fp8", shape, 1) == (12 * 256 * 2 + 128, 12 * 320)
    # The same without V, and bf16 out.
    assert bytes_moved("mla_kv_concat", shape, 1) == (12 * 128 * 2 + 128, 12 * 192 * 2)
    assert bytes_moved("mla_kv_concat_quant_fp8", shape, 4096) == (25_690_112, 15_728_640)


def test_bench_takes_the_heads_of_the_models_asked_for_and_the_full_table_otherwise() -> None:
    def heads(models: list[str] | None, tp: int | None) -> list[int]:
        cases = select("mla_kv_concat", models, tp, quick=False)
        return list(dict.fromkeys(case.params["H"] for case in cases))

    assert heads(["kimi-k3"], None) == [96, 48, 24, 12, 6, 3]
    assert heads(["kimi-k3", "kimi-k2.6"], 8) == [12, 8]
    assert heads(None, None) == [1, 3, 6, 8, 12, 16, 96, 128]


def test_bench_cases_name_the_bytes_that_they_hold_and_move() -> None:
    for op in ("mla_kv_concat", "mla_kv_concat_quant_fp8"):
        cases = select(op, None, None, quick=False)
        assert [case.params["T"] for case in cases[:8]] == [64, 128, 256, 512, 1024, 4096, 16384, 65536]
        assert all(case.set_bytes > case.bytes_moved for case in cases)
        too_large = {tuple(case.params.values()) for case in cases if case.set_bytes > runner.MAX_SET_BYTES}
        assert too_large == {("bf16", 96, 65536), ("bf16", 128, 65536)}


@pytest.mark.parametrize("op", ["mla_kv_concat", "mla_kv_concat_quant_fp8"])
def test_subjects_agree_with_the_reference_and_each_set_has_its_own_buffers(op: str) -> None:
    case = next(case for case in select(op, ["kimi-k3"], 32, quick=True) if case.params["T"] == 64)
    sets = case.make(torch.device("cpu"), 3)
    for subject in ("ours", "torch"):
        assert runner.check(sets, subject) == ""
    pointers = {output.data_ptr() for one in sets for output in one.outputs}
    assert len(pointers) == 3 * len(sets[0].outputs)


def test_a_wrong_result_is_found_before_anything_is_timed() -> None:
    case = select("mla_kv_concat", ["kimi-k3"], 32, quick=True)[0]
    sets = case.make(torch.device("cpu"), 2)
    sets[1].subjects["ours"] = lambda: sets[1].outputs  # type: ignore[index]
    assert "ours, output 0: first at [0, 0, 0]" in runner.check(sets, "ours")


def test_sets_exceed_three_times_the_l2_and_never_are_one() -> None:
    l2 = 60 * 2**20
    for moved in (1, 61_440, 5 * 10**6, 10**9):
        sets = timing.sets_needed(moved, l2)
        assert 2 <= sets <= timing.MAX_SETS
        assert sets * moved > 3 * l2 or sets == timing.MAX_SETS


def test_graphs_last_about_a_millisecond() -> None:
    assert timing.passes_needed(61_440, 3000) == 1
    assert timing.passes_needed(400_000_000, 2) == 5
    assert timing.passes_needed(4_000, 100) == 10


def test_summary_is_per_call_and_withstands_an_outlier() -> None:
    summary = timing.summarise([100.0, 110.0, 120.0, 130.0, 9000.0], calls=10)
    assert summary.median_us == 12.0
    assert summary.p10_us == pytest.approx(10.4)
    assert (summary.replays, summary.calls) == (5, 10)
    assert timing.summarise([50.0], calls=10).spread == 0.0


def test_reference_cast_saturates_and_keeps_the_sign_of_nan_on_every_torch() -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([0.0, -0.0, 448.0, 464.0, 465.0, 1e30, inf, -inf, 2.0**-10, 3 * 2.0**-10, nan])
    x = torch.cat([x, -x[-1:].abs().neg()]).view(torch.int32)
    x[-2:] = torch.tensor([0x7FC00000, -0x400000], dtype=torch.int32)
    stored = e4m3(x.view(torch.float32)).view(torch.uint8).tolist()
    assert stored == [0x00, 0x80, 0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x00, 0x02, 0x7F, 0xFF]


def test_reference_quotient_nan_has_the_sign_of_both_operands() -> None:
    x = torch.tensor([0.0, -0.0, 3.0, -3.0], dtype=torch.bfloat16)
    zero = e4m3(x, torch.tensor([0.0])).view(torch.uint8).tolist()
    negative = e4m3(x, torch.tensor([-0.0])).view(torch.uint8).tolist()
    assert zero == [0x7F, 0xFF, 0x7E, 0xFE]
    assert negative == [0xFF, 0x7F, 0xFE, 0x7E]


def test_inputs_are_the_same_for_a_seed_and_hold_the_awkward_values() -> None:
    one, two = (awkward(5000, torch.bfloat16, torch.Generator().manual_seed(5)) for _ in range(2))
    assert compare(one, two) is None
    found = set(one.view(torch.int16).tolist())
    for value in (0x0000, -0x8000, 0x7F80, -0x80, 0x7FC0, -0x40, 0x0001, 0x43E0, 0x43E8):
        assert value in found, hex(value)


def test_comparison_tells_nan_payloads_and_zero_signs_apart() -> None:
    assert compare(torch.tensor([0.0]), torch.tensor([0.0])) is None
    difference = compare(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, -0.0]]))
    assert difference is not None
    assert (difference.index, difference.got, difference.want) == ((0, 1), "0x00000000", "0x80000000")
    assert compare(torch.empty(0, 3), torch.empty(0, 3)) is None
    shapes = compare(torch.empty(0, 3), torch.empty(1, 3))
    assert str(shapes) == "expected [1, 3] float32, got [0, 3] float32"


def test_a_tolerance_takes_the_wider_of_ulps_and_a_fraction_of_the_largest() -> None:
    want = torch.tensor([[1.0, 1000.0], [1.0, 0.5]], dtype=torch.float64)
    tolerance = Tolerance(relative=1e-3, dims=1, ulps=1)
    got = torch.tensor([[1.9, 1003.0], [1.0078, 0.5]]).to(torch.bfloat16)
    assert compare(got, want, tolerance) is None
    assert compare(got, want, Tolerance(relative=1e-2, dims=2)) is None
    far = torch.tensor([[1.0, 1000.0], [1.0157, 0.5]]).to(torch.bfloat16)
    mismatch = compare(far, want, tolerance)
    assert mismatch is not None
    assert (mismatch.index, mismatch.got, mismatch.want, mismatch.differing) == ((1, 0), "1.015625", "1", 1)
    assert str(mismatch) == (
        "first at [1, 0]: expected 1, got 1.015625; 1 of 4 differ, the farthest 2 times as far as allowed"
    )
    assert compare(far, want, tolerance * 2) is None


def test_a_tolerance_allows_no_nan_no_infinity_and_nothing_beside_zero() -> None:
    tolerance = Tolerance(relative=1.0, dims=1)
    finite = torch.ones(1, 2, dtype=torch.float64)
    for wrong in (float("nan"), float("inf")):
        assert compare(torch.tensor([[1.0, wrong]]), finite, tolerance) is not None
        assert compare(torch.ones(1, 2), torch.tensor([[1.0, wrong]], dtype=torch.float64), tolerance)
    infinite = torch.tensor([[1.0, float("inf")]])
    assert compare(infinite, infinite.double(), tolerance) is None
    zeros = torch.zeros(1, 2)
    assert compare(zeros, zeros.double(), tolerance) is None
    assert compare(torch.tensor([[0.0, 1e-30]]), zeros.double(), tolerance) is not None
    assert compare(torch.empty(0, 2), torch.empty(0, 2, dtype=torch.float64), tolerance) is None
    assert "expected [2, 1] float64" in str(compare(torch.ones(1, 2), finite.T, tolerance))


def test_guard_zones_see_a_write_on_either_side() -> None:
    out = Guarded((2, 3), torch.bfloat16, torch.device("cpu"))
    out.tensor.fill_(1.0)
    assert compare(out.guard(), out.untouched()) is None
    out.tensor.as_strided((1,), (1,), out.tensor.storage_offset() - 1).fill_(1.0)
    assert compare(out.guard(), out.untouched()) is not None


def test_page_starts_with_command_and_provenance() -> None:
    spec = load("mla_kv_pack")
    page = report.markdown(spec, FACTS, [row(), row(tokens=512)], chart="x.svg")
    head = page.partition("## ")[0]
    assert page.startswith(
        "<!-- Generated by `python benchmarks/bench_mla_kv_pack.py --quick`. Do not edit. -->"
    )
    assert f"\n    {FACTS['command']}\n" in head
    for name, value in FACTS.items():
        assert name == "command" or f"| {name} | {value} |" in head
    assert "![Time over the copy floor by size](x.svg)" in head
    assert (
        "| 12 | 512 | 2.00 | 1.90-2.10 | 3.00 | 1.60 | 1.250 | 1.80 | 1.111 | 10.00 | 5.00 | 3.00 | 1.500 |"
        in page
    )


def test_an_absent_peer_is_a_dash_and_a_differing_one_is_named() -> None:
    assert report.table([row(peer=None)])[1][0][-2:] == ["-", "-"]
    differs = runner.Row("op", {"T": 1}, 1, 1, row(peer=None).timings, {"peer": "not timed, it differs"})
    assert report.table([differs])[1][0][-2] == "differs"


def test_json_holds_times_ratios_and_provenance() -> None:
    values = json.loads(json.dumps(report.to_json("mla_kv_pack", FACTS, [row()])))
    assert values["environment"] == FACTS
    (only,) = values["mla_kv_pack"]
    assert only["timings"]["ours"] == {
        "median_us": 2.0,
        "p10_us": 1.9,
        "p90_us": 2.1,
        "replays": 20,
        "calls": 500,
    }
    assert only["ratios"]["ours/copy"] == pytest.approx(1.25)
    assert only["ratios"]["peer/ours"] == pytest.approx(1.5)
    assert only["tb_per_s"] == pytest.approx(3.0)


def test_pages_are_written_beside_each_other(tmp_path: Path) -> None:
    rows = [row(tokens=tokens) for tokens in (64, 512)]
    paths = report.write_pages(tmp_path / "results", "h200-mla_kv_pack", load("mla_kv_pack"), FACTS, rows)
    assert [path.name for path in paths] == [f"h200-mla_kv_pack.{suffix}" for suffix in ("md", "json", "svg")]
    assert "(h200-mla_kv_pack.svg)" in paths[0].read_text()


def test_chart_is_well_formed_and_draws_every_point_once() -> None:
    rows = [row(heads=heads, tokens=tokens) for heads in (3, 12) for tokens in (64, 512, 4096)]
    root = ElementTree.fromstring(report.chart("mla_kv_pack", FACTS, rows))
    namespace = {"svg": "http://www.w3.org/2000/svg"}
    texts = [text.text or "" for text in root.iterfind(".//svg:text", namespace)]
    assert (
        "mla_kv_pack on NVIDIA <H200> & co: time / device copy of the same bytes (lower is better)" in texts
    )
    assert [text for text in texts if "H=" in text] == ["mla_kv_concat H=3", "mla_kv_concat H=12"]
    assert {"vllm-hotpath", "vLLM's op", "floor", "time / floor", "T", "64", "4k"} <= set(texts)
    hints = [hint.text for hint in root.iterfind(".//svg:title", namespace)]
    assert len(hints) == 12
    assert hints.count("vllm-hotpath: T=64, 1.250") == 2
    assert len(root.findall(".//svg:polyline", namespace)) == 4


def test_chart_leaves_an_absent_peer_out_of_the_legend() -> None:
    assert "vLLM" not in report.chart("mla_kv_pack", FACTS, [row(peer=None)])
    ElementTree.fromstring(svg.draw("empty", []))


def test_commit_is_that_of_the_checkout_and_says_when_it_is_dirty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOTPATH_COMMIT", raising=False)
    assert environment.commit(tmp_path) == "unknown"
    monkeypatch.setenv("HOTPATH_COMMIT", "abc123")
    assert environment.commit(tmp_path) == "abc123"

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "init.defaultBranch=main"]
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, capture_output=True, check=True)
        return done.stdout.decode().strip()

    package = tmp_path / "python" / "vllm_hotpath"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    head = git("rev-parse", "HEAD")
    assert environment.commit(tmp_path) == head
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "h200-mla_kv_pack.md").write_text("generated")
    assert environment.commit(package) == head
    (package / "new.py").write_text("")
    assert environment.commit(package) == f"{head}-dirty"


def test_provenance_names_no_absolute_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOTPATH_PEER_LIB", str(tmp_path / "missing.so"))
    peers.load.cache_clear()
    try:
        facts = environment.collect("python -m vllm_hotpath bench", torch.device("cpu"), ROOT)
    finally:
        peers.load.cache_clear()
    assert list(facts)[:4] == ["command", "commit", "device", "driver"]
    assert facts["peer"].startswith("absent: (missing.so): missing.so: ")
    assert not any(str(tmp_path) in value for value in facts.values())


def test_command_line_is_quoted() -> None:
    assert environment.command("python -m vllm_hotpath", ["bench", "--md", "a b.md"]) == (
        "python -m vllm_hotpath bench --md 'a b.md'"
    )


def test_call_overhead_runs_on_the_cpu(tmp_path: Path) -> None:
    script = ROOT / "benchmarks" / "bench_call_overhead.py"
    command = [sys.executable, str(script), "--device=cpu", "--batches=2", "--json", f"--out={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)["call_overhead"]
    assert {1, 2, 4, 8, 13} <= {value["tensors"] for value in values if "borrow" in value["what"]}
    assert all(value["ns"] > 0 for value in values)
    page = (tmp_path / "cpu-call-overhead.md").read_text()
    assert "    python benchmarks/bench_call_overhead.py --device=cpu\n" in page
    assert str(tmp_path) not in page


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["mla_kv_concat", "mla_kv_concat_quant_fp8"])
def test_a_case_is_timed_against_both_floors(op: str) -> None:
    case = select(op, ["kimi-k3"], 8, quick=True)[1]
    measured = runner.run_case(case, torch.device("cuda", torch.cuda.current_device()), replays=5)
    assert {"ours", "copy", "stream", "torch"} <= set(measured.timings)
    for name, result in measured.timings.items():
        assert 0.3 < result.median_us < 1000, name
        assert result.p10_us <= result.median_us <= result.p90_us
    assert 0.1 < measured.tb_per_s < 20


# ---- Engines on two GPUs ---------------------------------------------------------------------------------

_LOG = """\
INFO 11-30 10:00:00 [report.py:36] mla_kv_pack: on: MLACommonImpl
(Worker_TP1 pid=12) INFO 11-30 10:00:00 [report.py:36] mla_kv_pack: on: MLACommonImpl
INFO 11-30 10:00:01 [report.py:36] moe_shared_experts: stock: the order changes tokens
INFO 11-30 10:00:02 [report.py:36] mla_two_stream: on
INFO 11-30 10:00:02 [other.py:1] something: else
INFO 11-30 10:00:03 [mla_two_stream.py:1] mla_two_stream: layers.0.attn stays stock: sparse attention
"""


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("engines_two_gpus")


def _engine_runs(engines: ModuleType) -> list[dict[str, Any]]:
    """Two answered runs without DCP: stock, and with the flags whose results are bit by bit the same."""
    graph = {
        "tokens": 1,
        "nodes": 100,
        "ours": 0,
        "collectives": 24,
        "nodes_that_overlap": 0,
        "concurrent_with_collectives": 0,
    }
    chunk = {"chunks": 2, "sha": "aa", "repeated": True, "device_us": 10.0, "host_us": 20.0}
    times = {"ids": ["feed"], "token_us": 100.0, "graph_us": [90.0, 91.0]}
    runs: list[dict[str, Any]] = [
        {
            "dcp": 1,
            "flags": list(flags),
            "outcome": "answered",
            "graphs": [[dict(graph)], [dict(graph)]],
            "context": [dict(chunk), dict(chunk)],
            "runs": {"1": dict(times)},
            "lines": engines.route_lines(_LOG) if flags else [],
            "patched": [
                {"mla_kv_pack": ["a"], "mla_two_stream": ["a", "b"]} if flags else {} for _ in range(2)
            ],
        }
        for flags in ((), engines.BIT_EXACT)
    ]
    return runs


def test_lines_of_an_engine_are_taken_once(engines: ModuleType) -> None:
    assert engines.route_lines(_LOG) == [
        "mla_kv_pack: on: MLACommonImpl",
        "mla_two_stream: layers.0.attn stays stock: sparse attention",
        "mla_two_stream: on",
        "moe_shared_experts: stock: the order changes tokens",
    ]


def test_page_of_engines_on_two_gpus(engines: ModuleType) -> None:
    runs = _engine_runs(engines)
    text, wrong = engines.page(runs, runs)
    assert wrong == []
    assert "2 of 2 starts" in text
    assert "| 1 | bit-exact | 1 | 91.0 | +0.0 % | 100.0 | +0.0 % | equal |" in text
    assert "| 1 | bit-exact | rank 1 | mla_kv_pack, mla_two_stream |" in text
    assert "| 1 | none | rank 0 | none |" in text


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda run: run["runs"]["1"].update(ids=["dead"]), "tokens differ"),
        (lambda run: run["context"][1].update(sha="bb"), "rank 1: the context loop's result differs"),
        (lambda run: run["context"][0].update(repeated=False), "rank 0: the context loop's result differs"),
        (lambda run: run["context"][0].clear(), "no context of several chunks"),
        (lambda run: run["graphs"][0][0].update(concurrent_with_collectives=3), "can be overlapped"),
        (lambda run: run["patched"][1].popitem(), "the ranks run different features"),
        (lambda run: run["lines"].pop(0), "3 features were asked for and 2 reported"),
        (lambda run: [rank.popitem() for rank in run["patched"]], "are said to be on"),
        (lambda run: run.update(outcome="hung: no answer in 200 s"), "hung"),
    ],
)
def test_page_of_engines_names_what_is_wrong(
    engines: ModuleType, change: Callable[[dict[str, Any]], Any], problem: str
) -> None:
    runs = _engine_runs(engines)
    change(runs[1])
    text, wrong = engines.page(runs, runs)
    assert len(wrong) == 1
    assert problem in wrong[0]
    assert wrong[0] in text
