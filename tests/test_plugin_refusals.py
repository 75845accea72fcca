"""What the plugin does not patch, and what it says then; other plugins; Kimi-K3's switches. Without vLLM."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any

import pytest

from tests import fake_vllm
from tests.fake_vllm import DRIFTS, K3, MLA, drift, finders, wrapped_once
from vllm_hotpath import plugin
from vllm_hotpath.plugin import patching, report
from vllm_hotpath.plugin.features import mla_kv_pack as feature

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fake_vllm import Process

K3_LINE = "k3_dcp_kv_pack: {}: Kimi-K3 DCP chunked-context KV pack: {}"


def test_disable_wins_over_everything(process: Process) -> None:
    process.set(VLLM_HOTPATH_MLA_KV_PACK="1", VLLM_K3_DCP_FUSED_KV_PACK="0")
    process.set(VLLM_HOTPATH_DISABLE="1", VLLM_HOTPATH_FORCE="1", VLLM_HOTPATH_STRICT="1")
    process.edit(MLA, "self, k_nope, k_pe", "self, k_pe")
    plugin.register()
    plugin.register()
    assert not finders()
    reason = "stock: VLLM_HOTPATH_DISABLE=1"
    assert process.lines == [f"mla_kv_pack: {reason}", f"k3_dcp_kv_pack: {reason}"]


@pytest.mark.parametrize("kind", DRIFTS)
def test_what_is_not_known_stays_stock_with_the_reason(process: Process, kind: str) -> None:
    process.set(VLLM_HOTPATH_MLA_KV_PACK="1")
    drift(process, kind)
    plugin.register()
    assert len(process.lines) == 1
    assert process.lines[0].startswith("mla_kv_pack: stock: ")
    assert DRIFTS[kind] in process.lines[0]
    if kind != "module":
        methods = vars(fake_vllm.load(MLA).MLACommonBaseImpl).values()
        assert not any(hasattr(method, "__wrapped__") for method in methods)
    assert len(process.lines) == 1
    assert not process.warnings


@pytest.mark.parametrize("kind", DRIFTS)
def test_strict_makes_it_an_error_at_start(process: Process, kind: str) -> None:
    process.set(VLLM_HOTPATH_MLA_KV_PACK="1", VLLM_HOTPATH_STRICT="1")
    drift(process, kind)
    with pytest.raises(plugin.FeatureUnavailableError) as raised:
        plugin.register()
    assert "mla_kv_pack cannot be turned on" in str(raised.value)
    assert DRIFTS[kind] in str(raised.value)


def test_force_accepts_another_source_but_no_other_signature(process: Process) -> None:
    process.set(VLLM_HOTPATH_MLA_KV_PACK="1", VLLM_HOTPATH_FORCE="1")
    drift(process, "source")
    plugin.register()
    assert wrapped_once(fake_vllm.load(MLA).MLACommonBaseImpl._concat_k_nope_k_pe)

    fake_vllm.forget()
    report._reported.clear()
    drift(process, "signature")
    plugin.register()
    assert "unknown signature" in process.lines[-1]


def test_an_exception_while_patching_leaves_the_module_stock(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(environ: Any) -> Any:
        first, second, *_ = plan(environ).patches
        return replace(plan(environ), patches=(first, replace(second, replace=lambda _: 1 / 0)))

    plan = feature.MLA_KV_PACK.plan
    broken_feature = replace(feature.MLA_KV_PACK, plan=broken)
    monkeypatch.setattr(patching, "FEATURES", (broken_feature, feature.K3_DCP_KV_PACK))
    process.set(VLLM_HOTPATH_MLA_KV_PACK="1", VLLM_K3_DCP_FUSED_KV_PACK="1")
    plugin.register()
    methods = vars(fake_vllm.load(MLA).MLACommonBaseImpl).values()
    assert not any(hasattr(method, "__wrapped__") for method in methods)
    reason = f"{MLA} cannot be patched: ZeroDivisionError: division by zero"
    assert process.warnings == [f"mla_kv_pack: {reason}"]
    assert process.lines == [f"mla_kv_pack: stock: {reason}"]
    # The other feature is not affected.
    assert wrapped_once(fake_vllm.load(K3).MultiHeadLatentAttention._fused_mla_kv_concat)

    fake_vllm.forget()
    process.set(VLLM_HOTPATH_STRICT="1")
    with pytest.raises(plugin.FeatureUnavailableError, match="ZeroDivisionError"):
        fake_vllm.load(MLA)
    assert MLA not in sys.modules


def test_whatever_goes_wrong_register_does_not_raise(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError("no file")

    monkeypatch.setattr(patching, "register", fail)
    plugin.register()
    assert process.warnings == ["vllm-hotpath stays off, vLLM is stock: OSError: no file"]
    process.set(VLLM_HOTPATH_STRICT="1")
    with pytest.raises(plugin.FeatureUnavailableError, match="no file"):
        plugin.register()


# ---- Another plugin at the same method ----


def other_plugin(mla: Any, calls: list[str]) -> Callable[..., Any]:
    inner = mla.MLACommonBaseImpl._concat_k_nope_k_pe

    @wraps(inner)
    def theirs(self: Any, k_nope: Any, k_pe: Any) -> Any:
        calls.append("theirs")
        return inner(self, k_nope, k_pe)

    mla.MLACommonBaseImpl._concat_k_nope_k_pe = theirs
    return theirs


def test_a_method_that_another_plugin_has_replaced_is_left_to_it(process: Process) -> None:
    mla = fake_vllm.load(MLA)
    theirs = other_plugin(mla, [])
    process.set(VLLM_HOTPATH_MLA_KV_PACK="1")
    plugin.register()
    assert mla.MLACommonBaseImpl._concat_k_nope_k_pe is theirs
    assert process.lines == [
        f"mla_kv_pack: stock: {MLA}.MLACommonBaseImpl._concat_k_nope_k_pe has been replaced by a function of"
        f" {__file__}"
    ]
    process.set(VLLM_HOTPATH_STRICT="1")
    with pytest.raises(plugin.FeatureUnavailableError, match="has been replaced"):
        plugin.register()

    process.set(VLLM_HOTPATH_STRICT="0", VLLM_HOTPATH_FORCE="1")
    plugin.register()
    assert mla.MLACommonBaseImpl._concat_k_nope_k_pe.__wrapped__ is theirs


def test_a_plugin_that_comes_after_ours_wraps_ours(process: Process) -> None:
    process.set(VLLM_HOTPATH_MLA_KV_PACK="1")
    plugin.register()
    mla = fake_vllm.load(MLA)
    ours, calls = mla.MLACommonBaseImpl._concat_k_nope_k_pe, []
    theirs = other_plugin(mla, calls)
    plugin.register()
    assert mla.MLACommonBaseImpl._concat_k_nope_k_pe is theirs
    assert theirs.__wrapped__ is ours
    assert wrapped_once(ours)
    assert len(process.lines) == 1


# ---- Kimi-K3's switches ----


@pytest.mark.parametrize(
    ("flags", "state", "line"),
    [
        ({"VLLM_K3_DCP_FUSED_KV_PACK": "1"}, "on", "fused (VLLM_K3_DCP_FUSED_KV_PACK=1)"),
        (
            {"VLLM_K3_DCP_FUSED_KV_PACK": "0"},
            "stock",
            "stock (kill switch VLLM_K3_DCP_FUSED_KV_PACK=0)",
        ),
        (
            {"VLLM_K3_DCP_FUSED_KV_PACK_DISABLE": "1"},
            "stock",
            "stock (kill switch VLLM_K3_DCP_FUSED_KV_PACK_DISABLE=1)",
        ),
        (
            {"VLLM_K3_DCP_FUSED_KV_PACK": "1", "VLLM_K3_DCP_FUSED_KV_PACK_DISABLE": "1"},
            "stock",
            "stock (kill switch VLLM_K3_DCP_FUSED_KV_PACK_DISABLE=1)",
        ),
        (
            {"VLLM_K3_DCP_FUSED_KV_PACK": "1", "VLLM_K3_DCP_FUSED_KV_PACK_DISABLE": "0"},
            "on",
            "fused (VLLM_K3_DCP_FUSED_KV_PACK=1)",
        ),
    ],
)
def test_k3_switches_say_what_they_do(process: Process, flags: dict[str, str], state: str, line: str) -> None:
    process.set(**flags, VLLM_HOTPATH_STRICT="1")
    plugin.register()
    layer = fake_vllm.load(K3).MultiHeadLatentAttention
    if state == "on":
        assert wrapped_once(layer._fused_mla_kv_concat)
    else:
        assert layer._fused_mla_kv_concat is None
    assert process.lines == [K3_LINE.format(state, line)]


def test_k3_pack_needs_the_loops_hook(process: Process) -> None:
    process.edit(MLA, ", fused_mla_kv_concat_fn=None", "", known=True)
    process.set(VLLM_K3_DCP_FUSED_KV_PACK="1")
    plugin.register()
    assert process.lines == [K3_LINE.format("stock", "stock (impl accepts no kv_pack)")]


def test_a_kill_switch_without_k3_has_nothing_to_do(process: Process) -> None:
    process.root.joinpath(*K3.split(".")).with_suffix(".py").unlink()
    process.set(VLLM_K3_DCP_FUSED_KV_PACK="0", VLLM_HOTPATH_STRICT="1")
    plugin.register()
    switch = "stock (kill switch VLLM_K3_DCP_FUSED_KV_PACK=0)"
    assert process.lines == [K3_LINE.format("stock", switch)]
    process.set(VLLM_K3_DCP_FUSED_KV_PACK="1")
    with pytest.raises(plugin.FeatureUnavailableError, match="_fused_mla_kv_concat"):
        plugin.register()
