"""Write ``results/<gpu>-engines.{md,json}`` from real vLLM engines, the plugin's flags on and off.

    python benchmarks/engine_page.py --commit HASH runs.jsonl

A line of the file is one engine run: ``name``, ``vllm``, ``torch``, ``gpu``, ``model``, ``flags`` (a list;
empty for stock), and ``runs`` by batch size: ``tpot_us`` (time per token, median), ``graph_us`` (GPU time of
the captured decode graph, median) and ``ids`` (a hash of all tokens). Each run with flags is held against the
stock run of its vLLM and model.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def row(run: dict[str, Any], stock: dict[str, Any], batch: str) -> str:
    """One row of the table."""
    mine, base = run["runs"][batch], stock["runs"][batch]

    def change(name: str) -> str:
        if run is stock:
            return f"{mine[name]:.1f} | "
        return f"{mine[name]:.1f} | {100 * (mine[name] / base[name] - 1):+.1f} %"

    tokens = "" if run is stock else "equal" if mine["ids"] == base["ids"] else "differ"
    flags = ", ".join(f"`{flag}`" for flag in run["flags"]) or "none"
    return f"| {flags} | {batch} | {change('graph_us')} | {change('tpot_us')} | {tokens} |"


def page(runs: list[dict[str, Any]], commit: str) -> str:
    """The whole page."""
    (gpu,) = {run["gpu"] for run in runs}
    lines = [
        f"# Real engines with the plugin, {gpu}",
        "",
        f"`python benchmarks/engine_page.py`, commit {commit}. Small models with random weights, CUDA",
        "graphs on, greedy, prompt of 128 tokens; the plugin is loaded by vLLM from the installed wheel.",
        "`graph` is the GPU time of the captured decode graph, `token` the engine's time per token; both",
        "medians, microseconds, against the stock run of the same machine. With few layers the host sets the",
        "time per token: there the graph tells.",
    ]
    for version, model in dict.fromkeys((run["vllm"], run["model"]) for run in runs):
        of = [run for run in runs if (run["vllm"], run["model"]) == (version, model)]
        stock = next(run for run in of if not run["flags"])
        lines += ["", f"## vLLM {version}, torch {stock['torch']}: {model}", ""]
        lines += ["| flags | B | graph | | token | | tokens |", "|---|---:|---:|---:|---:|---:|---|"]
        lines += [row(run, stock, batch) for run in of for batch in stock["runs"]]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Read the runs and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, help="JSON lines")
    parser.add_argument("--commit", required=True, help="of the wheel that was measured")
    arguments = parser.parse_args()
    runs = [json.loads(line) for line in arguments.runs.read_text().splitlines()]
    name = runs[0]["gpu"].removeprefix("NVIDIA ").split()[0].lower()
    (RESULTS / f"{name}-engines.md").write_text(page(runs, arguments.commit))
    record = {"commit": arguments.commit, "runs": runs}
    (RESULTS / f"{name}-engines.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
