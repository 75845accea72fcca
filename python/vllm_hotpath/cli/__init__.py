"""The command line: ``python -m vllm_hotpath doctor | verify | bench``.

Arguments are parsed here; each command is a module with ``run(arguments) -> exit status``, imported when it
is asked for. Exit status: 0 all well, 1 a mismatch or not able to, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import re
import sys
from typing import TYPE_CHECKING

from vllm_hotpath import __version__
from vllm_hotpath._registry import OPS
from vllm_hotpath.bench.models import MODELS, placements

if TYPE_CHECKING:
    from collections.abc import Sequence

PROG = "python -m vllm_hotpath"

_EXAMPLES = f"""\
examples:
  {PROG} doctor
  {PROG} verify --model kimi-k3 --tp 8
  {PROG} bench --model kimi-k2.6 --tp 4 --quick

exit status: 0 all well, 1 a mismatch or not able to, 2 wrong usage
"""
_DOCTOR = f"""\
Show what is installed and what runs here: package, torch, driver, GPUs, ops, vLLM. Works without torch and
without a GPU. Exit status 1 if the installation cannot be used.

examples:
  {PROG} doctor
  {PROG} doctor --json
"""
_VERIFY = f"""\
Check the ops against plain torch, with fresh random inputs at the shapes of real models: bit by bit, and
where an op adds up, its sums within the op's tolerance. Exit status 1 if one element is wrong.

examples:
  {PROG} verify
  {PROG} verify --model kimi-k3 --model kimi-linear --device cuda
  {PROG} verify --op mla_kv_concat_quant_fp8 --tp 8 --seed 1234
"""
_BENCH = f"""\
Time the ops on a GPU with CUDA graphs: against a floor that only moves the op's bytes, the torch ops and
vLLM's own op. vLLM's op comes from an installed vLLM, or from the libraries named in HOTPATH_PEER_LIB.

examples:
  {PROG} bench --quick
  {PROG} bench --model kimi-k3 --tp 8 --md bench.md --svg bench.svg
  {PROG} bench --op mla_kv_concat_quant_fp8 --json - | jq .
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Raises:
        SystemExit: with status 2 for wrong usage, 0 for ``--help`` and ``--version``.
    """
    parser, commands = _parsers()
    arguments = parser.parse_args(argv)
    if arguments.command != "doctor":
        try:
            placements(arguments.model, arguments.tp)
        except ValueError as error:
            commands[arguments.command].error(str(error))
    arguments.argv = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        return 130


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command == "doctor":
        from vllm_hotpath.cli import doctor

        return doctor.run(arguments)
    from vllm_hotpath.cli.console import CannotRunError, fail

    try:
        if arguments.command == "verify":
            from vllm_hotpath.cli import verify

            return verify.run(arguments)
        from vllm_hotpath.cli import bench

        return bench.run(arguments)
    except CannotRunError as error:
        return fail(f"{PROG} {arguments.command}: {error}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return fail(f"{PROG} {arguments.command}: torch is not installed; it needs torch 2.10 or newer")


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    def formatter(prog: str) -> argparse.HelpFormatter:
        return argparse.RawDescriptionHelpFormatter(prog, max_help_position=32)

    parser = argparse.ArgumentParser(
        prog=PROG,
        description="GPU ops for the hot paths of Kimi and DeepSeek models in vLLM.",
        epilog=_EXAMPLES,
        formatter_class=formatter,
    )
    parser.add_argument("--version", action="version", version=f"vllm-hotpath {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands = {
        name: subparsers.add_parser(name, help=summary, description=text, formatter_class=formatter)
        for name, summary, text in (
            ("doctor", "show what is installed and what runs here", _DOCTOR),
            ("verify", "check every op against torch on this machine", _VERIFY),
            ("bench", "time the ops on this GPU", _BENCH),
        )
    }
    doctor, verify, bench = commands.values()
    doctor.add_argument("--json", action="store_true", help="print JSON and nothing else")
    _add_selection(verify, "cuda if there is a GPU that this build has kernels for, else cpu")
    verify.add_argument(
        "--seed", type=_seed, help="seed of the inputs, to replay a failure (default: a fresh one)"
    )
    verify.add_argument("--json", action="store_true", help="print JSON and nothing else")
    _add_selection(bench, "cuda, which it needs")
    bench.add_argument("--quick", action="store_true", help="fewer sizes and replays")
    bench.add_argument("--json", metavar="FILE", help="write the results as JSON; - for standard output")
    bench.add_argument("--md", metavar="FILE", help="write a Markdown page")
    bench.add_argument("--svg", metavar="FILE", help="write a chart of the time over the floor")
    return parser, commands


def _add_selection(parser: argparse.ArgumentParser, default_device: str) -> None:
    names = list(dict.fromkeys([*OPS, *(op for ops in OPS.values() for op in ops)]))
    parser.add_argument(
        "--model",
        action="append",
        choices=list(MODELS),
        help="a model to take the shapes of; repeatable (default: all)",
    )
    parser.add_argument(
        "--tp", type=int, metavar="N", help="tensor-parallel size (default: all that suit the model)"
    )
    parser.add_argument(
        "--op",
        action="append",
        choices=names,
        metavar="NAME",
        help=f"an op or a group: {', '.join(names)}; repeatable",
    )
    parser.add_argument("--device", type=_device, help=f"cpu, cuda or cuda:N (default: {default_device})")


def _device(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"expected cpu, cuda or cuda:N, got {text!r}")
    return text


def _seed(text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text):
        raise argparse.ArgumentTypeError(f"expected an integer from 0 to 999999999, got {text!r}")
    return int(text)
