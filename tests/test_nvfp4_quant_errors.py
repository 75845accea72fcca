"""What the NVFP4 ops refuse: the message names op, argument and what was expected; no byte is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import vllm_hotpath
from tests.helpers import BF16, FP16, Output
from tests.nvfp4_cases import scale_of
from vllm_hotpath import _core
from vllm_hotpath.ops import allocate

if TYPE_CHECKING:
    from collections.abc import Callable

M, K, E = 5, 80, 2
QUANTIZE, SILU, NORM = "nvfp4_quantize", "silu_mul_nvfp4", "add_rms_norm_nvfp4"
EVERY = (QUANTIZE, SILU, NORM)
POSITIONAL = ("x", "gate_up", "residual", "weight", "eps", "global_scale")
FP32 = torch.float32


class Call:
    """A correct call with poisoned outputs, to be spoiled."""

    def __init__(self, op: str, device: torch.device) -> None:
        self.op = op
        lead = (E,) if op == SILU else ()
        self.source = "gate_up" if op == SILU else "x"
        width = 2 * K if op == SILU else K
        self.args: dict[str, Any] = {self.source: torch.ones(*lead, M, width, dtype=BF16, device=device)}
        self.args["global_scale"] = scale_of(2.0, device)
        self.args["layout"] = "swizzled_128x4"
        self.outputs = {
            "out": Output((*lead, M, K // 2), torch.uint8, device),
            "out_scale": Output((*lead, 128, 8), torch.uint8, device),
        }
        if op == SILU:
            self.args["mask_m"] = torch.full((E,), M, dtype=torch.int32, device=device)
        if op == NORM:
            self.args |= {"residual": torch.ones(M, K, dtype=BF16, device=device), "eps": 1e-6}
            self.args |= {"weight": torch.ones(K, dtype=BF16, device=device)}
            self.args |= {"second_scale": scale_of(3.0, device), "second_layout": "swizzled_8x4"}
            self.outputs["out_norm"] = Output((M, K), BF16, device)
            self.outputs["second_out"] = Output((M, K // 2), torch.uint8, device)
            self.outputs["second_out_scale"] = Output((8, 8), torch.uint8, device)
        self.args |= {name: output.tensor for name, output in self.outputs.items()}

    def run(self) -> Any:
        args = dict(self.args)
        positional = [args.pop(name) for name in POSITIONAL if name in args]
        return getattr(vllm_hotpath, self.op)(*positional, **args)


class Bad(NamedTuple):
    name: str
    ops: tuple[str, ...]
    argument: str
    change: Callable[[Any], Any]
    error: type[Exception] | tuple[type[Exception], ...]
    expected: str


def _zeros(like: torch.Tensor, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype or like.dtype, device=like.device)


def _every_second(x: torch.Tensor) -> torch.Tensor:
    return _zeros(x, *x.shape[:-1], 2 * x.shape[-1])[..., ::2]


def _shifted(x: torch.Tensor) -> torch.Tensor:
    return _zeros(x, x.numel() + 1)[1:].view(x.shape)


def _padded_rows(x: torch.Tensor) -> torch.Tensor:
    return _zeros(x, *x.shape[:-1], x.shape[-1] + 16)[..., : x.shape[-1]]


def _same_rows(x: torch.Tensor) -> torch.Tensor:
    return x[:1].expand(x.shape)


def _on_meta(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


SOURCE = "source"
CASES = (
    Bad("fp32 source", EVERY, SOURCE, lambda x: x.float(), TypeError, "bfloat16 or float16"),
    Bad("uint8 source", EVERY, SOURCE, lambda x: x.to(torch.uint8), TypeError, "bfloat16 or float16"),
    Bad("odd width", EVERY, SOURCE, lambda x: x[..., :-1], ValueError, "a multiple of"),
    Bad("no width", EVERY, SOURCE, lambda x: x[..., :0], ValueError, "a multiple of"),
    Bad("one dimension", EVERY, SOURCE, lambda x: x.flatten(), ValueError, "dimensions"),
    Bad("strided elements", EVERY, SOURCE, _every_second, ValueError, "stride 1"),
    Bad("transposed", EVERY, SOURCE, lambda x: x.mT.contiguous().mT, ValueError, "stride 1"),
    Bad("no memory", EVERY, SOURCE, _on_meta, (ValueError, TypeError, RuntimeError), ""),
    Bad("a list", EVERY, SOURCE, lambda x: x.tolist(), TypeError, ""),
    Bad("fp64 scale", EVERY, "global_scale", lambda s: s.double(), TypeError, "float32"),
    Bad("scales", EVERY, "global_scale", lambda s: s.expand(7).clone(), ValueError, "one element"),
    Bad("a number as scale", EVERY, "global_scale", lambda _: 2.0, TypeError, ""),
    Bad("unknown layout", EVERY, "layout", lambda _: "128x4", ValueError, "swizzled_8x4"),
    Bad("no layout", EVERY, "layout", lambda _: None, (TypeError, ValueError), "linear"),
    Bad("int8 out", EVERY, "out", lambda x: x.view(torch.int8), TypeError, "uint8"),
    Bad("short out", EVERY, "out", lambda x: x[..., :-1], ValueError, "shape"),
    Bad("out rows apart", EVERY, "out", _padded_rows, ValueError, "contiguous"),
    Bad("shifted out", EVERY, "out", _shifted, ValueError, "aligned to 8"),
    Bad("linear scales", EVERY, "out_scale", lambda s: s[..., :M, :5].contiguous(), ValueError, "shape"),
    Bad("shifted scales", EVERY, "out_scale", _shifted, ValueError, "aligned to 16"),
    Bad("e5m2 scales", EVERY, "out_scale", lambda s: s.view(torch.float8_e5m2), TypeError, "float8_e4m3fn"),
    Bad("int64 counts", (SILU,), "mask_m", lambda m: m.long(), TypeError, "int32"),
    Bad("too few counts", (SILU,), "mask_m", lambda m: m[:1], ValueError, "shape"),
    Bad("every second count", (SILU,), "mask_m", lambda m: _zeros(m, 4)[::2], ValueError, "contiguous"),
    Bad("fp16 residual", (NORM,), "residual", lambda r: r.to(FP16), TypeError, "bfloat16"),
    Bad("short residual", (NORM,), "residual", lambda r: r[:-1], ValueError, "shape"),
    Bad("one residual row", (NORM,), "residual", _same_rows, ValueError, "elements apart"),
    Bad("fp32 weight", (NORM,), "weight", lambda w: w.float(), TypeError, "bfloat16"),
    Bad("short weight", (NORM,), "weight", lambda w: w[:-1], ValueError, "shape"),
    Bad("fp16 norm", (NORM,), "out_norm", lambda n: n.to(FP16), TypeError, "bfloat16"),
    Bad("one norm row", (NORM,), "out_norm", _same_rows, ValueError, "elements apart"),
    Bad("unknown layout", (NORM,), "second_layout", lambda _: "", ValueError, "linear"),
    Bad("fp64 second scale", (NORM,), "second_scale", lambda s: s.double(), TypeError, "float32"),
    Bad("short second out", (NORM,), "second_out", lambda x: x[:-1], ValueError, "shape"),
)


@pytest.mark.parametrize("op", EVERY)
def test_the_unspoiled_call_is_accepted(op: str, device: torch.device) -> None:
    Call(op, device).run()


@pytest.mark.parametrize("bad", CASES, ids=lambda bad: f"{bad.argument}: {bad.name}")
@pytest.mark.parametrize("op", EVERY)
def test_refused(op: str, bad: Bad, device: torch.device) -> None:
    if op not in bad.ops:
        pytest.skip("not an argument of this op")
    call = Call(op, device)
    argument = call.source if bad.argument == SOURCE else bad.argument
    call.args[argument] = bad.change(call.args[argument])
    with pytest.raises(bad.error) as raised:
        call.run()
    message = str(raised.value)
    assert argument in message
    assert bad.expected in message
    assert message.startswith(f"{op}: ")
    for name, output in call.outputs.items():
        if not (name == bad.argument and isinstance(call.args[name], torch.Tensor)):
            output.assert_untouched(name)
    if op == NORM and bad.argument != "residual":
        assert (call.args["residual"] == 1).all()


@pytest.mark.parametrize(
    ("op", "written", "other"),
    [
        (QUANTIZE, "out", "x"),
        (SILU, "out", "gate_up"),
        (NORM, "residual", "x"),
        (NORM, "residual", "weight"),
        (NORM, "out_norm", "residual"),
        (NORM, "out", "residual"),
        (NORM, "second_out", "out"),
    ],
)
def test_outputs_may_not_overlap(op: str, written: str, other: str, device: torch.device) -> None:
    call = Call(op, device)
    out, source = call.args[written], call.args[other]
    memory = torch.zeros(out.nbytes + source.nbytes, dtype=torch.uint8, device=device)
    call.args[written] = memory[: out.nbytes].view(out.dtype).view(out.shape)
    start = out.nbytes - 32
    call.args[other] = memory[start : start + source.nbytes].view(source.dtype).view(source.shape)
    with pytest.raises(ValueError, match="memory apart from"):
        call.run()
    assert not memory.any()


def test_a_norm_that_is_x_in_part_is_refused(device: torch.device) -> None:
    call = Call(NORM, device)
    memory = torch.zeros(M + 1, K, dtype=BF16, device=device)
    call.args["x"], call.args["out_norm"] = memory[:M], memory[1:]
    with pytest.raises(ValueError, match="out_norm: expected memory apart from x"):
        call.run()


def test_second_outputs_need_a_second_scale(device: torch.device) -> None:
    call = Call(NORM, device)
    call.args["second_scale"] = None
    with pytest.raises(ValueError, match="second_out: expected None without second_scale"):
        call.run()


def test_fake_tensors_do_not_reach_the_extension() -> None:
    with FakeTensorMode():
        x, scale = torch.empty(M, K, dtype=BF16), torch.empty(1)
        with pytest.raises((TypeError, ValueError)):
            _core.nvfp4_quantize(x, scale, "linear", None, None, allocate)


def test_parameters_are_inputs(device: torch.device) -> None:
    call = Call(NORM, device)
    call.args["weight"] = torch.nn.Parameter(call.args["weight"])
    call.args["global_scale"] = torch.nn.Parameter(call.args["global_scale"])
    call.run()
