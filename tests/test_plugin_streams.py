"""The features that overlap two streams: how they register, refuse and step aside. Without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests import fake_vllm
from tests.fake_vllm import MLA, finders, wrapped_once
from vllm_hotpath import plugin
from vllm_hotpath.plugin import report, targets
from vllm_hotpath.plugin.features import mla_two_stream, moe_shared_experts

if TYPE_CHECKING:
    from tests.fake_vllm import Process

BACKEND = "vllm.v1.attention.backend"
SHARED = "vllm.model_executor.layers.fused_moe.runner.shared_experts"
RUNNER = "vllm.model_executor.layers.fused_moe.runner.moe_runner"

TARGETS = (
    mla_two_stream.FORWARD,
    mla_two_stream.WRITE_OP,
    mla_two_stream.ATTENTION_OP,
    mla_two_stream.UPDATE,
    mla_two_stream.WRITE,
    moe_shared_experts.SYNC,
    moe_shared_experts.APPLY,
    moe_shared_experts.RUN,
    moe_shared_experts.ROUTED,
)


def function(target: targets.Target, body: str) -> str:
    name, indent = target.names[0].rpartition(".")[2], "    " if "." in target.names[0] else ""
    return f"{indent}def {name}({target.signatures[-1]}):\n{indent}    {body}\n\n"


SOURCES = {
    MLA: (
        f"{function(mla_two_stream.WRITE_OP, 'pass')}{function(mla_two_stream.ATTENTION_OP, 'pass')}"
        f"class MLAAttention:\n{function(mla_two_stream.FORWARD, 'return self.impl.attend()')}"
        f"{function(mla_two_stream.UPDATE, 'pass')}"
    ),
    BACKEND: f"class MLAAttentionImpl:\n{function(mla_two_stream.WRITE, 'pass')}",
    SHARED: (
        f"class SharedExperts:\n{function(moe_shared_experts.SYNC, 'pass')}"
        f"{function(moe_shared_experts.APPLY, 'pass')}"
    ),
    RUNNER: (
        f"class MoERunner:\n{function(moe_shared_experts.RUN, 'pass')}"
        f"{function(moe_shared_experts.ROUTED, 'pass')}"
    ),
}
NATIVE = {SHARED: f"class SharedExperts:\n{function(moe_shared_experts.NATIVE, 'pass')}"}

WHAT = "cache write beside the absorbed query, in captured decode (MLAAttention.forward_impl)"


@pytest.fixture
def streams(process: Process, monkeypatch: pytest.MonkeyPatch) -> Process:
    fake_vllm.write(process.root, SOURCES)
    for target in TARGETS:
        found = targets.probe(target, process.root / "vllm", "0").definition
        assert found is not None, target
        monkeypatch.setitem(target.hashes, found.hash, "stand-in")
    return process


def edit(process: Process, module: str, old: str, new: str) -> None:
    assert old in SOURCES[module]
    fake_vllm.write(process.root, {module: SOURCES[module].replace(old, new)})


# ---- Two-stream MLA decode ----


def test_two_stream_patches_one_method(streams: Process) -> None:
    streams.set(VLLM_MLA_TWO_STREAM_DECODE="1")
    plugin.register()
    assert wrapped_once(fake_vllm.load(MLA).MLAAttention.forward_impl)
    assert not hasattr(fake_vllm.load(BACKEND).MLAAttentionImpl.do_kv_cache_update, "__wrapped__")
    assert streams.lines == [f"mla_two_stream: on: {WHAT}"]


@pytest.mark.parametrize("flag", ["0", ""])
def test_two_stream_is_off_by_default(streams: Process, flag: str) -> None:
    streams.set(VLLM_MLA_TWO_STREAM_DECODE=flag)
    plugin.register()
    assert not finders()
    assert not hasattr(fake_vllm.load(MLA).MLAAttention.forward_impl, "__wrapped__")


RELIED_ON = [
    (MLA, "def unified_mla_kv_cache_update(", "def unified_mla_kv_cache_update( "),
    (MLA, "def unified_mla_attention_with_output(", "def unified_mla_attention_with_output( "),
    (MLA, "def update_kv_cache(", "def update_kv_cache( "),
    (BACKEND, "def do_kv_cache_update(", "def do_kv_cache_update( "),
]


@pytest.mark.parametrize(("module", "old", "new"), RELIED_ON)
def test_what_two_stream_relies_on_has_to_be_known(streams: Process, module: str, old: str, new: str) -> None:
    edit(streams, module, old, new)
    streams.set(VLLM_MLA_TWO_STREAM_DECODE="1")
    plugin.register()
    assert "has another source (" in streams.lines[0]
    assert old[4:-1] in streams.lines[0]
    assert not hasattr(fake_vllm.load(MLA).MLAAttention.forward_impl, "__wrapped__")

    fake_vllm.forget()
    report._reported.clear()
    streams.set(VLLM_HOTPATH_FORCE="1")
    plugin.register()
    assert wrapped_once(fake_vllm.load(MLA).MLAAttention.forward_impl)


@pytest.mark.parametrize(("module", "old", "new"), RELIED_ON)
def test_force_accepts_no_other_signature(streams: Process, module: str, old: str, new: str) -> None:
    edit(streams, module, old, f"{old}extra, ")
    streams.set(VLLM_MLA_TWO_STREAM_DECODE="1", VLLM_HOTPATH_FORCE="1")
    plugin.register()
    assert "has an unknown signature (extra, " in streams.lines[0]
    assert not hasattr(fake_vllm.load(MLA).MLAAttention.forward_impl, "__wrapped__")


def test_what_an_older_version_does_not_have_is_not_missed(streams: Process) -> None:
    edit(streams, MLA, "def update_kv_cache(", "def another_name(")
    streams.set(VLLM_MLA_TWO_STREAM_DECODE="1", VLLM_HOTPATH_STRICT="1")
    plugin.register()
    assert wrapped_once(fake_vllm.load(MLA).MLAAttention.forward_impl)


@pytest.mark.parametrize(
    ("decodes", "actual", "expected"),
    [(1, 1, True), (512, 512, True), (513, 513, False), (0, 0, False), (2, 3, False), (None, 4, False)],
)
def test_only_batches_of_decodes_up_to_the_limit_overlap(decodes: Any, actual: int, expected: bool) -> None:
    metadata = SimpleNamespace(num_decode_tokens=decodes, num_actual_tokens=actual)
    assert mla_two_stream.is_decode(metadata) is expected
    assert not mla_two_stream.is_decode(None)


# ---- Shared experts ----


def shared_methods() -> list[Any]:
    experts = fake_vllm.load(SHARED).SharedExperts
    return [experts.maybe_sync_shared_experts_stream, experts.apply]


def test_shared_experts_are_native_where_vllm_launches_them_itself(streams: Process) -> None:
    fake_vllm.write(streams.root, NATIVE)
    streams.set(VLLM_MOE_SHARED_EXPERTS_TWO_STREAM="1", VLLM_HOTPATH_STRICT="1", VLLM_HOTPATH_FORCE="1")
    plugin.register()
    assert streams.lines == ["moe_shared_experts: native upstream: SharedExperts.maybe_forward_async"]
    assert not streams.warnings
    experts = vars(fake_vllm.load(SHARED).SharedExperts)
    assert not any(hasattr(value, "__wrapped__") for value in experts.values())
    row = next(row for row in report.table() if row["feature"] == "moe_shared_experts")
    assert (row["state"], row["available"], row["patches"]) == ("native upstream", True, [])


def test_shared_experts_refuse_with_the_reason(streams: Process) -> None:
    streams.set(VLLM_MOE_SHARED_EXPERTS_TWO_STREAM="1")
    plugin.register()
    assert streams.lines == [f"moe_shared_experts: stock: {moe_shared_experts._REFUSAL}"]
    assert not any(hasattr(method, "__wrapped__") for method in shared_methods())
    row = next(row for row in report.table() if row["feature"] == "moe_shared_experts")
    assert (row["state"], row["available"]) == ("stock", False)
    assert row["unavailable_reason"] == moe_shared_experts._REFUSAL

    streams.set(VLLM_HOTPATH_STRICT="1")
    with pytest.raises(plugin.FeatureUnavailableError, match="no launch order"):
        plugin.register()


def test_shared_experts_are_patched_when_forced(streams: Process) -> None:
    streams.set(VLLM_MOE_SHARED_EXPERTS_TWO_STREAM="1", VLLM_HOTPATH_FORCE="1")
    plugin.register()
    assert all(wrapped_once(method) for method in shared_methods())
    assert wrapped_once(fake_vllm.load(RUNNER).MoERunner._forward_impl)
    assert len(streams.lines) == 1
    assert streams.lines[0].startswith("moe_shared_experts: on: ")
