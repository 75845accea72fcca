"""Check and measure everything on this machine's GPU and write the pages of ``benchmarks/results``.

Runs the tests marked ``gpu``, then the sanitizers, then every benchmark; with ``--part`` some of these, for a
machine that is there for a short time. With ``--wheel`` the package is that file, else the one of the running
Python. With ``--gpus 2`` only the tests of two GPUs run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROG = "python benchmarks/gpu_check.py"


SANITIZERS = "tests/test_sanitizer.py"
BENCHMARKS = {
    path.stem.removeprefix("bench_"): path for path in sorted(Path(__file__).parent.glob("bench_*.py"))
}


def main() -> int:
    """Run all parts; the exit status is that of the first part that failed."""
    parts = ("tests", "sanitizers", *BENCHMARKS)
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__)
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="test this wheel")
    parser.add_argument(
        "--part",
        action="append",
        choices=parts,
        metavar="PART",
        help=f"{', '.join(parts)}; repeatable (default: all)",
    )
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=1, help="run the tests for so many")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", metavar="FOLDER")
    parser.add_argument("--page-only", nargs=2, metavar=("PART", "JUNIT_XML"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.page_only:
        part, junit = arguments.page_only
        write_page(part, Path(junit), arguments.out)
        return 0

    probe = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    if subprocess.run([sys.executable, "-c", probe], check=False).returncode:
        print(f"{PROG}: it needs a CUDA GPU", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as scratch:
        environment = os.environ | {"HOTPATH_REQUIRE_GPU": "1"}
        if arguments.wheel:
            site = Path(scratch) / "site"
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
            subprocess.run([*pip, "--target", str(site), str(arguments.wheel)], check=True)
            paths = [str(site), environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        if arguments.gpus > 1:
            environment["HOTPATH_REQUIRE_GPUS"] = "1"
            return run(["-m", "pytest", "-q", "-m", "gpus", "tests"], environment)
        asked = [part for part in parts if part in (arguments.part or parts)]
        statuses = [run_part(part, Path(scratch), arguments.out, environment) for part in asked]
    return next((status for status in statuses if status), 0)


def run_part(part: str, scratch: Path, out: Path, environment: dict[str, str]) -> int:
    """Run one part, which writes its page."""
    if part in BENCHMARKS:
        return run([str(BENCHMARKS[part].relative_to(ROOT)), "--out", str(out)], environment)
    junit = scratch / f"{part}.xml"
    which = [SANITIZERS] if part == "sanitizers" else ["tests", f"--ignore={SANITIZERS}"]
    status = run(["-m", "pytest", "-q", "-m", "gpu and not gpus", f"--junitxml={junit}", *which], environment)
    page = run(["benchmarks/gpu_check.py", "--page-only", part, str(junit), "--out", str(out)], environment)
    return status or page


def run(arguments: list[str], environment: dict[str, str]) -> int:
    """Run a part in this Python from the repository's root."""
    print(f"== python {' '.join(arguments)}", flush=True)
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, check=False).returncode


def write_page(part: str, junit: Path, out: Path) -> None:
    """Turn pytest's JUnit XML into the page of the GPU tests or of the sanitizers."""
    import torch

    from vllm_hotpath.bench import environment, report

    device = torch.device("cuda", torch.cuda.current_device())
    facts = environment.collect("make gpu-check", device, ROOT)
    counts: dict[str, Counter[str]] = {}
    failures: list[str] = []
    for case in ET.parse(junit).getroot().iter("testcase"):
        outcome = "passed"
        for tag, name in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
            if case.find(tag) is not None:
                outcome = name
        file = case.get("classname", "").rpartition(".")[2]
        counts.setdefault(file, Counter())[outcome] += 1
        if outcome != "passed":
            reason = next(iter(case)).get("message", "").splitlines()
            failures.append(f"- {outcome}: `{file}::{case.get('name')}`: {reason[0] if reason else ''}")
    outcomes = ("passed", "failed", "skipped")
    rows = [[file, *(str(count[outcome]) for outcome in outcomes)] for file, count in sorted(counts.items())]
    total = Counter[str]()
    for count in counts.values():
        total.update(count)
    rows.append(["all", *(str(total[outcome]) for outcome in outcomes)])
    title = "GPU tests" if part == "tests" else "Kernels under compute-sanitizer"
    page = report.head(f"{title} on {facts['device']}", facts)
    table = report.markdown_table(["tests marked gpu", *outcomes], rows, text_columns=1)
    rest = "\n\n" + "\n".join(failures) + "\n" if failures else ""
    report.write(out / f"{environment.slug(device)}-{part}.md", f"{page}\n{table}{rest}")


if __name__ == "__main__":
    sys.exit(main())
