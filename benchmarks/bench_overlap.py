"""Fork and join: what they cost the host, and what a replayed graph gains from them.

Peers are torch's own ways to do the same: ``Stream.wait_stream`` twice, and events made beforehand.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from rich.table import Table

from bench_call_overhead import host_ns
from common import RESULTS, ROOT, CannotRunError, environment, fail, report, resolve_device
from vllm_hotpath.bench import timing
from vllm_hotpath.cli.console import output, print_json
from vllm_hotpath.overlap import ForkJoin, run_overlapped

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PROG = "python benchmarks/bench_overlap.py"
CHAINS = (1, 4, 16, 60)
_BATCHES, _REPLAYS = 60, 31
_KERNEL_US = 1.2


class Host(NamedTuple):
    """Host nanoseconds of a fork and a join: median, 10th and 90th percentile over batches of 200."""

    what: str
    ns: float
    p10: float
    p90: float


class Chain(NamedTuple):
    """Device microseconds of two chains of ``kernels`` dependent kernels each, in one replayed graph."""

    kernels: int
    in_sequence: float
    ours: float
    ours_main_first: float
    wait_stream: float
    events: float


class Torch:
    """A fork and join as torch's own objects do it."""

    def __init__(self) -> None:
        self.side, self.forked, self.done = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event()

    def wait_stream(self, main_fn: Callable[[], object], side_fn: Callable[[], object]) -> None:
        """Run both, with ``wait_stream`` at either end."""
        main = torch.cuda.current_stream()
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            side_fn()
        main_fn()
        main.wait_stream(self.side)

    def events(self, main_fn: Callable[[], object], side_fn: Callable[[], object]) -> None:
        """Run both, with an event at either end."""
        self.forked.record()
        with torch.cuda.stream(self.side):
            self.forked.wait()
            side_fn()
            self.done.record()
        main_fn()
        self.done.wait()


def host_costs(device: torch.device, batches: int) -> list[Host]:
    """Forks and joins with nothing in them, on a stream of torch's pool."""
    theirs, fork = Torch(), ForkJoin(device)

    def nothing() -> None:
        pass

    def ours() -> None:
        with fork.side():
            pass
        fork.join()

    def wait_stream() -> None:
        main = torch.cuda.current_stream()
        theirs.side.wait_stream(main)
        main.wait_stream(theirs.side)

    def events() -> None:
        theirs.forked.record()
        theirs.forked.wait(theirs.side)
        theirs.done.record(theirs.side)
        theirs.done.wait()

    def fork_and_join() -> None:
        fork.fork()
        fork.join()

    calls: list[tuple[str, Callable[[], object]]] = [
        ("empty Python call", nothing),
        ("fork(), join()", fork_and_join),
        ("torch: events made beforehand", events),
        ("torch: wait_stream twice", wait_stream),
        ("with side(), join()", ours),
        ("torch: events, with torch.cuda.stream", lambda: theirs.events(nothing, nothing)),
        ("torch: wait_stream, with torch.cuda.stream", lambda: theirs.wait_stream(nothing, nothing)),
        ("run_overlapped", lambda: run_overlapped(nothing, nothing, device=device)),
    ]
    with torch.cuda.stream(torch.cuda.Stream(device)):
        return [Host(what, *host_ns(call, device, batches)) for what, call in calls]


def chain_times(device: torch.device, kernels: int) -> Chain:
    """Time two chains in every form, after a check that both ran."""
    theirs = Torch()
    a, b = torch.zeros(64, device=device), torch.zeros(64, device=device)

    def chain(x: torch.Tensor) -> Callable[[], object]:
        def run() -> None:
            for _ in range(kernels):
                x.add_(1)

        return run

    one, other = chain(a), chain(b)

    def in_sequence() -> None:
        one()
        other()

    forms: dict[str, Callable[[], object]] = {
        "in_sequence": in_sequence,
        "ours": lambda: run_overlapped(one, other, device=device),
        "ours_main_first": lambda: run_overlapped(one, other, side_first=False, device=device),
        "wait_stream": lambda: theirs.wait_stream(one, other),
        "events": lambda: theirs.events(one, other),
    }
    for name, form in forms.items():
        a.zero_()
        b.zero_()
        form()
        if not bool(a.eq(kernels).all() and b.eq(kernels).all()):
            raise AssertionError(f"{name}: a chain did not run")
    subjects = {name: timing.Subject([form]) for name, form in forms.items()}
    # What a call lasts decides how often it is in a graph, and is told in bytes moved at copy speed.
    as_bytes = int(2 * kernels * _KERNEL_US * 4e6)
    times = timing.measure(subjects, bytes_moved=as_bytes, replays=_REPLAYS, device=device)
    return Chain(kernels, **{name: times[name].median_us for name in forms})


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table or JSON, and write ``<gpu>-overlap.{md,json}``."""
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__)
    parser.add_argument("--batches", type=int, default=_BATCHES, help="batches of 200 (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON and write no files")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: benchmarks/results")
    arguments = parser.parse_args(argv)
    if arguments.batches < 2:
        parser.error("--batches: expected at least 2")
    try:
        device = resolve_device(None, (), default="cuda")
        if device.type != "cuda":
            raise CannotRunError("it needs a CUDA GPU")
    except CannotRunError as error:
        return fail(f"{PROG}: {error}")
    host = host_costs(device, arguments.batches)
    chains = [chain_times(device, kernels) for kernels in CHAINS]
    facts = environment.collect(PROG, device, ROOT)
    values = {
        "generated": f"generated by: {facts['command']}",
        "environment": facts,
        "host": [result._asdict() for result in host],
        "chains": [result._asdict() for result in chains],
    }
    if arguments.json:
        print_json(values)
        return 0
    for headings, rows in ((_HOST, _host_rows(host)), (_CHAINS, _chain_rows(chains))):
        table = Table()
        for i, heading in enumerate(headings):
            table.add_column(heading, justify="right" if i else "left")
        for row in rows:
            table.add_row(*row)
        output().print(table, markup=False)
    folder = arguments.out or RESULTS
    name = f"{environment.slug(device)}-overlap"
    report.write(folder / f"{name}.json", json.dumps(values, indent=1) + "\n")
    report.write(folder / f"{name}.md", page(facts, host, chains))
    return 0


_HOST = ("a fork and a join, nothing in them", "us", "p10-p90")
_CHAINS = (
    "kernels in each of two chains",
    "in sequence, us",
    "run_overlapped",
    "main first",
    "wait_stream",
    "torch events",
    "run_overlapped / in sequence",
)


def _host_rows(results: Sequence[Host]) -> list[list[str]]:
    return [[r.what, f"{r.ns / 1e3:.2f}", f"{r.p10 / 1e3:.2f}-{r.p90 / 1e3:.2f}"] for r in results]


def _chain_rows(results: Sequence[Chain]) -> list[list[str]]:
    return [[str(r[0]), *(f"{us:.2f}" for us in r[1:]), f"{r.ours / r.in_sequence:.2f}"] for r in results]


def page(facts: dict[str, str], host: Sequence[Host], chains: Sequence[Chain]) -> str:
    """The generated Markdown page."""
    head = report.head(f"Fork and join on {facts['device']}", facts)
    costs = (
        "Host time of an eager fork and join on a stream of torch's pool, the Python call included: median, "
        "10th and 90th percentile over batches of 200 that start on an idle device."
    )
    graphs = (
        "Device time of two chains of small dependent kernels in one replayed CUDA graph, the median of "
        f"{_REPLAYS} replays of graphs that hold the pair many times over."
    )
    return (
        f"{head}\n{costs}\n\n{report.markdown_table(_HOST, _host_rows(host), text_columns=1)}\n"
        f"{graphs}\n\n{report.markdown_table(_CHAINS, _chain_rows(chains), text_columns=1)}"
    )


if __name__ == "__main__":
    sys.exit(main())
