"""What ``verify`` and ``bench`` know of the MoE router: inputs, fp64 reference, bytes, floor, peer."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm_hotpath.bench import peers
from vllm_hotpath.bench.gates import QUICK_TOKENS, READ, TOKENS, reads_of
from vllm_hotpath.bench.models import MODELS, Gate
from vllm_hotpath.bench.numerics import Guarded, Tolerance
from vllm_hotpath.bench.spec import BenchCase, BufferSet, OpSpec, Output, VerifyCase
from vllm_hotpath.ops import moe_router

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vllm_hotpath.bench.models import Model

BF16, FP32 = torch.bfloat16, torch.float32

# Gates beside those of the models: few experts, and a hidden size that is no power of two.
_OTHER_GATES = (Gate(32, 2880, 4), Gate(64, 2048, 6), Gate(128, 4096, 8))
# The gate that is measured with fp32 weights as well.
_FP32_GATE = MODELS["deepseek-v3"].gate

_NEAR = Tolerance(relative=4e-6, dims=1)
"""Sums and weights of the logits that the op itself returned: a few roundings of fp32 scores."""

_NEAR_BF16_LOGITS = Tolerance(relative=4e-3, dims=1)
"""Where a bf16 logit may be rounded the other way, because it was summed in another order."""


class Recipe(NamedTuple):
    """One way to make inputs and to call the op.

    ``odd``: rows of odd strides and bases. ``equal``: few different logits, so that most experts tie.
    """

    weight: torch.dtype = BF16
    scoring: str = "sigmoid"
    bias: bool = True
    renormalize: bool = True
    odd: bool = False
    equal: bool = False
    allocate: bool = False

    def __str__(self) -> str:
        parts = {
            "fp32 weight": self.weight == FP32,
            "softmax": self.scoring == "softmax",
            "no bias": not self.bias,
            "not renormalised": not self.renormalize,
            "odd": self.odd,
            "ties": self.equal,
            "allocated": self.allocate,
        }
        return " ".join(name for name, there in parts.items() if there) or "plain"


_VERIFY: tuple[tuple[Recipe, tuple[int, ...]], ...] = (
    (Recipe(), (0, 1, 8, 13, 32)),
    (Recipe(weight=FP32), (1, 11)),
    (Recipe(odd=True), (5,)),
    (Recipe(weight=FP32, odd=True, renormalize=False), (3,)),
    (Recipe(scoring="softmax", bias=False), (7,)),
    (Recipe(bias=False, allocate=True), (0, 6)),
    (Recipe(equal=True), (16,)),
)


class Problem(NamedTuple):
    """The inputs of a call."""

    gate: Gate
    recipe: Recipe
    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None

    @property
    def logits_dtype(self) -> torch.dtype:
        """What logits are rounded to."""
        return FP32 if self.gate.fp32_logits or self.recipe.weight == FP32 else BF16


def call(
    p: Problem,
    weights: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
    *,
    logits: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op on ``p``."""
    return moe_router.moe_router(
        p.hidden,
        p.weight,
        top_k=p.gate.top_k,
        bias=p.bias,
        n_group=p.gate.n_group,
        topk_group=p.gate.topk_group,
        scoring=p.recipe.scoring,
        renormalize=p.recipe.renormalize,
        routed_scaling_factor=p.gate.scaling,
        logits_dtype=p.logits_dtype,
        out_logits=logits,
        topk_weights=weights,
        topk_ids=ids,
        workspace=workspace,
    )


def exact_logits(p: Problem) -> torch.Tensor:
    """``hidden @ weight.T`` in fp64."""
    return p.hidden.double() @ p.weight.double().T


class Selected(NamedTuple):
    """The reference's view of a selection, in fp64.

    Attributes:
        scores: of every expert.
        sums: what experts are selected by, -inf outside the best groups.
        order: experts of the best sums, of equal ones the lower first.
    """

    scores: torch.Tensor
    sums: torch.Tensor
    order: torch.Tensor

    def best(self) -> torch.Tensor:
        """The sums of the selected experts, best first."""
        return self.sums.gather(1, self.order)


def select(p: Problem, logits: torch.Tensor) -> Selected:
    """Select from ``logits`` in plain torch."""
    wide = logits.double()
    scores = torch.sigmoid(wide) if p.recipe.scoring == "sigmoid" else torch.softmax(wide, -1)
    sums = scores if p.bias is None else scores + p.bias
    if p.gate.n_group > 1:
        grouped = sums.unflatten(1, (p.gate.n_group, -1))
        best = grouped.topk(1 if p.bias is None else 2, -1).values.sum(-1)
        chosen = best.sort(descending=True, stable=True).indices[:, : p.gate.topk_group]
        outside = torch.ones_like(best, dtype=torch.bool).scatter_(1, chosen, False)
        sums = grouped.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(1)
    order = sums.sort(descending=True, stable=True).indices[:, : p.gate.top_k]
    return Selected(scores, sums, order)


def shares(p: Problem, selected: Selected, ids: torch.Tensor) -> torch.Tensor:
    """The weights that the experts ``ids`` have to have."""
    chosen = selected.scores.gather(1, ids.long())
    if p.recipe.renormalize:
        chosen = chosen / chosen.sum(1, keepdim=True)
    return chosen * p.gate.scaling


def judge(p: Problem, selected: Selected, weights: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
    """What has to agree with :func:`verdict` if the selection is right.

    Experts of sums that are equal up to rounding may change places, so sums are compared place by place, and
    every weight with that of the expert which it stands beside.
    """
    inside = ids.clamp(0, p.gate.experts - 1).long()
    distinct = (inside.sort(1).values.diff(dim=1) != 0).sum(1) + (ids >= 0).all(1)
    return [selected.sums.gather(1, inside), weights / shares(p, selected, inside), distinct]


def verdict(p: Problem, selected: Selected) -> list[torch.Tensor]:
    """The sums place by place, the quotients of weights, and how many different experts there are."""
    best = selected.best()
    return [best, torch.ones_like(best), torch.full((len(best),), p.gate.top_k, device=best.device)]


def _problem(
    gate: Gate, recipe: Recipe, tokens: int, draw: Callable[[tuple[int, ...]], torch.Tensor]
) -> Problem:
    hidden = draw((tokens, gate.hidden))
    weight = draw((gate.experts, gate.hidden)) * (2 / gate.hidden**0.5)
    bias = draw((gate.experts,)) * 0.1 if recipe.bias else None
    if recipe.equal:
        # Logits of one value in five.
        hidden[:, 1:] = 0
        hidden[:, 0] = hidden[:, 0].sign()
        weight[:, 0] = (weight[:, 0] * gate.hidden**0.5).round().clamp(-2, 2)
        bias = None if bias is None else (bias * 10).round() / 4
    if recipe.odd:
        rows = draw((tokens + gate.experts, gate.hidden + 3)).to(recipe.weight)
        rows[tokens:, 1:-2] = weight.to(recipe.weight)
        weight = rows[tokens:, 1:-2]
        rows = draw((tokens, gate.hidden + 5)).to(BF16)
        rows[:, 3:-2] = hidden.to(BF16)
        return Problem(gate, recipe, rows[:, 3:-2], weight, bias)
    return Problem(gate, recipe, hidden.to(BF16), weight.to(recipe.weight), bias)


def _verify(
    gate: Gate, recipe: Recipe, tokens: int
) -> Callable[[torch.Generator, torch.device], list[Output]]:
    def run(generator: torch.Generator, device: torch.device) -> list[Output]:
        def draw(shape: tuple[int, ...]) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(device)

        p = _problem(gate, recipe, tokens, draw)
        logits = Guarded((tokens, gate.experts + 2), p.logits_dtype, device)
        between = logits.tensor[:, gate.experts :].clone()
        got_logits = logits.tensor[:, : gate.experts]
        outputs = [Guarded((tokens, gate.top_k), dtype, device) for dtype in (FP32, torch.int32)]
        given = [None, None] if recipe.allocate else [output.tensor for output in outputs]
        weights, ids = call(p, *given, logits=got_logits)
        selected = select(p, got_logits)
        sums, quotients, distinct = judge(p, selected, weights, ids)
        want_sums, ones, all_distinct = verdict(p, selected)
        rounding = Tolerance(relative=1e-5, dims=1, ulps=1 if p.logits_dtype == BF16 else 0)
        found = [
            Output("logits", got_logits, exact_logits(p), rounding),
            Output("sums of the selected experts", sums, want_sums, _NEAR),
            Output("weights over those of the reference", quotients, ones, _NEAR),
            Output("different experts", distinct, all_distinct),
            Output("bytes between rows of logits", logits.tensor[:, gate.experts :], between),
            Output("bytes beside logits", logits.guard(), logits.untouched()),
        ]
        if recipe.equal:
            found.append(Output("ids", ids.long(), selected.order))
        for name, output in zip(("weights", "ids"), outputs, strict=True):
            found.append(Output(f"bytes beside {name}", output.guard(), output.untouched()))
        return found

    return run


def _verify_cases(op: str, gate: Gate) -> Iterator[VerifyCase]:
    for recipe, every in _VERIFY:
        for tokens in every:
            yield VerifyCase(f"M={tokens} {recipe}", _verify(gate, recipe, tokens))


def _make(gate: Gate, recipe: Recipe, tokens: int, device: torch.device, count: int) -> list[BufferSet]:
    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, device=device)

    weights = torch.empty(count, tokens, gate.top_k, device=device)
    ids = torch.empty(count, tokens, gate.top_k, dtype=torch.int32, device=device)
    # Layers of a model share one workspace, because each takes it from torch's pool in turn.
    workspace = torch.empty(2 * tokens * gate.experts, dtype=torch.int64, device=device)
    return [
        buffer_set(_problem(gate, recipe, tokens, draw), weights[i], ids[i], workspace) for i in range(count)
    ]


def peer_logits(p: Problem) -> torch.Tensor:
    """The logits as vLLM has cuBLAS compute them."""
    if p.recipe.weight == FP32:
        return torch.nn.functional.linear(p.hidden.float(), p.weight)
    if p.logits_dtype == FP32:
        return torch.mm(p.hidden, p.weight.T, out_dtype=FP32)
    return torch.nn.functional.linear(p.hidden, p.weight)


def buffer_set(p: Problem, weights: torch.Tensor, ids: torch.Tensor, workspace: torch.Tensor) -> BufferSet:
    """What is timed of ``p``, into contiguous ``weights`` and ``ids`` of [M, top_k]."""
    peer = peers.op("_moe_C", "grouped_topk")
    gate = p.gate

    def ours() -> tuple[torch.Tensor, torch.Tensor]:
        return call(p, weights, ids, workspace=workspace)

    def theirs() -> tuple[torch.Tensor, torch.Tensor]:
        assert peer is not None
        groups = (gate.n_group, gate.topk_group, gate.top_k)
        options = (p.recipe.renormalize, gate.scaling, p.bias, 1)
        made: tuple[torch.Tensor, torch.Tensor] = peer(peer_logits(p), *groups, *options)
        return made

    last: list[tuple[torch.Tensor, torch.Tensor]] = []

    def kept(
        subject: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    ) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        """The subject, whose results are there to be judged."""

        def run() -> tuple[torch.Tensor, torch.Tensor]:
            last[:] = [subject()]
            return last[0]

        return run

    def selected() -> Selected:
        return select(p, exact_logits(p).to(p.logits_dtype))

    near = _NEAR_BF16_LOGITS if p.logits_dtype == BF16 else _NEAR * 10
    return BufferSet(
        subjects={"ours": kept(ours)} | ({"peer": kept(theirs)} if peer else {}),
        outputs=(weights, ids),
        want=lambda: verdict(p, selected()),
        got=lambda: judge(p, selected(), *last[0]),
        tolerances=(near, near, None),
        floors=reads_of(p.weight, workspace),
    )


def bytes_moved(gate: Gate, recipe: Recipe, tokens: int) -> tuple[int, int]:
    """Bytes that the op has to read and to write."""
    read = gate.experts * (gate.hidden * recipe.weight.itemsize + 4) + tokens * gate.hidden * 2
    return read, tokens * gate.top_k * 8


def _bench_cases(op: str, gate: Gate, quick: bool) -> Iterator[BenchCase]:
    for weight in (BF16, FP32) if gate == _FP32_GATE and not quick else (BF16,):
        recipe = Recipe(weight)
        for tokens in QUICK_TOKENS if quick or weight == FP32 else TOKENS:
            read, written = bytes_moved(gate, recipe, tokens)
            yield BenchCase(
                op=op,
                params={
                    "E": gate.experts,
                    "K": gate.hidden,
                    "top_k": gate.top_k,
                    "groups": f"{gate.topk_group} of {gate.n_group}",
                    "weight": "bf16" if weight == BF16 else "fp32",
                    "M": tokens,
                },
                bytes_read=read,
                bytes_written=written,
                set_bytes=read + written,
                make=lambda device, count, recipe=recipe, tokens=tokens: _make(  # type: ignore[misc]
                    gate, recipe, tokens, device, count
                ),
            )


def _gate(model: Model, tp: int) -> Gate | None:
    return model.gate


SPEC = OpSpec(
    stem="moe_router",
    shape=_gate,
    verify_cases=_verify_cases,
    bench_shapes=tuple(model.gate for model in MODELS.values() if model.gate) + _OTHER_GATES,
    bench_cases=_bench_cases,
    peer="the gate by cuBLAS (`F.linear`, in fp32 for an fp32 weight; `torch.mm` with `out_dtype` for fp32 "
    "logits of a bf16 weight), then grouped_topk",
    floor=READ,
    agreement="(plain torch in fp64: the sums that the experts are selected by, place by place, and the "
    "weights of the experts selected)",
)
