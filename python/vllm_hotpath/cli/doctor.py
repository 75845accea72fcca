"""``doctor``: what is installed and what runs here. Needs no torch and starts no CUDA through it."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from vllm_hotpath import __version__, _core
from vllm_hotpath._registry import OPS
from vllm_hotpath.cli.console import output, print_json
from vllm_hotpath.plugin import report

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

PLUGIN_GROUP = "vllm.general_plugins"


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; 0 if the ops can be used here, on the CPU at least."""
    found = examine()
    if arguments.json:
        print_json(found)
    else:
        _show(output(), found)
    return 0 if found["usable"] else 1


def examine() -> dict[str, Any]:
    """Gather what ``doctor`` shows, as JSON values; ``problems`` says why an installation is not usable."""
    build = _core.build_info()
    cuda = _core.cuda_info()
    torch_found = _torch()
    problems = [torch_found["error"]] if torch_found["error"] else _self_test()
    return {
        "usable": not problems,
        "problems": problems,
        "package": {"version": __version__, "targets": build["targets"], "nvcc": build["nvcc"]},
        "kernels": build["kernels"],
        "python": platform.python_version(),
        "torch": torch_found,
        "cuda": cuda,
        "ops": [_op(op, stem, cuda, problems) for stem, ops in OPS.items() for op in ops],
        "vllm": _version("vllm"),
        "plugin": any(entry.name == "vllm_hotpath" for entry in metadata.entry_points(group=PLUGIN_GROUP)),
        "features": report.table(),
    }


def _torch() -> dict[str, Any]:
    found: dict[str, Any] = {"version": None, "cuda": None, "exchange_api": {}, "error": None}
    try:
        import torch
    except ModuleNotFoundError as error:
        found["error"] = (
            "torch is not installed" if error.name == "torch" else f"torch does not import: {error}"
        )
        return found
    except (ImportError, OSError) as error:
        found["error"] = f"torch does not import: {error}"
        return found
    found["version"], found["cuda"] = str(torch.__version__), torch.version.cuda
    for type_ in (torch.Tensor, torch.nn.Parameter):
        version = _core.exchange_api_version(type_)
        found["exchange_api"][type_.__name__] = None if version is None else ".".join(map(str, version))
    if found["exchange_api"]["Tensor"] is None:
        found["error"] = (
            f"torch {torch.__version__} has no DLPack C exchange API; torch 2.10 and newer have it"
        )
    return found


def _self_test() -> list[str]:
    """Run every op on the CPU at the smallest shape that a model has for it; what went wrong, in words."""
    import torch

    from vllm_hotpath.bench import verify
    from vllm_hotpath.bench.models import placements
    from vllm_hotpath.bench.ops import op_names

    by_size = sorted(placements(), key=lambda placement: placement[0].heads_per_rank(placement[1]))
    problems = []
    for unit in (unit for op in op_names() for unit in verify.plan([op], by_size)[:1]):
        for _ in verify.run(unit, torch.device("cpu"), seed=0):
            pass
        problems += [f"{unit.op} on the CPU, {f.case}: {f.output}: {f.message}" for f in unit.failures[:1]]
    return problems


def _op(op: str, stem: str, cuda: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    reasons: dict[str, str | None] = {"cpu": next(iter(problems), None)}
    for device in cuda["devices"]:
        reasons[f"cuda:{device['index']}"] = reasons["cpu"] or _core.unsupported_reason(op, device["index"])
    devices = {
        name: {"supported": reason is None, "reason": reason or ""} for name, reason in reasons.items()
    }
    return {"op": op, "stem": stem, "devices": devices}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _show(console: Console, found: dict[str, Any]) -> None:
    package, torch_found, cuda = found["package"], found["torch"], found["cuda"]
    api = ", ".join(f"{name} {version or 'missing'}" for name, version in torch_found["exchange_api"].items())
    plugin = f"registered in {PLUGIN_GROUP}" if found["plugin"] else f"not registered in {PLUGIN_GROUP}"
    facts = {
        "vllm-hotpath": package["version"],
        "kernels for": f"{', '.join(package['targets']) or 'no GPU'} (nvcc {package['nvcc']})",
        "python": found["python"],
        "torch": torch_found["version"] or torch_found["error"],
        "torch CUDA": torch_found["cuda"] or "none",
        "DLPack exchange API": api or "-",
        "CUDA driver": cuda["driver"] or cuda["error"] or "none",
        "vLLM": found["vllm"] or "not installed",
        "vLLM plugin": plugin,
    }
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in facts.items():
        table.add_row(f"[bold]{escape(name)}[/]", escape(str(value)))
    console.print(table)
    if cuda["devices"]:
        console.print(_devices(cuda["devices"]))
    ops = Table(title="ops", title_justify="left")
    for heading in ("op", "stem", "device", "runs"):
        ops.add_column(heading)
    for entry in found["ops"]:
        for name, support in entry["devices"].items():
            runs = "[green]yes[/]" if support["supported"] else f"[yellow]no:[/] {escape(support['reason'])}"
            ops.add_row(entry["op"], entry["stem"], name, runs)
    console.print(ops)
    console.print(_features(found["features"]))
    for problem in found["problems"]:
        console.print(f"[bold red]problem:[/] {escape(problem)}", soft_wrap=True)
    if found["usable"]:
        console.print("[green]usable[/]")


def _features(features: list[dict[str, Any]]) -> Table:
    table = Table(title="plugin features", title_justify="left")
    for heading in ("feature", "flags", "now", "can be turned on"):
        table.add_column(heading, overflow="fold")
    for entry in features:
        flags = [f"{name}={'(unset)' if value is None else value}" for name, value in entry["flags"].items()]
        now = f"{entry['state']}: {entry['reason']}" if entry["reason"] else entry["state"]
        can = (
            "[green]yes[/]" if entry["available"] else f"[yellow]no:[/] {escape(entry['unavailable_reason'])}"
        )
        table.add_row(entry["feature"], escape("\n".join(flags)), escape(now), can)
    return table


def _devices(devices: list[dict[str, Any]]) -> Table:
    table = Table(title="GPUs", title_justify="left")
    for heading in ("device", "name", "capability", "SMs", "L2 MiB", "memory GiB", "kernels"):
        table.add_column(heading)
    for device in devices:
        table.add_row(
            f"cuda:{device['index']}",
            escape(device["name"]),
            ".".join(map(str, device["capability"])),
            str(device["sms"]),
            f"{device['l2_bytes'] / 2**20:.0f}",
            f"{device['memory_bytes'] / 2**30:.0f}",
            device["target"] or "none in this build",
        )
    return table
