"""The benchmark core of the installed package, under the names that the scripts here use."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_hotpath._registry import OPS
from vllm_hotpath.bench import environment, report, runner
from vllm_hotpath.bench.ops import load
from vllm_hotpath.cli.bench import measure, select, show
from vllm_hotpath.cli.console import CannotRunError, fail, resolve_device

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"

__all__ = [
    "RESULTS",
    "ROOT",
    "CannotRunError",
    "environment",
    "fail",
    "main",
    "report",
    "resolve_device",
    "runner",
]


def main(stem: str, description: str, argv: Sequence[str] | None = None) -> int:
    """Measure every op of a stem at its full table and write ``results/<gpu>-<stem>.{md,json,svg}``."""
    parser = argparse.ArgumentParser(prog=f"python benchmarks/bench_{stem}.py", description=description)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and replays")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="where to write (default: benchmarks/results)"
    )
    arguments = parser.parse_args(argv)
    try:
        device = resolve_device(None, OPS[stem], default="cuda")
        cases = [case for op in OPS[stem] for case in select(op, None, None, arguments.quick)]
        rows = measure(cases, device, runner.QUICK_REPLAYS if arguments.quick else runner.REPLAYS)
    except CannotRunError as error:
        return fail(f"{parser.prog}: {error}")
    # Where the pages go is the caller's affair, not part of how to make them again.
    command = f"{parser.prog} --quick" if arguments.quick else parser.prog
    facts = environment.collect(command, device, ROOT)
    show(rows, facts)
    name = f"{environment.slug(device)}-{stem}"
    report.write_pages(arguments.out or RESULTS, name, load(stem), facts, rows)
    return 0
