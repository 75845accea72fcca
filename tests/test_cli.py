"""The commands as a user runs them: exit status, what goes to which stream, and what verify finds."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest
import torch

from vllm_hotpath.bench.models import MODELS, placements
from vllm_hotpath.bench.ops import OPS, load, op_names
from vllm_hotpath.cli import main
from vllm_hotpath.ops import STEMS, kda_decode, mla_kv_pack

if TYPE_CHECKING:
    from collections.abc import Callable

SMALL = ["--model", "kimi-k2.6", "--tp", "32", "--device", "cpu"]
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def usage_error(*arguments: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2


def test_python_dash_m_runs_the_command_line() -> None:
    command = [sys.executable, "-m", "vllm_hotpath", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith("vllm-hotpath ")


@pytest.mark.parametrize("command", [[], ["doctor"], ["verify"], ["bench"]])
def test_help_shows_examples_under_the_name_it_is_called_by(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*command, "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert "examples:\n  python -m vllm_hotpath" in text


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["frobnicate"],
        ["verify", "--model", "gpt-2"],
        ["verify", "--op", "mla_kv_pick"],
        ["verify", "--tp", "64"],
        ["verify", "--model", "kimi-linear", "--tp", "16"],
        ["verify", "--device", "tpu"],
        ["verify", "--seed", "-1"],
        ["bench", "--tp", "0"],
        ["bench", "--op", "softmax"],
    ],
)
def test_wrong_usage_is_exit_status_2(arguments: list[str]) -> None:
    usage_error(*arguments)


def test_importing_the_command_line_imports_no_torch() -> None:
    done = python("import sys, vllm_hotpath.cli; print('torch' in sys.modules)")
    assert done.stdout.strip() == "False", done.stderr


def test_a_wrong_argument_is_reported_without_importing_torch() -> None:
    code = """
        import sys
        sys.modules["torch"] = None
        from vllm_hotpath.cli import main
        main(["verify", "--model", "gpt-2"])
    """
    done = python(code)
    assert done.returncode == 2
    assert "invalid choice: 'gpt-2'" in done.stderr


def test_doctor_json_is_all_that_is_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["usable"] is True
    assert found["problems"] == []
    assert found["torch"]["version"] == torch.__version__
    assert found["torch"]["exchange_api"].keys() == {"Tensor", "Parameter"}
    assert all(found["torch"]["exchange_api"].values())
    assert {entry["op"] for entry in found["ops"]} == set(STEMS)
    assert all(entry["devices"]["cpu"] == {"supported": True, "reason": ""} for entry in found["ops"])


def test_doctor_shows_the_ops_and_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for expected in (*STEMS, str(torch.__version__), "DLPack exchange API", "usable"):
        assert expected in text


def test_doctor_works_without_torch_and_calls_the_installation_broken() -> None:
    code = """
        import sys

        class NoTorch:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] == "torch":
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        sys.meta_path.insert(0, NoTorch())
        from vllm_hotpath.cli import main
        sys.exit(main(sys.argv[1:]))
    """
    as_json, as_text = python(code, "doctor", "--json"), python(code, "doctor")
    assert as_json.returncode == as_text.returncode == 1
    assert as_json.stderr == as_text.stderr == ""
    found = json.loads(as_json.stdout)
    assert found["torch"]["version"] is None
    assert found["problems"] == ["torch is not installed"]
    assert all(not entry["devices"]["cpu"]["supported"] for entry in found["ops"])
    assert "problem: torch is not installed" in as_text.stdout
    verify = python(code, "verify")
    assert verify.returncode == 1
    assert "torch is not installed" in verify.stderr


def test_doctor_finds_an_op_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant_error(monkeypatch)
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert "mla_kv_concat on the CPU" in found["problems"][0]


def test_doctor_does_not_initialise_cuda_in_torch() -> None:
    code = """
        import torch
        from vllm_hotpath.cli import main
        main(["doctor", "--json"])
        assert not torch.cuda.is_initialized()
    """
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_verify_passes_and_names_its_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *SMALL, "--seed", "77"]) == 0
    text = capsys.readouterr().out
    assert "--seed 77" in text
    assert "kimi-k2.6 tp32" in text
    assert "failed" not in text


def test_verify_json_is_all_that_is_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *SMALL, "--op", "mla_kv_pack", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["ok"] is True
    assert 0 <= values["seed"] < 10**9
    assert [unit["op"] for unit in values["units"]] == list(OPS["mla_kv_pack"])
    assert all(unit["cases"] and unit["elements"] and not unit["failed"] for unit in values["units"])


def test_verify_runs_all_models_at_all_their_sizes_by_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vllm_hotpath.bench.verify.run", lambda unit, device, seed: iter(()))
    assert main(["verify", "--json", "--device", "cpu"]) == 0
    units = json.loads(capsys.readouterr().out)["units"]
    for op in op_names():
        named = [place for unit in units if unit["op"] == op for place in unit["placements"]]
        models = (place for place in placements() if load(STEMS[op]).shape(*place) is not None)
        assert sorted(named) == sorted(f"{model.name} tp{tp}" for model, tp in models)


def plant_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``mla_kv_concat`` flip every bit of one byte of each result with more than one token."""
    right: Callable[..., torch.Tensor] = mla_kv_pack.mla_kv_concat

    def wrong(*arguments: Any, **options: Any) -> torch.Tensor:
        out = right(*arguments, **options)
        if len(out) > 1:
            out.view(torch.uint8)[1, 1, 6] ^= 0xFF
        return out

    monkeypatch.setattr(mla_kv_pack, "mla_kv_concat", wrong)


def test_verify_reports_coordinate_and_both_values_of_a_planted_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant_error(monkeypatch)
    planted = [*SMALL, "--op", "mla_kv_pack"]
    assert main(["verify", *planted, "--json"]) == 1
    values = json.loads(capsys.readouterr().out)
    concat, quant = values["units"]
    assert values["ok"] is False
    assert quant["failed"] == 0
    failure = next(f for f in concat["failures"] if "T=13 bfloat16 halves" in f["case"])
    assert failure["output"] == "k"
    assert failure["index"] == [1, 1, 3]
    assert int(failure["got"], 16) ^ int(failure["want"], 16) == 0xFF
    assert "1 of " in failure["message"]

    assert main(["verify", *planted, "--seed", str(values["seed"])]) == 1
    text = capsys.readouterr().out
    assert f"first at [1, 1, 3]: expected {failure['want']}, got {failure['got']}; 1 of" in text


def test_verify_finds_a_write_beside_an_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right: Callable[..., torch.Tensor] = mla_kv_pack.mla_kv_concat

    def wrong(*arguments: Any, **options: Any) -> torch.Tensor:
        out = right(*arguments, **options)
        if options.get("out") is not None:
            out.as_strided((1,), (1,), out.storage_offset() + out.numel()).view(torch.uint8).fill_(0)
        return out

    monkeypatch.setattr(mla_kv_pack, "mla_kv_concat", wrong)
    assert main(["verify", *SMALL, "--op", "mla_kv_concat", "--json"]) == 1
    (unit,) = json.loads(capsys.readouterr().out)["units"]
    assert {failure["output"] for failure in unit["failures"]} == {"bytes beside k"}


def test_verify_counts_an_exception_as_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*arguments: Any, **options: Any) -> torch.Tensor:
        raise RuntimeError("mla_kv_concat: no [b]luck[/b]")

    monkeypatch.setattr(mla_kv_pack, "mla_kv_concat", broken)
    assert main(["verify", *SMALL, "--op", "mla_kv_concat"]) == 1
    assert "RuntimeError: mla_kv_concat: no [b]luck[/b]" in capsys.readouterr().out


def test_verify_takes_stems_for_ops(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *SMALL, "--op", "mla_kv_pack", "--json"]) == 0
    assert [unit["op"] for unit in json.loads(capsys.readouterr().out)["units"]] == list(OPS["mla_kv_pack"])


KDA = ["--op", "kda_decode", "--model", "kimi-k3", "--tp", "32", "--device", "cpu"]


def test_verify_passes_within_the_tolerance_of_an_op(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *KDA]) == 0
    text = capsys.readouterr().out
    assert "within tolerance" in text
    assert "same bytes" not in text
    assert "compared bit by bit" in text


def plant_kda_error(monkeypatch: pytest.MonkeyPatch, spoil: Callable[..., None]) -> None:
    """Let ``spoil(out, conv_state, state, slots, null)`` change what an fp32 call with odd strides left."""
    right: Callable[..., torch.Tensor] = kda_decode.kda_decode

    def wrong(*arguments: Any, **options: Any) -> torch.Tensor:
        out = right(*arguments, **options)
        conv_state, state, indices = arguments[2], arguments[7], arguments[8]
        if state.dtype == torch.float32 and isinstance(conv_state, torch.Tensor) and conv_state.shape[2] > 3:
            spoil(out, conv_state, state, indices.reshape(-1), options["null_index"])
        return out

    monkeypatch.setattr(kda_decode, "kda_decode", wrong)


def spoil_state(
    out: torch.Tensor, conv: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, null: int
) -> None:
    head = state[slots[slots > null][1], 2]
    head[5, 7] += 3e-5 * head.abs().max()


def spoil_conv(
    out: torch.Tensor, conv: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, null: int
) -> None:
    conv[slots[slots > null][1], 130, 2] += 1


def spoil_column(
    out: torch.Tensor, conv: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, null: int
) -> None:
    conv[slots[slots > null][1], 130, 3] = 1


def spoil_null_slot(
    out: torch.Tensor, conv: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, null: int
) -> None:
    state[0, 0, 0, 0] += 1


def spoil_out(
    out: torch.Tensor, conv: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, null: int
) -> None:
    out[0].as_strided((1,), (1,), out.storage_offset() + out[0].numel()).fill_(1)


@pytest.mark.parametrize(
    ("spoil", "output", "index"),
    [
        (spoil_state, "state", [1, 2, 5, 7]),
        (spoil_conv, "conv state", [1, 130, 2]),
        (spoil_column, "cache bytes beside the live slots", None),
        (spoil_null_slot, "cache bytes beside the live slots", None),
        (spoil_out, "bytes between rows of out", [0, 0]),
    ],
)
def test_verify_finds_each_kind_of_wrong_kda_call(
    spoil: Callable[..., None],
    output: str,
    index: list[int] | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plant_kda_error(monkeypatch, spoil)
    assert main(["verify", *KDA, "--json"]) == 1
    unit, several = json.loads(capsys.readouterr().out)["units"]
    assert (unit["op"], several["op"], several["failed"]) == ("kda_decode", "kda_decode_spec", 0)
    assert unit["failed"] == 2
    assert {failure["output"] for failure in unit["failures"]} == {output}
    assert {" odd" in failure["case"] for failure in unit["failures"]} == {True}
    for failure in unit["failures"]:
        assert failure["got"] != failure["want"]
        assert index in (None, failure["index"])


def test_asking_for_an_op_that_no_model_asked_for_has_is_exit_status_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["verify", *SMALL, "--op", "kda_decode"]) == 1
    assert "no model asked for has use for kda_decode" in capsys.readouterr().err


@WITHOUT_GPU
def test_cuda_on_a_machine_without_one_is_a_message_and_exit_status_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for arguments in (["bench"], ["bench", "--json", "-"], ["verify", "--device", "cuda"]):
        assert main(arguments) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert f"python -m vllm_hotpath {arguments[0]}: it needs a CUDA GPU: " in captured.err


def test_bench_refuses_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--device", "cpu"]) == 1
    assert "--device has to be cuda" in capsys.readouterr().err


def test_every_public_op_is_known_to_verify_and_bench() -> None:
    assert {op: stem for stem, ops in OPS.items() for op in ops} == STEMS
    for stem in OPS:
        assert load(stem).stem == stem


@pytest.mark.parametrize("model", MODELS.values(), ids=str)
def test_heads_split_evenly_at_every_size_offered(model: Any) -> None:
    assert [model.heads_per_rank(tp) * tp for tp in model.tp_sizes] == [model.heads] * len(model.tp_sizes)
    with pytest.raises(ValueError, match="cannot share equally"):
        model.heads_per_rank(7)


def test_kda_heads_of_the_models() -> None:
    heads = {
        name: [model.kda_heads_per_rank(tp) for tp in model.tp_sizes if model.kda_heads]
        for name, model in MODELS.items()
    }
    assert heads["kimi-k3"] == [96, 48, 24, 12, 6, 3]
    assert heads["kimi-linear"] == [32, 16, 8, 4]
    assert heads["kimi-k2.6"] == heads["deepseek-v3"] == []
    with pytest.raises(ValueError, match="cannot share equally"):
        MODELS["kimi-k3"].kda_heads_per_rank(7)
