"""``bench``: the ops against their floor, torch and vLLM's own op, as a table and as result files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from vllm_hotpath.bench import environment, report, runner
from vllm_hotpath.bench.models import placements
from vllm_hotpath.bench.ops import load, op_names, stem_of
from vllm_hotpath.cli.console import CannotRunError, output, print_json, progress, resolve_device

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    import torch

    from vllm_hotpath.bench.runner import Row
    from vllm_hotpath.bench.spec import BenchCase


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table and write the files asked for."""
    if arguments.device == "cpu":
        raise CannotRunError("it times CUDA kernels, so --device has to be cuda or cuda:N")
    ops = op_names(arguments.op)
    device = resolve_device(arguments.device, ops, default="cuda")
    cases = [case for op in ops for case in select(op, arguments.model, arguments.tp, arguments.quick)]
    if not cases:
        raise CannotRunError(f"no model asked for has use for {', '.join(ops)}")
    rows = measure(cases, device, runner.QUICK_REPLAYS if arguments.quick else runner.REPLAYS)
    facts = environment.collect(environment.command("python -m vllm_hotpath", arguments.argv), device)
    if arguments.json != "-":
        show(rows, facts)
    write(rows, facts, arguments)
    return 0


def select(op: str, models: list[str] | None, tp: int | None, quick: bool) -> list[BenchCase]:
    """Pick the rows to measure for an op: at the shapes of the models asked for, else the full table."""
    spec = load(stem_of(op))
    shapes: Sequence[Any] = spec.bench_shapes
    if models or tp is not None:
        chosen = (spec.shape(model, size) for model, size in placements(models, tp))
        shapes = list(dict.fromkeys(shape for shape in chosen if shape is not None))
    return [case for shape in shapes for case in spec.bench_cases(op, shape, quick)]


def measure(cases: list[BenchCase], device: torch.device, replays: int) -> list[Row]:
    """Run the cases with a progress line.

    Raises:
        CannotRunError: an op's output differs from its reference.
    """
    fitting = [case for case in cases if case.set_bytes <= runner.MAX_SET_BYTES]
    with progress() as line:
        task = line.add_task("checking and timing", total=len(fitting))
        try:
            return runner.run(fitting, device, replays, lambda row: line.advance(task))
        except runner.NumericsError as error:
            raise CannotRunError(f"wrong result, nothing was timed: {error}") from error


def show(rows: Sequence[Row], facts: dict[str, str]) -> None:
    """Print one table per op and what it was measured on."""
    console = output()
    for op in dict.fromkeys(row.op for row in rows):
        chosen = [row for row in rows if row.op == op]
        table = Table(title=op, title_justify="left")
        headings, lines = report.table(chosen)
        for heading in headings:
            table.add_column(heading, justify="right")
        for line in lines:
            table.add_row(*line)
        console.print(table)
        for row in chosen:
            for note in row.notes.values():
                console.print(f"{op} {dict(row.params)}: {note}", markup=False)
    for name in ("device", "driver", "torch", "package", "peer", "commit"):
        console.print(f"{name}: {facts[name]}", markup=False, soft_wrap=True)


def write(rows: Sequence[Row], facts: dict[str, str], arguments: argparse.Namespace) -> None:
    """Write the JSON, Markdown and SVG asked for; ``-`` prints the JSON."""
    stems = list(dict.fromkeys(stem_of(row.op) for row in rows))
    by_stem = {stem: [row for row in rows if stem_of(row.op) == stem] for stem in stems}
    if arguments.json:
        values: dict[str, Any] = {}
        for stem, chosen in by_stem.items():
            values |= report.to_json(stem, facts, chosen)
        if arguments.json == "-":
            print_json(values)
        else:
            report.write(Path(arguments.json), json.dumps(values, indent=1) + "\n")
    if arguments.svg:
        report.write(Path(arguments.svg), report.chart(", ".join(stems), facts, rows))
    if arguments.md:
        chart = Path(arguments.svg).name if arguments.svg else None
        pages = [report.markdown(load(stem), facts, rows, chart=chart) for stem, rows in by_stem.items()]
        report.write(Path(arguments.md), "\n".join(pages))
