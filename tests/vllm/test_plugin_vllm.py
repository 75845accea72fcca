"""The plugin inside a real vLLM: how it is loaded, what it leaves alone, and the bits of what it replaces."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from vllm_hotpath import envs
from vllm_hotpath.plugin import report, targets
from vllm_hotpath.plugin.features import kda_decode, moe_fp4_preamble, moe_router
from vllm_hotpath.plugin.features import mla_kv_pack as feature

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")

ROOT = Path(__file__).parents[2]
GENERIC = (
    feature.CONCAT, moe_router.RUNNER, moe_router.GROUPED, moe_router.TOPK, kda_decode.LINEAR,
    moe_fp4_preamble.QUANTIZE, moe_fp4_preamble.PREPARE, moe_fp4_preamble.RUNNER,
)  # fmt: skip
WITH_BF16_BIAS = (moe_fp4_preamble.BIAS, *moe_fp4_preamble.RELOADS)
WITH_K3 = (
    feature.DCP_LOOP, feature.K3_CONCAT, feature.K3_QUANT, feature.K3_DCP_PACK, moe_router.K3_GATE,
    kda_decode.K3_SUPPORTED, kda_decode.K3_INIT, kda_decode.K3_OP,
)  # fmt: skip


class Processes:
    """Started all at once, as importing vLLM takes most of their time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        driver = [sys.executable, "-m", "tests.vllm.driver"]
        flags = {envs.MLA_KV_PACK: "1", envs.K3_DCP_KV_PACK: "1"}
        pickled = pickle.dumps((_by_reference("loaded"), str(folder / "loaded")))
        self._started = {
            "without": self._start([*driver, "without", str(folder / "without")], {"VLLM_PLUGINS": "none"}),
            "with": self._start([*driver, "with", str(folder / "with")], {}),
            "loaded": self._start(
                [sys.executable, "-m", "vllm.model_executor.models.registry"], flags, pickled
            ),
            "spawn": self._start([*driver, "spawn", str(folder / "spawn")], {envs.MLA_KV_PACK: "1"}),
        }

    def _start(
        self, command: list[str], flags: dict[str, str], stdin: bytes = b""
    ) -> subprocess.Popen[bytes]:
        environ = {name: value for name, value in os.environ.items() if name not in envs.FLAGS}
        log = (self._folder / f"log-{len(list(self._folder.iterdir()))}").open("w+b")
        process = subprocess.Popen(
            command, cwd=ROOT, env={**environ, **flags}, stdin=subprocess.PIPE, stdout=log, stderr=log
        )
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(stdin)
        process.log = log  # type: ignore[attr-defined]
        return process

    def finish(self, name: str) -> tuple[bytes, str]:
        """What the process wrote as its result, and all that it printed."""
        process = self._started[name]
        code = process.wait(285)
        log = process.log  # type: ignore[attr-defined]
        log.seek(0)
        text = log.read().decode()
        assert code == 0, text
        return (self._folder / name).read_bytes(), text

    def stop(self) -> None:
        for process in self._started.values():
            process.kill()
            process.wait()
            process.log.close()  # type: ignore[attr-defined]


def _by_reference(name: str) -> Any:
    from tests.vllm import driver

    return getattr(driver, name)


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    found = Processes(tmp_path_factory.mktemp("processes"))
    yield found
    found.stop()


@pytest.fixture
def vllm() -> tuple[Path, str]:
    found = targets.find_vllm()
    assert found is not None
    return found


def present(vllm: tuple[Path, str]) -> tuple[targets.Target, ...]:
    return GENERIC + (WITH_K3 if has_k3(vllm) else WITH_BF16_BIAS)


def has_k3(vllm: tuple[Path, str]) -> bool:
    return not vllm[1].startswith("0.22.")


def test_probes_know_the_installed_version(vllm: tuple[Path, str]) -> None:
    for target in GENERIC + WITH_K3 + WITH_BF16_BIAS:
        found = targets.probe(target, *vllm)
        if target in present(vllm):
            assert not found.problem
            assert found.definition is not None
            assert vllm[1] in target.hashes[found.definition.hash].split(" and ")
        else:
            assert found.nothing_to_patch


def test_doctors_table_says_what_can_be_turned_on(vllm: tuple[Path, str]) -> None:
    before = set(sys.modules)
    flags = (
        envs.MLA_KV_PACK,
        envs.K3_DCP_KV_PACK,
        envs.KDA_DECODE,
        envs.MOE_ROUTER,
        envs.MOE_FP4_PREAMBLE,
    )
    generic, k3, *others = (row for row in report.table(dict.fromkeys(flags, "1")) if row["state"] != "off")
    assert (generic["state"], generic["available"]) == ("on", True)
    newest = has_k3(vllm)
    assert [(row["feature"], row["state"], row["available"], len(row["patches"])) for row in others] == [
        ("kda_decode", "on", True, 4 if newest else 1),
        ("moe_router", "on", True, 4 if newest else 3),
        # Level 1.
        ("moe_fp4_preamble", "on", True, 2 if newest else 6),
    ]
    assert (k3["state"], k3["available"]) == (("on", True) if newest else ("stock", False))
    assert len(generic["patches"]) == (4 if newest else 1)
    assert not {name for name in set(sys.modules) - before if name.split(".")[0] == "vllm"}


def test_edited_sources_are_another_version(vllm: tuple[Path, str], tmp_path: Path) -> None:
    root, version = vllm
    for target in present(vllm):
        stem = Path(*target.source_module.split(".")[1:]).with_suffix(".py")
        source = (root / stem).read_text()
        found = targets.probe(target, root, version).definition
        assert found is not None
        (tmp_path / stem).parent.mkdir(parents=True, exist_ok=True)
        name = found.name.rpartition(".")[2]
        before = "".join(source.splitlines(keepends=True)[: found.line - 1])
        start = source.index(f"def {name}(", len(before)) + len(f"def {name}(")
        head, tail = source[:start], source[start:]

        (tmp_path / stem).write_text(f"# a new first line\n{source}")
        assert not targets.probe(target, tmp_path, version).problem
        (tmp_path / stem).write_text(f"{head} {tail}")
        drifted = targets.probe(target, tmp_path, version)
        assert f"{target.source_module}.{found.name} of vLLM {version} has another source" in drifted.problem
        assert not targets.probe(target, tmp_path, version, force=True).problem
        (tmp_path / stem).write_text(f"{head}extra, {tail}")
        drifted = targets.probe(target, tmp_path, version, force=True)
        assert "has an unknown signature (extra, " in drifted.problem
        (tmp_path / stem).write_text(source.replace(f"def {name}(", f"def {name}_2("))
        assert targets.probe(target, tmp_path, version).nothing_to_patch


def test_without_flags_every_object_is_stock(processes: Processes) -> None:
    # The process without the plugin loads it afterwards, compares identities, and then sets flags: next test.
    without, _ = processes.finish("without")
    with_plugin, _ = processes.finish("with")
    assert len(json.loads(without)) > 100
    assert json.loads(with_plugin) == json.loads(without)


def test_what_the_flags_patch_gives_the_bits_of_stock(processes: Processes, vllm: tuple[Path, str]) -> None:
    _, log = processes.finish("without")
    assert len(re.findall(r"mla_kv_pack: on: MLACommon", log)) == 1
    assert len(re.findall(r"kda_decode: on: KimiGatedDeltaNetAttention\._forward", log)) == 1
    assert len(re.findall(r"moe_router: on: MoERunner\._forward_impl, ", log)) == 1
    k3 = "k3_dcp_kv_pack: on: Kimi-K3 DCP chunked-context KV pack: fused (VLLM_K3_DCP_FUSED_KV_PACK=1)"
    assert log.count(k3) == (1 if has_k3(vllm) else 0)
    assert len(re.findall(r"moe_fp4_preamble: on: _quantize_input, MoERunner\._forward_impl, ", log)) == 1


def test_vllms_registry_process_and_its_fork_are_patched(
    processes: Processes, vllm: tuple[Path, str]
) -> None:
    result, log = processes.finish("loaded")
    assert pickle.loads(result) == "loaded"
    # Once in the process, once in its fork.
    assert len(re.findall(r"mla_kv_pack: on: MLACommon", log)) == 2, log
    k3 = re.findall(r"k3_dcp_kv_pack: (\w+): ", log)
    # Where Kimi-K3 exists, its line comes with its module, which is not imported there.
    assert k3 == ([] if has_k3(vllm) else ["stock", "stock"])


def test_a_spawned_process_loads_the_plugin_and_strict_raises_there(processes: Processes) -> None:
    assert json.loads(processes.finish("spawn")[0]) == "spawned"
