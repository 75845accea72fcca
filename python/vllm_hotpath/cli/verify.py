"""``verify``: the ops against plain torch, as a table or JSON."""

from __future__ import annotations

import random
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from rich.markup import escape
from rich.table import Table

from vllm_hotpath import __version__
from vllm_hotpath.bench import verify
from vllm_hotpath.bench.environment import device_name
from vllm_hotpath.bench.models import placements
from vllm_hotpath.bench.ops import op_names
from vllm_hotpath.cli.console import CannotRunError, output, print_json, progress, resolve_device

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from rich.console import Console

_SHOWN_FAILURES = 3


def run(arguments: argparse.Namespace) -> int:
    """Run the selected checks; 0 if all agree."""
    ops = op_names(arguments.op)
    device = resolve_device(arguments.device, ops)
    seed = random.SystemRandom().randrange(10**9) if arguments.seed is None else arguments.seed
    units = verify.plan(ops, placements(arguments.model, arguments.tp))
    if not units:
        raise CannotRunError(f"no model asked for has use for {', '.join(ops)}")
    started = time.perf_counter()
    with _one_torch_thread(), progress() as line:
        task = line.add_task("", total=len(units))
        for unit in units:
            for label in verify.run(unit, device, seed):
                line.update(task, description=f"{unit.op} {unit.shape} {label}")
            line.advance(task)
    seconds = time.perf_counter() - started
    ok = not any(unit.failed for unit in units)
    if arguments.json:
        print_json(
            {
                "ok": ok,
                "seed": seed,
                "device": device_name(device),
                "package": __version__,
                "torch": str(torch.__version__),
                "seconds": round(seconds, 2),
                "units": [unit.summary() for unit in units],
            }
        )
    else:
        _show(output(), units, f"{device} ({device_name(device)})", seed, seconds)
    return 0 if ok else 1


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Compute references on one thread: on a busy machine torch's threads wait for each other far longer."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _show(console: Console, units: Sequence[verify.Unit], device: str, seed: int, seconds: float) -> None:
    table = Table(title=f"verify on {escape(device)}", title_justify="left")
    table.add_column("op")
    table.add_column("shape")
    table.add_column("models", overflow="fold")
    for heading in ("cases", "elements"):
        table.add_column(heading, justify="right")
    table.add_column("result")
    for unit in units:
        agreed = "within tolerance" if unit.near else "same bytes"
        result = f"[bold red]{unit.failed} failed[/]" if unit.failed else f"[green]{agreed}[/]"
        models = ", ".join(unit.placements)
        table.add_row(unit.op, str(unit.shape), models, str(unit.cases), f"{unit.elements:,}", result)
    console.print(table)
    for unit in units:
        for failure in unit.failures[:_SHOWN_FAILURES]:
            where = f"{unit.op} {unit.shape}: {failure.case}: {failure.output}: {failure.message}"
            console.print(f"[bold red]mismatch[/] {escape(where)}", soft_wrap=True)
    failed, cases = sum(unit.failed for unit in units), sum(unit.cases for unit in units)
    elements = sum(unit.elements for unit in units)
    near = sum(unit.near for unit in units)
    how = (f"all but {near:,}" if near else "all") + " compared bit by bit"
    verdict = (
        f"[bold red]{failed} of {cases} cases failed[/]" if failed else f"[green]{cases} cases passed[/]"
    )
    console.print(
        f"{verdict}; {elements:,} elements, {how}, in {seconds:.1f} s, seed {seed} "
        f"(replay with --seed {seed})"
    )
