"""Host nanoseconds per call: reading tensor arguments, by number of tensors, and whole eager calls.

Nothing here measures a kernel: tensors are tiny, and the device is waited for outside the timed region.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from rich.table import Table

from common import ROOT, CannotRunError, environment, fail, report, resolve_device
from vllm_hotpath import _core
from vllm_hotpath.bench import peers
from vllm_hotpath.cli.console import output, print_json
from vllm_hotpath.ops import mla_kv_pack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PROG = "python benchmarks/bench_call_overhead.py"
COUNTS = (1, 2, 4, 8, 13)
_TOKENS, _HEADS = 4, 12
_BATCH, _BATCHES = 200, 60
_NAMESPACE = "vllm_hotpath_overhead"


class Result(NamedTuple):
    """Host nanoseconds of one call: median, 10th and 90th percentile over batches."""

    what: str
    tensors: int
    ns: float
    p10: float
    p90: float


def host_ns(
    call: Callable[[], object], device: torch.device, batches: int = _BATCHES
) -> tuple[float, float, float]:
    """Time batches of 200 calls on the host; the device is idle before and waited for after each batch."""
    for _ in range(_BATCH):
        call()
    turns = range(_BATCH)
    times = []
    for _ in range(batches):
        _wait(device)
        start = time.perf_counter_ns()
        for _ in turns:
            call()
        times.append((time.perf_counter_ns() - start) / _BATCH)
        _wait(device)
    deciles = statistics.quantiles(times, n=10, method="inclusive")
    return statistics.median(times), deciles[0], deciles[-1]


def argument_calls(device: torch.device) -> list[tuple[str, int, Callable[[], object]]]:
    """What reading 1 to 13 tensors costs, each as a call without arguments."""
    calls: list[tuple[str, int, Callable[[], object]]] = []
    library = torch.library.Library(_NAMESPACE, "FRAGMENT")
    _LIBRARIES.append(library)
    for count in COUNTS:
        tensors = tuple(torch.zeros(4, 8, dtype=torch.bfloat16, device=device) for _ in range(count))
        names = [f"t{i}" for i in range(count)]
        schema = f"({', '.join(f'Tensor {name}' for name in names)}) -> ()"
        library.define(f"plain{count}{schema}")
        library.impl(f"plain{count}", _nothing, "CPU")
        library.impl(f"plain{count}", _nothing, "CUDA")
        plain = getattr(getattr(torch.ops, _NAMESPACE), f"plain{count}")
        custom = torch.library.custom_op(
            f"{_NAMESPACE}::custom{count}", _nothing, mutates_args=(), schema=schema
        )
        calls += [
            ("borrow_tensors (ours, C exchange API)", count, _bind(_core.borrow_tensors, tensors)),
            ("__dlpack__()", count, _dlpack(tensors)),
            ("torch.ops, Python implementation", count, _bind(plain, tensors)),
            ("torch.library.custom_op", count, _bind(custom, tensors)),
        ]
    return calls


def op_calls(device: torch.device) -> list[tuple[str, int, Callable[[], object]]]:
    """Whole eager calls with outputs given, ours and the peer's where it is present."""
    kv = torch.randn(_TOKENS, _HEADS, 256, dtype=torch.bfloat16, device=device)
    k_pe = torch.randn(_TOKENS, 576, dtype=torch.bfloat16, device=device)[:, 512:]
    k_nope, v = kv[..., :128], kv[..., 128:]
    k = torch.empty(_TOKENS, _HEADS, 192, dtype=torch.bfloat16, device=device)
    k_fp8 = torch.empty(_TOKENS, _HEADS, 192, dtype=torch.float8_e4m3fn, device=device)
    v_fp8 = torch.empty(_TOKENS, _HEADS, 128, dtype=torch.float8_e4m3fn, device=device)
    concat, quant = mla_kv_pack.mla_kv_concat, mla_kv_pack.mla_kv_concat_quant_fp8
    calls: list[tuple[str, int, Callable[[], object]]] = [
        ("mla_kv_concat(out=)", 3, lambda: concat(k_nope, k_pe, out=k)),
        (
            "mla_kv_concat_quant_fp8(k_out=, v_out=)",
            5,
            lambda: quant(k_nope, k_pe, v, k_out=k_fp8, v_out=v_fp8),
        ),
    ]
    if device.type == "cuda":
        for name, arguments in (
            ("fused_kimi_k3_mla_kv_concat", (k_nope, k_pe, k)),
            ("fused_kimi_k3_mla_kv_concat_quant_fp8", (k_nope, k_pe, v, k_fp8, v_fp8)),
        ):
            peer = peers.op("_C", name)
            if peer is not None:
                calls.append((f"peer: {name}", len(arguments), _bind(peer, arguments)))
    return calls


def measure(device: torch.device, batches: int = _BATCHES) -> list[Result]:
    """Time the empty Python call, the argument calls and the op calls."""
    calls = [("empty Python call", 0, lambda: None), *argument_calls(device), *op_calls(device)]
    results = [Result(what, count, *host_ns(call, device, batches)) for what, count, call in calls]
    if device.type == "cuda":
        results.append(Result("launch alone, without Python", 0, *launch_ns(device, batches)))
    return results


def launch_ns(device: torch.device, batches: int = _BATCHES) -> tuple[float, float, float]:
    """The floor of a call: the driver's launch of a kernel of one block, in a loop without Python."""
    src, dst = (torch.zeros(16, dtype=torch.uint8, device=device) for _ in range(2))
    times = []
    for _ in range(batches):
        _wait(device)
        times.append(_core.bench_launch(src, dst, _BATCH))
    _wait(device)
    deciles = statistics.quantiles(times, n=10, method="inclusive")
    return statistics.median(times), deciles[0], deciles[-1]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table or JSON, and write the files asked for."""
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda where the ops run there, else cpu"
    )
    parser.add_argument(
        "--batches", type=int, default=_BATCHES, help="batches of 200 calls (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="write <gpu>-call-overhead.{md,json} there"
    )
    arguments = parser.parse_args(argv)
    if arguments.batches < 2:
        parser.error("--batches: expected at least 2")
    try:
        device = resolve_device(arguments.device, ("mla_kv_concat", "mla_kv_concat_quant_fp8"))
    except CannotRunError as error:
        return fail(f"{PROG}: {error}")
    results = measure(device, arguments.batches)
    facts = environment.collect(PROG if device.type == "cuda" else f"{PROG} --device=cpu", device, ROOT)
    values = {
        "generated": f"generated by: {facts['command']}",
        "environment": facts,
        "call_overhead": [result._asdict() for result in results],
    }
    if arguments.json:
        print_json(values)
    else:
        _show(results)
    if arguments.out:
        name = f"{environment.slug(device)}-call-overhead"
        report.write(arguments.out / f"{name}.json", json.dumps(values, indent=1) + "\n")
        report.write(arguments.out / f"{name}.md", page(facts, results))
    return 0


def page(facts: dict[str, str], results: Sequence[Result]) -> str:
    """The generated Markdown page."""
    explanation = (
        "Host nanoseconds per call, the loop and a Python call of no arguments included (first row): median, "
        f"10th and 90th percentile over batches of {_BATCH} calls that start on an idle device."
    )
    head = report.head(f"Host time per call on {facts['device']}", facts)
    rows = report.markdown_table(_HEADINGS, [_cells(result) for result in results], text_columns=1)
    return f"{head}\n{explanation}\n\n{_pivot(results)}\n{rows}"


_HEADINGS = ("call", "tensors", "ns", "p10-p90", "ns per tensor")
_LIBRARIES: list[torch.library.Library] = []


def _pivot(results: Sequence[Result]) -> str:
    names = [
        name
        for name in dict.fromkeys(r.what for r in results)
        if len([r for r in results if r.what == name]) > 1
    ]
    lines = [[name, *(f"{r.ns:.0f}" for r in results if r.what == name)] for name in names]
    return report.markdown_table(["ns by number of tensors", *map(str, COUNTS)], lines, text_columns=1)


def _cells(result: Result) -> list[str]:
    each = f"{result.ns / result.tensors:.0f}" if result.tensors else "-"
    spread = f"{result.p10:.0f}-{result.p90:.0f}"
    return [result.what, str(result.tensors), f"{result.ns:.0f}", spread, each]


def _show(results: Sequence[Result]) -> None:
    table = Table(title="host time per call", title_justify="left")
    for i, heading in enumerate(_HEADINGS):
        table.add_column(heading, justify="right" if i else "left")
    for result in results:
        table.add_row(*_cells(result))
    output().print(table, markup=False)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _nothing(*tensors: torch.Tensor) -> None:
    """Do what every subject does: nothing with the tensors it was given."""


def _bind(function: Callable[..., Any], tensors: tuple[torch.Tensor, ...]) -> Callable[[], object]:
    return lambda: function(*tensors)


def _dlpack(tensors: tuple[torch.Tensor, ...]) -> Callable[[], object]:
    def call() -> None:
        for tensor in tensors:
            tensor.__dlpack__()

    return call


if __name__ == "__main__":
    sys.exit(main())
