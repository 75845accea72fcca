"""Calls of ``moe_router`` in every form callers use, calls with chosen logits, and checked calls."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch

import vllm_hotpath
from tests.helpers import BF16, POISON, SEED, Output, as_bits, assert_same_bits
from tests.reference import moe_router as reference
from tests.reference.moe_router import Options

if TYPE_CHECKING:
    from collections.abc import Sequence

FP32 = torch.float32
NAN, INF = math.nan, math.inf
OUTPUTS = ("topk_weights", "topk_ids")

# Layout of a [rows, K] matrix: name -> (row stride, offset) in elements.
_LAYOUTS = {
    "contiguous": lambda k: (k, 0),
    "slice of a wide projection": lambda k: (2 * k + 64, k + 32),
    "odd stride": lambda k: (k + 1, 0),
    "odd base": lambda k: (k, 1),
    "odd base and stride": lambda k: (k + 3, 5),
    "4-byte aligned": lambda k: (k + 2, 2),
    "8-byte aligned": lambda k: (k + 4, 4),
    "one row for all": lambda k: (0, 0),
    "overlapping rows": lambda k: (8, 0),
}
LAYOUTS = tuple(_LAYOUTS)


@dataclasses.dataclass(frozen=True)
class Form:
    """What distinguishes a call. ``spread`` is about the standard deviation of the logits."""

    tokens: int = 3
    experts: int = 64
    hidden: int = 512
    top_k: int = 8
    n_group: int = 1
    topk_group: int = 1
    scoring: str = "sigmoid"
    renormalize: bool = True
    scaling: float = 1.0
    bias: bool = True
    weight: torch.dtype = BF16
    logits: torch.dtype | None = None
    hidden_layout: str = "contiguous"
    weight_layout: str = "contiguous"
    spread: float = 2.0


FORMS = {
    "kimi k2.6": Form(experts=384, hidden=7168, scaling=2.827),
    "kimi k3": Form(experts=896, hidden=7168, top_k=16, logits=FP32, scaling=2.827),
    "deepseek v3": Form(experts=256, hidden=7168, n_group=8, topk_group=4, scaling=2.5),
    "kimi linear": Form(experts=256, hidden=2304, scaling=2.446),
    "fp32 weight": Form(experts=128, hidden=1024, weight=FP32),
    "fp32 weight, bf16 logits": Form(experts=128, hidden=1024, weight=FP32, logits=BF16),
    "many with bf16 logits": Form(experts=640, top_k=20, scaling=2.5),
    "many in groups": Form(experts=256, top_k=12, n_group=4, topk_group=2, logits=FP32),
    "22 of 512": Form(experts=512, top_k=22),
    "softmax": Form(scoring="softmax", bias=False, renormalize=False),
    "softmax in groups": Form(experts=160, scoring="softmax", top_k=6, n_group=8, topk_group=3, scaling=16.0),
    "no bias": Form(bias=False, n_group=8, topk_group=2),
    "odd sizes": Form(tokens=5, experts=77, hidden=40, top_k=7),
}


class Call:
    """A call of ``moe_router`` as keyword arguments."""

    def __init__(self, args: dict[str, Any]) -> None:
        self.args = args

    def __getitem__(self, name: str) -> Any:
        return self.args[name]

    @property
    def shape(self) -> tuple[int, int]:
        return self["hidden_states"].shape[0], self["gate_weight"].shape[0]

    @property
    def logits_dtype(self) -> torch.dtype:
        dtype: torch.dtype = self["logits_dtype"] or self["gate_weight"].dtype
        return dtype

    @property
    def options(self) -> Options:
        return Options(**{name: self[name] for name in Options._fields})

    def changed(self, **changes: Any) -> Call:
        return Call(self.args | changes)

    def to(self, device: torch.device | str) -> Call:
        """The same values on a device, row strides and bases kept."""
        return Call({name: _moved(value, device) for name, value in self.args.items()})

    def with_outputs(self) -> Call:
        """The same call with poisoned outputs of its own, where its inputs are."""
        device, ids_shape = self["hidden_states"].device, (self.shape[0], self["top_k"])
        return self.changed(
            out_logits=torch.full(self.shape, -7.0, dtype=self.logits_dtype, device=device),
            topk_weights=torch.full(ids_shape, -7.0, device=device),
            topk_ids=torch.full(ids_shape, -7, dtype=torch.int32, device=device),
        )

    def run(self, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
        args = self.args | changes
        return vllm_hotpath.moe_router(args.pop("hidden_states"), args.pop("gate_weight"), **args)


def _moved(value: Any, device: torch.device | str) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    storage = torch.empty(0, dtype=value.dtype, device=value.device).set_(value.untyped_storage())
    return storage.to(device, copy=True).as_strided(value.shape, value.stride(), value.storage_offset())


def matrix(layout: str, values: torch.Tensor, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """``values`` in a named layout; what lies between its rows is NaN, unless they overlap."""
    rows, columns = values.shape
    stride, offset = _LAYOUTS[layout](columns)
    length = offset + max(rows - 1, 0) * stride + columns + 8
    storage = torch.full((length,), NAN, dtype=dtype)
    if rows and stride < columns:
        storage = values.flatten()[torch.arange(length) % values.numel()].to(dtype)
        return storage.to(device).as_strided((rows, columns), (stride, 1), offset)
    view = storage.as_strided((rows, columns), (stride, 1), offset)
    view.copy_(values)
    return storage.to(device).as_strided((rows, columns), (stride, 1), offset)


def workspace_elements(tokens: int, experts: int) -> int:
    """What a workspace has to hold: two elements an expert for each token."""
    return 2 * tokens * experts


def make_call(
    device: torch.device | str, rng: torch.Generator, form: Form | None = None, **changes: Any
) -> Call:
    """A random call. Logits have a standard deviation of ``spread``, the bias one of a tenth."""
    form = dataclasses.replace(form or Form(), **changes)
    x = torch.randn(form.tokens, form.hidden, generator=rng)
    w = torch.randn(form.experts, form.hidden, generator=rng) * (form.spread / math.sqrt(form.hidden))
    bias = (torch.randn(form.experts, generator=rng) * 0.1).to(device) if form.bias else None
    return Call(
        {
            "hidden_states": matrix(form.hidden_layout, x, BF16, device),
            "gate_weight": matrix(form.weight_layout, w, form.weight, device),
            "top_k": form.top_k,
            "bias": bias,
            "n_group": form.n_group,
            "topk_group": form.topk_group,
            "scoring": form.scoring,
            "renormalize": form.renormalize,
            "routed_scaling_factor": form.scaling,
            "logits_dtype": form.logits,
        }
    )


def call_of_logits(
    logits: Sequence[float] | torch.Tensor,
    device: torch.device | str = "cpu",
    *,
    bias: Sequence[float] | torch.Tensor | None = None,
    factors: Sequence[float] = (1.0,),
    dtype: torch.dtype = FP32,
    top_k: int = 8,
    **options: Any,
) -> Call:
    """A call whose logits are those given, one row of them for each of ``factors`` and times that.

    Of K = 8 only the first value is not zero, so NaN and infinities reach no other logit.
    """
    values = torch.as_tensor(logits, dtype=FP32)
    weight, hidden = torch.zeros(len(values), 8), torch.zeros(len(factors), 8)
    weight[:, 0], hidden[:, 0] = values, torch.tensor(factors)
    args = {
        "hidden_states": hidden.to(device, BF16),
        "gate_weight": weight.to(device, dtype),
        "top_k": top_k,
        "bias": None if bias is None else torch.as_tensor(bias, dtype=FP32).to(device),
        "n_group": 1,
        "topk_group": 1,
        "scoring": "sigmoid",
        "renormalize": True,
        "routed_scaling_factor": 1.0,
        "logits_dtype": None,
    }
    return Call(args | options)


def scores_of(logits: torch.Tensor, device: torch.device | str | None = None) -> torch.Tensor:
    """The op's own fp32 sigmoid of every logit, on the host: the weights of calls whose bias alone decides.

    Args:
        logits: any shape.
        device: where the op computes them, that of the logits by default.
    """
    device = device or logits.device
    flat = logits.detach().cpu().float().flatten()
    result = flat.clone()
    result[flat == INF], result[flat == -INF] = 1.0, 0.0
    finite = flat[flat.isfinite()].unique()
    table = torch.empty_like(finite)
    blocks = torch.full((32, 1024), -4.0)
    for block in range(32):
        blocks[block, block * 32 : block * 32 + 32] = 4.0
    biases = blocks.to(device)
    for first in range(0, len(finite), 1024):
        values = torch.zeros(1024)
        count = min(1024, len(finite) - first)
        values[:count] = finite[first : first + count]
        call = call_of_logits(values, device, top_k=32, renormalize=False)
        scores = torch.empty(1024)
        for block in range(-(-count // 32)):
            weights, ids = (one[0].cpu() for one in call.run(bias=biases[block]))
            assert torch.equal(
                ids.sort().values, torch.arange(block * 32, block * 32 + 32, dtype=torch.int32)
            )
            scores[ids.long()] = weights
        table[first : first + count] = scores[:count]
    known = flat.isfinite()
    result[known] = table[torch.searchsorted(finite, flat[known])]
    return result.view(logits.shape)


def softmax_scores_of(call: Call) -> torch.Tensor:
    """The op's own softmax scores of a call."""
    tokens, experts = call.shape
    result = torch.empty(tokens, experts, device=call["hidden_states"].device)
    for first in range(0, experts, 32):
        count = min(32, experts - first)
        bias = torch.full((experts,), -4.0, device=result.device)
        bias[first : first + count] = 4.0
        alone = {"n_group": 1, "topk_group": 1, "renormalize": False, "routed_scaling_factor": 1.0}
        weights, ids = call.run(bias=bias, top_k=count, **alone, **dict.fromkeys(OUTPUTS))
        result.scatter_(1, ids.long(), weights)
    return result


def assert_logits_close(got: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor) -> None:
    """Within the error of fp32 summation of the fp64 logits, and one rounding to bf16."""
    want, magnitude = reference.gate(hidden, weight)
    allowed = 64 * 2.0**-24 * magnitude + 1e-37
    if got.dtype == BF16:
        allowed = allowed + torch.exp2(torch.frexp(want.abs() + allowed).exponent.double() - 9)
    wrong = ~((got.double() - want).abs() <= allowed)
    assert not wrong.any(), (
        f"logits {wrong.nonzero()[0].tolist()}: {got[wrong][0]}, expected {want[wrong][0]}"
    )


def assert_routing(
    weights: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor, logits: torch.Tensor, options: Options
) -> None:
    """Ids are exact, weights within a few roundings."""
    want = reference.select(scores, logits, options)
    differ = (ids.cpu() != want.ids).any(1)
    if differ.any():
        row = int(differ.nonzero()[0, 0])
        raise AssertionError(
            f"ids of row {row}: got {ids[row].tolist()}, expected {want.ids[row].tolist()} "
            f"({int(differ.sum())} of {len(differ)} rows differ; HOTPATH_TEST_SEED={SEED})"
        )
    torch.testing.assert_close(weights.cpu().double(), want.weights, rtol=2e-6, atol=1e-37, equal_nan=True)


def poisoned(call: Call) -> dict[str, Output]:
    shape = (call.shape[0], call["top_k"])
    device = call["hidden_states"].device
    return {
        "topk_weights": Output(shape, FP32, device),
        "topk_ids": Output(shape, torch.int32, device),
    }


def check(call: Call, *, gap: int = 3, finite: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a call in each way and check every output, the guards, the bytes between rows and the inputs.

    Args:
        call: without outputs.
        gap: elements between the rows of the logits.
        finite: the logits are finite and compared with fp64; else the selection only starts from them.
    """
    device, (tokens, experts) = call["hidden_states"].device, call.shape
    inputs = [value for value in call.args.values() if isinstance(value, torch.Tensor)]
    before = [as_bits(value).clone() for value in inputs]
    outputs = poisoned(call)
    stored = Output((tokens, experts + gap), call.logits_dtype, device)
    logits = stored.tensor[:, :experts]
    given = {name: output.tensor for name, output in outputs.items()}
    weights, ids = call.run(**given, out_logits=logits)
    assert weights is given["topk_weights"]
    assert ids is given["topk_ids"]
    for name, output in (*outputs.items(), ("out_logits", stored)):
        output.assert_guards_intact(name)
    between = stored.tensor[:, experts:].contiguous()
    assert (between.view(torch.uint8) == POISON).all(), "bytes between rows of the logits were written"
    for value, bits in zip(inputs, before, strict=True):
        assert torch.equal(as_bits(value), bits), "an input was written"

    if finite:
        assert_logits_close(logits, call["hidden_states"], call["gate_weight"])
    scores = scores_of(logits) if call["scoring"] == "sigmoid" else softmax_scores_of(call)
    assert_routing(weights, ids, scores, logits, call.options)
    again = call.run()
    assert_same_bits(again[0], weights, "weights without out_logits")
    assert_same_bits(again[1], ids, "ids without out_logits")
    return weights, ids
