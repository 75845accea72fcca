"""The NVFP4 preamble feature without vLLM: what it quantises, what a gate hands over, when it steps aside."""

from __future__ import annotations

import copy
import inspect
import pickle
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import vllm_hotpath
from tests import fake_vllm
from tests.fake_vllm import ENVS, GATE, LINEAR, PREPARE, RELOAD, RUNNER, TRTLLM, WEIGHTS, WORKER, wrapped_once
from tests.helpers import BF16, FP16, assert_same_bits
from vllm_hotpath import plugin
from vllm_hotpath.ops import moe_fp4_preamble as ops
from vllm_hotpath.plugin import targets
from vllm_hotpath.plugin.features import moe_fp4_preamble as feature

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fake_vllm import Process

EXPERTS, HIDDEN = 16, 48
FLAG = "VLLM_MOE_FP4_PREAMBLE_FUSION"
E4M3 = torch.float8_e4m3fn


def turn_on(process: Process, monkeypatch: pytest.MonkeyPatch, level: str) -> Process:
    monkeypatch.setattr(feature._say, "said", set())
    process.set(**{FLAG: level})
    plugin.register()
    return process


@pytest.fixture
def one(process: Process, monkeypatch: pytest.MonkeyPatch) -> Process:
    return turn_on(process, monkeypatch, "1")


@pytest.fixture
def two(process: Process, monkeypatch: pytest.MonkeyPatch) -> Process:
    return turn_on(process, monkeypatch, "2")


def config(**changes: Any) -> Any:
    given = {"use_nvfp4_w4a4": True, "is_scale_swizzled": False, "a1_gscale": torch.tensor([30.0])}
    return SimpleNamespace(**given | changes)


def activations(tokens: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens)).to(dtype)


def assert_codes(made: Any, x: torch.Tensor, scale: float = 30.0) -> None:
    packed, scales = vllm_hotpath.nvfp4_quantize(x, torch.tensor([scale]))
    assert_same_bits(made[0], packed)
    assert made[1].dtype == E4M3
    assert_same_bits(made[1].view(torch.uint8), scales)


# ---- Level 1 ----


@pytest.mark.parametrize("tokens", [1, 17, 300])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_the_input_is_quantised_by_our_op(one: Process, tokens: int, dtype: torch.dtype) -> None:
    quantize = fake_vllm.load(PREPARE)._quantize_input
    x = activations(tokens, dtype)
    assert_codes(quantize(x, config()), x)
    assert_codes(quantize(x, config(a1_gscale=torch.tensor(5.0))), x, 5.0)
    # vLLM's kernel reads the first of them.
    assert_codes(quantize(x, config(a1_gscale=torch.tensor([7.0, 1.0, 2.0]))), x, 7.0)
    assert not fake_vllm.load(PREPARE).CALLS
    assert one.lines == [
        "moe_fp4_preamble: on: _quantize_input, MoERunner._forward_impl, TrtLlmNvFp4ExpertsMonolithic.apply, "
        "finalize_layerwise_processing, Worker.reload_weights, Worker.finish_weight_update",
        "moe_fp4_preamble: an input is quantised by our op",
    ]


def test_a_scale_that_changes_is_read_anew(one: Process) -> None:
    quantize, x = fake_vllm.load(PREPARE)._quantize_input, activations(2)
    layer = config(a1_gscale=torch.tensor([3.0, 3.0]))
    assert_codes(quantize(x, layer), x, 3.0)
    layer.a1_gscale.fill_(9.0)
    assert_codes(quantize(x, layer), x, 9.0)
    layer.a1_gscale = torch.tensor([11.0, 1.0])
    assert_codes(quantize(x, layer), x, 11.0)
    # One number for all, and a tensor that is not contiguous.
    base = torch.tensor([13.0, 1.0, 1.0])
    for given in (base[:1].expand(4, 4), base.expand(2, 3).T):
        base[0] = 13.0
        layer.a1_gscale = given
        assert_codes(quantize(x, layer), x, 13.0)
        base[0] = 17.0
        assert_codes(quantize(x, layer), x, 17.0)


STOCK: dict[str, Callable[[], tuple[Any, ...]]] = {
    "deferred": lambda: (activations(2), config(), True),
    "swizzled": lambda: (activations(2), config(is_scale_swizzled=True)),
    "other dtype": lambda: (activations(2), config(use_nvfp4_w4a4=False)),
    "no scale": lambda: (activations(2), config(a1_gscale=None)),
    "fp16 scale": lambda: (activations(2), config(a1_gscale=torch.ones(1, dtype=FP16))),
    "fp32": lambda: (activations(2).float(), config()),
    "odd width": lambda: (activations(2)[:, :40], config()),
    "no tokens": lambda: (activations(0), config()),
    "three dimensions": lambda: (activations(4).view(2, 2, HIDDEN), config()),
    "columns": lambda: (torch.empty(HIDDEN, 2, dtype=BF16).T, config()),
}


@pytest.mark.parametrize("kind", STOCK)
def test_calls_that_are_not_ours_stay_stock(one: Process, kind: str) -> None:
    module = fake_vllm.load(PREPARE)
    assert module._quantize_input(*STOCK[kind]()) == ("stock codes", "stock scales")
    assert len(module.CALLS) == 1


def test_level_1_leaves_gates_alone(one: Process) -> None:
    runner = make_runner()
    run(runner, activations(2))
    assert "forward" not in vars(runner.gate)
    assert not hasattr(fake_vllm.load(PREPARE).MoEPrepareAndFinalizeNoDPEPMonolithic.prepare, "__wrapped__")


def test_errors_of_the_op_name_the_layer(one: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner()
    runner.quant_config.a1_gscale = torch.ones(1)
    monkeypatch.setattr(feature, "_takes", lambda _: True)
    with pytest.raises(TypeError, match=r"^model\.layers\.3\.mlp\.experts: moe_fp4_preamble: hidden_states"):
        run(runner, activations(2).float())
    # Outside of a layer there is no name.
    with pytest.raises(TypeError, match=r"^moe_fp4_preamble: hidden_states"):
        fake_vllm.load(PREPARE)._quantize_input(activations(2).float(), config())


# ---- Level 2 ----


class Router:
    """Stands for the experts: hands the logits and the input to the prepare step."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def _compute_routing(self, x: torch.Tensor, logits: torch.Tensor, _: None) -> Any:
        prepare = fake_vllm.load(PREPARE).MoEPrepareAndFinalizeNoDPEPMonolithic().prepare
        return prepare(self._runner.change(x), logits, self._runner.quant_config, self._runner.defer)


def make_gate(dtype: torch.dtype = BF16, out_dtype: torch.dtype | None = None, hidden: int = HIDDEN) -> Any:
    weight = torch.randn(EXPERTS, hidden, generator=torch.Generator().manual_seed(1)).to(dtype)
    return fake_vllm.load(GATE).GateLinear(weight, out_dtype)


def make_runner(gate: Any = None) -> Any:
    runner = fake_vllm.load(RUNNER).MoERunner()
    runner.gate = gate or make_gate()
    runner.router, runner.quant_config, runner.defer = Router(runner), config(), False
    runner.change = lambda x: x
    runner._quant_method = SimpleNamespace(is_monolithic=True)
    parallel = SimpleNamespace(use_all2all_kernels=False)
    runner.moe_config = SimpleNamespace(is_sequence_parallel=False, pcp_size=1, moe_parallel_config=parallel)
    return runner


def run(runner: Any, x: torch.Tensor) -> Any:
    return runner._forward_impl(x, x, None)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of the op had a gate."""
    found: list[bool] = []
    op = ops.moe_fp4_preamble

    def counted(*arguments: Any, **options: Any) -> Any:
        found.append("gate_weight" in options)
        return op(*arguments, **options)

    monkeypatch.setattr(ops, "moe_fp4_preamble", counted)
    return found


@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 16])
def test_gate_and_codes_come_from_one_call(
    process: Process,
    calls: list[bool],
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
    out_dtype: torch.dtype | None,
) -> None:
    turn_on(process, monkeypatch, "2")
    runner = make_runner(make_gate(out_dtype=out_dtype))
    x = activations(tokens)
    first = run(runner, x)
    assert calls == [False]
    second = run(runner, x)
    assert calls == [False, True]
    for made in (first, second):
        assert_codes(made, x)
        assert made[2].dtype == (out_dtype or BF16)
    exact = x.double() @ runner.gate.weight.double().T
    torch.testing.assert_close(second[2].double(), exact, rtol=2**-8, atol=1e-5)
    assert not process.warnings
    assert process.lines[1:] == [
        "moe_fp4_preamble: model.layers.3.mlp.experts is quantised by our op",
        "moe_fp4_preamble: model.layers.3.mlp.experts has its gate and its quantisation in one launch",
    ]


def test_other_numbers_of_tokens_are_quantised_alone(two: Process) -> None:
    runner = make_runner()
    for tokens in (300, 1, 17, 2):
        x = activations(tokens)
        assert_codes(run(runner, x), x)
    assert not fake_vllm.load(PREPARE).CALLS


@pytest.mark.parametrize("factor", [1, 2])
def test_an_input_that_is_not_the_gates_is_quantised_and_the_gate_given_back(
    process: Process, monkeypatch: pytest.MonkeyPatch, calls: list[bool], factor: int
) -> None:
    turn_on(process, monkeypatch, "2")
    runner, x = make_runner(), activations(2)
    runner.change = lambda x: x * factor
    for _ in range(3):
        assert_codes(run(runner, x), x * factor)
    assert calls == [False, True, False, False]
    assert "forward" not in vars(runner.gate)
    assert process.lines[-1] == (
        "moe_fp4_preamble: model.layers.3.mlp.experts stays stock: its experts do not get the input of its "
        "gate"
    )


def test_another_quantisation_is_learned_and_the_old_one_not_used(two: Process) -> None:
    runner, x = make_runner(), activations(2)
    run(runner, x)
    runner.quant_config = config(a1_gscale=torch.tensor([77.0]))
    assert_codes(run(runner, x), x, 77.0)
    assert_codes(run(runner, x), x, 77.0)
    runner.quant_config.a1_gscale = torch.tensor([5.0])
    assert_codes(run(runner, x), x, 5.0)


def test_logits_that_are_not_the_gates_bring_no_codes(two: Process) -> None:
    runner, x = make_runner(), activations(2)
    run(runner, x)
    logits, _ = runner.gate(x)
    prepare = fake_vllm.load(PREPARE).MoEPrepareAndFinalizeNoDPEPMonolithic().prepare
    for other in (logits.clone(), logits[:], logits.float()):
        assert not hasattr(other, feature._PREPARED)
        assert_codes(prepare(x, other, runner.quant_config), x)


@pytest.mark.parametrize("change", [{"is_scale_swizzled": True}, {"use_nvfp4_w4a4": False}], ids=str)
def test_a_gate_is_given_back_where_the_quantisation_is_not_ours(two: Process, change: Any) -> None:
    runner, x = make_runner(), activations(2)
    runner.quant_config = config(**change)
    for _ in range(2):
        assert run(runner, x)[:2] == ("stock codes", "stock scales")
    assert "forward" not in vars(runner.gate)
    assert two.lines[1:] == [
        "moe_fp4_preamble: model.layers.3.mlp.experts stays stock: its input is not quantised to NVFP4 with "
        "linear scales"
    ]


def _set(path: str, value: Any) -> Callable[[Any], None]:
    def change(runner: Any) -> None:
        owner = runner
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, name, value() if callable(value) else value)

    return change


def _other_gate(runner: Any) -> None:
    base = fake_vllm.load(LINEAR).ReplicatedLinear
    runner.gate = type("ReplicatedLinearWithLoRA", (base,), {})(runner.gate.weight.data)


REASONS: dict[str, tuple[Callable[[Any], None], str]] = {
    "modular": (_set("_quant_method.is_monolithic", False), "its kernel does not select the experts itself"),
    "shared gate": (_set("_fse_fuse_gate", True), "its gate is fused with that of the shared experts"),
    "outside": (_set("gate", None), "its gate is applied outside of it"),
    "LoRA": (_other_gate, "its gate is a ReplicatedLinearWithLoRA (LoRA, or a gate of its own)"),
    "quantised": (_set("gate.quant_method", object), "its gate is quantised or has a bias"),
    "sequence": (_set("moe_config.is_sequence_parallel", True), "gathered from other ranks"),
    "dispatch": (_set("do_naive_dispatch_combine", True), "gathered from other ranks"),
    "context": (_set("moe_config.pcp_size", 2), "gathered from other ranks"),
    "all2all": (_set("moe_config.moe_parallel_config.use_all2all_kernels", True), "all2all kernels"),
    "fp32 weight": (_set("gate", lambda: make_gate(torch.float32)), "its gate weight is torch.float32"),
    "fp16 logits": (_set("gate", lambda: make_gate(BF16, FP16)), "its logits are torch.float16"),
    "width": (_set("gate", lambda: make_gate(hidden=40)), "40 channels are no multiple of 16"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REASONS)
def test_layers_step_aside_with_a_reason(two: Process, kind: str) -> None:
    change, reason = REASONS[kind]
    for _ in range(2):
        runner = make_runner()
        change(runner)
        x = activations(2)
        if runner.gate is not None and runner.gate.weight.shape[1] == HIDDEN:
            assert_codes(run(runner, x), x)
        else:
            runner._forward_impl(x[:, :40], torch.zeros(2, EXPERTS), None)
        assert runner.gate is None or "forward" not in vars(runner.gate)
    (line,) = (line for line in two.lines if "stays stock" in line)
    assert line.startswith("moe_fp4_preamble: model.layers.3.mlp.experts stays stock: ")
    assert reason in line


def test_vllms_own_switch_holds(two: Process) -> None:
    fake_vllm.load(ENVS).VLLM_BATCH_INVARIANT = True
    runner = make_runner()
    run(runner, activations(2))
    assert "forward" not in vars(runner.gate)
    assert two.lines[1].endswith("stays stock: VLLM_BATCH_INVARIANT=1")


def test_what_goes_wrong_while_hooking_is_one_warning(two: Process) -> None:
    for _ in range(2):
        runner = make_runner()
        del runner.moe_config
        x = activations(2)
        assert_codes(run(runner, x), x)
    reason = "AttributeError: 'MoERunner' object has no attribute 'moe_config'"
    assert two.warnings == [f"moe_fp4_preamble: model.layers.3.mlp.experts stays stock: {reason}"]


# ---- The routing bias of 0.22.1 ----


def consumed(bias: torch.Tensor | None) -> Any:
    experts = fake_vllm.load(TRTLLM).TrtLlmNvFp4ExpertsMonolithic()
    return experts.apply(*[None] * 8, False, e_score_correction_bias=bias)


def test_the_bias_is_cast_once(one: Process) -> None:
    bias = torch.nn.Parameter(torch.randn(EXPERTS) + 11)
    kept = consumed(bias)
    assert_same_bits(kept, bias.detach().to(BF16))
    assert consumed(bias) is kept
    assert consumed(None) is None
    half = torch.nn.Parameter(bias.detach().to(BF16))
    assert consumed(half) is half


def test_a_bias_that_is_no_parameter_of_its_own_is_cast_by_vllm(one: Process) -> None:
    biases = torch.nn.Parameter(torch.randn(2, EXPERTS))
    for bias in (biases[0], biases.detach()[1], torch.zeros(EXPERTS)):
        assert consumed(bias) is bias
        assert not hasattr(bias, "weight_loader")


def test_loads_and_reloads_renew_the_bias(one: Process) -> None:
    seen = []

    def own_loader(param: torch.Tensor, loaded_weight: torch.Tensor, shard: int = 0) -> str:
        seen.append(shard)
        fake_vllm.load(WEIGHTS).default_weight_loader(param, loaded_weight)
        return "loaded"

    plain, own = (torch.nn.Parameter(torch.zeros(EXPERTS)) for _ in range(2))
    own.weight_loader = own_loader  # type: ignore[attr-defined]
    kept = [consumed(bias) for bias in (plain, own)]
    plain.weight_loader(plain, torch.full((EXPERTS,), 3.0))  # type: ignore[attr-defined]
    assert own.weight_loader(own, torch.full((EXPERTS,), 4.0), shard=2) == "loaded"  # type: ignore[attr-defined]
    assert seen == [2]
    assert kept[0].tolist() == [3.0] * EXPERTS
    assert kept[1].tolist() == [4.0] * EXPERTS
    plain.data.copy_(torch.full((EXPERTS,), 5.0))
    assert fake_vllm.load(RELOAD).finalize_layerwise_processing("model", None) == "model"
    assert kept[0].tolist() == [5.0] * EXPERTS
    # In the format of the kernels there is neither a loader nor a layer.
    worker = fake_vllm.load(WORKER).Worker()
    for value, reload in ((6.0, worker.reload_weights), (7.0, worker.finish_weight_update)):
        with torch.no_grad():
            plain.copy_(torch.full((EXPERTS,), value))
        assert reload() == "reloaded"
        assert kept[0].tolist() == [value] * EXPERTS
    assert consumed(plain) is kept[0]


def test_a_load_that_fails_half_way_renews_the_bias_too(one: Process) -> None:
    def loader(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        param.data.copy_(loaded_weight)
        raise OSError("the rest is missing")

    bias = torch.nn.Parameter(torch.zeros(EXPERTS))
    bias.weight_loader = loader  # type: ignore[attr-defined]
    kept = consumed(bias)
    with pytest.raises(OSError, match="the rest is missing"):
        bias.weight_loader(loaded_weight=torch.ones(EXPERTS), param=bias)  # type: ignore[attr-defined]
    assert kept.tolist() == [1.0] * EXPERTS


def test_why_a_load_failed_is_not_hidden_by_a_refresh_that_fails(one: Process) -> None:
    bias = torch.nn.Parameter(torch.zeros(EXPERTS))

    def loader(param: torch.Tensor) -> None:
        param.untyped_storage().resize_(0)
        raise OSError("the file is gone")

    bias.weight_loader = loader  # type: ignore[attr-defined]
    consumed(bias)
    with pytest.raises(OSError, match="the file is gone"):
        bias.weight_loader(bias)  # type: ignore[attr-defined]


def test_a_loader_that_is_put_in_later_is_followed_from_the_next_call_on(one: Process) -> None:
    bias = torch.nn.Parameter(torch.zeros(EXPERTS))
    kept = consumed(bias)
    bias.weight_loader = fake_vllm.load(WEIGHTS).default_weight_loader  # type: ignore[attr-defined]
    consumed(bias)
    bias.weight_loader(bias, torch.full((EXPERTS,), 2.0))  # type: ignore[attr-defined]
    assert kept.tolist() == [2.0] * EXPERTS


def test_a_followed_bias_can_be_pickled_and_its_loader_looks_like_vllms(one: Process) -> None:
    bias = torch.nn.Parameter(torch.ones(EXPERTS))
    consumed(bias)
    loader = bias.weight_loader  # type: ignore[attr-defined]
    assert loader.__name__ == "default_weight_loader"
    assert list(inspect.signature(loader).parameters) == ["param", "loaded_weight"]
    again = pickle.loads(pickle.dumps(bias))
    assert torch.equal(again, bias)
    assert copy.deepcopy(bias).tolist() == bias.tolist()


def test_a_bias_whose_loads_cannot_be_followed_is_cast_by_vllm(one: Process) -> None:
    class Loaded(torch.nn.Parameter):
        @property
        def weight_loader(self) -> Any:
            return None

    bias = Loaded(torch.zeros(EXPERTS))
    assert consumed(bias) is bias


# ---- What is patched ----


@pytest.mark.parametrize("value", ["0", "off", ""])
def test_without_a_level_nothing_is_patched(process: Process, value: str) -> None:
    process.set(**{FLAG: value})
    plugin.register()
    assert not process.lines
    assert not hasattr(fake_vllm.load(PREPARE)._quantize_input, "__wrapped__")


@pytest.mark.parametrize("value", ["3", "-1", "yes", "1.5"])
def test_other_values_leave_it_off_with_a_line(process: Process, value: str) -> None:
    process.set(**{FLAG: value})
    plugin.register()
    assert process.lines == [f"moe_fp4_preamble: stock: {FLAG}={value}: expected 0 to 2"]


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (PREPARE, "a1, quant_config, defer_input_quant=False", "a1, quant_config, stream, defer=False"),
        (PREPARE, "router_logits, quant_config, defer", "router_logits, quant_config, more, defer"),
        (PREPARE, "return a1q, a1q_scale, router_logits", "return a1q, router_logits, a1q_scale"),
        (TRTLLM, "topk_group=None,\n", "topk_group=None, more=None,\n"),
        (TRTLLM, "return e_score_correction_bias", "return e_score_correction_bias.float()"),
        (RELOAD, "return model", "return model, None"),
        (RUNNER, "if self.gate is not None", "if self.gate"),
    ],
)
def test_another_signature_or_source_turns_it_off(process: Process, module: str, old: str, new: str) -> None:
    process.edit(module, old, new)
    process.set(**{FLAG: "2"})
    plugin.register()
    assert len(process.lines) == 1
    assert process.lines[0].startswith("moe_fp4_preamble: stock: ")
    assert not hasattr(fake_vllm.load(PREPARE)._quantize_input, "__wrapped__")


def test_where_the_bias_is_taken_in_fp32_it_is_not_cast(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What vLLM 0.33.0 is known by: there is nothing to patch, and the rest is on."""
    process.edit(TRTLLM, "topk_group=None,\n", "topk_group=None, routing_replay_out=None,\n")
    process.edit(RELOAD, "return model", "return model, None")
    for target in (feature.BIAS, *feature.RELOADS):
        found = targets.probe(target, process.root / "vllm", "0").definition
        assert found is not None
        monkeypatch.setitem(target.settled, found.hash, "stand-in")  # type: ignore[arg-type]
    turn_on(process, monkeypatch, "1")
    assert process.lines == []
    bias = torch.nn.Parameter(torch.zeros(EXPERTS))
    assert consumed(bias) is bias
    x = activations(3)
    assert_codes(fake_vllm.load(PREPARE)._quantize_input(x, config()), x)
    assert process.lines[0] == "moe_fp4_preamble: on: _quantize_input, MoERunner._forward_impl"


def test_its_objects_are_wrapped_once(two: Process) -> None:
    plugin.register()
    prepare = fake_vllm.load(PREPARE)
    assert wrapped_once(prepare._quantize_input)
    assert wrapped_once(prepare.MoEPrepareAndFinalizeNoDPEPMonolithic.prepare)
    assert wrapped_once(fake_vllm.load(RUNNER).MoERunner._forward_impl)
    assert wrapped_once(fake_vllm.load(TRTLLM).TrtLlmNvFp4ExpertsMonolithic.apply)


def test_beside_the_router_feature(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    process.set(VLLM_HOTPATH_MOE_ROUTER="1")
    turn_on(process, monkeypatch, "2")
    runner, x = make_runner(), activations(2)
    for _ in range(2):
        assert_codes(run(runner, x), x)
    assert isinstance(runner.gate.forward, feature._Gate)
    assert "moe_router: model.layers.3.mlp.experts stays stock: its kernel selects the experts itself" in (
        process.lines
    )
