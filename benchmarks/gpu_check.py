"""Check and measure everything on this machine's GPU and write the pages of ``benchmarks/results``.

Runs the tests marked ``gpu``, which include the sanitizers, then every benchmark. With ``--wheel`` the
package is that file, else the one of the running Python. With ``--gpus 2`` only the tests of two GPUs run.
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


def main() -> int:
    """Run all parts; the exit status is that of the first part that failed."""
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__)
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="test this wheel")
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=1, help="run the tests for so many")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", metavar="FOLDER")
    parser.add_argument("--page-only", type=Path, metavar="JUNIT_XML", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.page_only:
        write_page(arguments.page_only, arguments.out)
        return 0

    probe = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    if subprocess.run([sys.executable, "-c", probe], check=False).returncode:
        print(f"{PROG}: it needs a CUDA GPU", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as scratch:
        environment = os.environ | {"HOTPATH_REQUIRE_GPU": "1"}
        if arguments.gpus > 1:
            environment["HOTPATH_REQUIRE_GPUS"] = "1"
        if arguments.wheel:
            site = Path(scratch) / "site"
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
            subprocess.run([*pip, "--target", str(site), str(arguments.wheel)], check=True)
            paths = [str(site), environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        junit = Path(scratch) / "gpu.xml"
        out = ["--out", str(arguments.out)]
        if arguments.gpus > 1:
            return run(["-m", "pytest", "-q", "-m", "gpus", "tests"], environment)
        statuses = [
            run(
                ["-m", "pytest", "-q", "-m", "gpu and not gpus", f"--junitxml={junit}", "tests"], environment
            ),
            run(["benchmarks/gpu_check.py", "--page-only", str(junit), *out], environment),
            *(
                run([str(script.relative_to(ROOT)), *out], environment)
                for script in sorted((ROOT / "benchmarks").glob("bench_*.py"))
            ),
        ]
    return next((status for status in statuses if status), 0)


def run(arguments: list[str], environment: dict[str, str]) -> int:
    """Run a part in this Python from the repository's root."""
    print(f"== python {' '.join(arguments)}", flush=True)
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, check=False).returncode


def write_page(junit: Path, out: Path) -> None:
    """Turn pytest's JUnit XML into the page of GPU tests."""
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
    page = report.head(f"GPU tests on {facts['device']}", facts)
    table = report.markdown_table(["tests marked gpu", *outcomes], rows, text_columns=1)
    rest = "\n\n" + "\n".join(failures) + "\n" if failures else ""
    report.write(out / f"{environment.slug(device)}-tests.md", f"{page}\n{table}{rest}")


if __name__ == "__main__":
    sys.exit(main())
