"""Calls of ``kda_decode_spec``, and the check of what a call may and may not write."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from tests.helpers import BF16, FP16, as_bits, assert_same_bits
from tests.kda_cases import (
    POSITIONAL,
    Call,
    Form,
    assert_out_close,
    assert_state_close,
    make_call,
    poisoned_out,
    tensors,
    whole,
)
from tests.reference import kda_decode as reference
from vllm_hotpath.ops.kda_decode import kda_decode_spec

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.reference.kda_decode import DecodedSpec

SPEC_POSITIONAL = (*POSITIONAL, "query_start_loc", "num_accepted_tokens")
FP32 = torch.float32


_FORM = Form()


@dataclass(frozen=True, kw_only=True)
class SpecForm:
    """Tokens and accepted tokens of every row; ``form`` has the rest, its rows aside.

    ``null`` holds (row, column) of null slots. ``tail`` tokens follow the last row's. With ``strided``, every
    index array is a column or a part of a wider one.
    """

    lengths: tuple[int, ...] = (4, 1, 3)
    accepted: tuple[int, ...] = (1, 2, 4)
    columns: int = 4
    null: tuple[tuple[int, int], ...] = ()
    tail: int = 0
    extra_columns: int = 0
    index_dtype: torch.dtype = torch.int32
    strided: bool = False
    form: Form = _FORM


SPEC_FORMS = {
    "kimi k3": SpecForm(),
    "DS": SpecForm(form=Form(layout="DS", inputs="wide")),
    "one token": SpecForm(lengths=(1, 1), accepted=(1, 1), columns=1),
    "eight tokens": SpecForm(lengths=(8, 5), accepted=(8, 3), columns=8, form=Form(inputs="wide")),
    "eight tokens, DS": SpecForm(lengths=(8, 7), accepted=(1, 7), columns=8, form=Form(layout="DS")),
    "unbounded, no norm": SpecForm(form=Form(lower_bound=None, norm=False)),
    "bias": SpecForm(form=Form(bias=True)),
    "bf16 state": SpecForm(form=Form(state_dtype=BF16)),
    "fp16 throughout": SpecForm(form=Form(activation=FP16, state_dtype=FP16, layout="DS")),
    "wider conv state": SpecForm(extra_columns=3),
    "wider conv state, DS": SpecForm(extra_columns=2, form=Form(layout="DS")),
    "own pools": SpecForm(form=Form(paged=False)),
    "kimi linear": SpecForm(
        form=Form(
            parts=True,
            paged=False,
            log_decay=True,
            sigmoid_beta=True,
            norm=False,
            weight_dtype=BF16,
            bias=True,
        )
    ),
    "fp32 gate and beta": SpecForm(form=Form(gate_dtype=FP32, beta_dtype=FP32, inputs="wide")),
    "int64, strided": SpecForm(index_dtype=torch.int64, strided=True),
    "int32, strided": SpecForm(strided=True, tail=2),
    "slot 0 is real": SpecForm(form=Form(null_index=-1), null=((1, 2),)),
    "rows without tokens": SpecForm(lengths=(0, 2, 0, 4, 0), accepted=(1, 1, 3, 2, 0)),
    "only rows without tokens": SpecForm(lengths=(0, 0), accepted=(1, 1)),
    "tail": SpecForm(lengths=(4, 0, 2), accepted=(1, 1, 1), tail=7),
    "a null first slot": SpecForm(null=((1, 0),)),
    "a null start": SpecForm(null=((2, 3),)),
    "null targets": SpecForm(lengths=(4, 4), accepted=(1, 1), null=((0, 2), (1, 3))),
    "nothing accepted": SpecForm(accepted=(0, 1, -3)),
    "too much accepted": SpecForm(accepted=(1, 5, 2**31 - 1)),
    "more tokens than slots": SpecForm(lengths=(5, 2, 9), accepted=(1, 1, 1)),
    "scale": SpecForm(form=Form(scale=0.7, options={"norm_eps": 0.5})),
    "small": SpecForm(form=Form(amplitude=1e-4, state_amplitude=1e-4)),
}


class SpecCall(Call):
    """Arguments of one call by name."""

    def run(self, **changes: Any) -> torch.Tensor:
        args = self.args | changes
        return kda_decode_spec(*[args.pop(name) for name in SPEC_POSITIONAL], **args)

    def spec_reference(self) -> DecodedSpec:
        args = {name: value for name, value in self.args.items() if name != "out"}
        return reference.decode_spec(*[args.pop(name) for name in SPEC_POSITIONAL], **args)

    def tokens(self) -> int:
        count: int = next(tensors(self["x"])).shape[0]
        return count


def _strided(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same values with others of no use between them, along every dimension."""
    for dim in range(values.dim()):
        values = torch.stack([values, torch.full_like(values, 2**31 - 1)], dim + 1).flatten(dim, dim + 1)
    return values.to(device)[(slice(None, None, 2),) * values.dim()]


def make_spec_call(
    device: torch.device, rng: torch.Generator, spec: SpecForm | None = None, **changes: Any
) -> SpecCall:
    """A random call: finite where a live row reads, random bit patterns wherever it must not."""
    spec = spec or SpecForm()
    form = replace(spec.form, **changes)
    rows, columns, tokens = len(spec.lengths), spec.columns, sum(spec.lengths) + spec.tail
    slots = rows * columns + 3
    form = replace(
        form,
        rows=tokens,
        null_rows=(),
        window=columns + 2 + spec.extra_columns,
        extra_slots=max(slots - tokens, 1),
    )
    args = make_call(device, rng, form).args
    first = form.null_index + 1
    table = torch.randperm(args["state"].shape[0] - first, generator=rng)[: rows * columns] + first
    table = table.view(rows, columns)
    for row, column in spec.null:
        table[row, column] = form.null_index - column
    starts = torch.tensor([0, *spec.lengths]).cumsum(0)
    accepted = torch.tensor(spec.accepted)
    made = {"state_indices": table, "query_start_loc": starts, "num_accepted_tokens": accepted}
    for name, values in made.items():
        kept = values.to(spec.index_dtype)
        args[name] = _strided(kept, device) if spec.strided else kept.to(device)
    call = SpecCall(args)
    refill_caches(call, rng, form)
    return call


def refill_caches(call: SpecCall, rng: torch.Generator, form: Form) -> None:
    """Finite values where the call reads caches: windows of first slots, states it starts from."""
    null = call["null_index"]
    for slots, accepted in zip(
        call["state_indices"].tolist(), call["num_accepted_tokens"].tolist(), strict=True
    ):
        if not 1 <= accepted <= len(slots) or slots[0] <= null or slots[accepted - 1] <= null:
            continue
        for pool in tensors(call["conv_state"]):
            window = pool[slots[0], :, accepted - 1 : accepted + 2]
            window.copy_(torch.randn(window.shape, generator=rng) * form.amplitude)
        state = call["state"][slots[accepted - 1]]
        state.copy_(torch.randn(state.shape, generator=rng) * form.state_amplitude)


def spec_out(call: SpecCall) -> torch.Tensor:
    """A poisoned output for every token."""
    out = call["num_accepted_tokens"].new_empty(call.tokens(), 1)
    return poisoned_out(call.changed(state_indices=out))


def windows(call: Call) -> list[torch.Tensor]:
    """The q, k and v parts of the convolution pool, ``[slots, H*D, W]`` views."""
    conv = call["conv_state"]
    return list(conv.chunk(3, dim=1) if isinstance(conv, torch.Tensor) else conv)


def check_spec(
    call: SpecCall, *, out: torch.Tensor | None = None, run: Callable[[], torch.Tensor] | None = None
) -> torch.Tensor:
    """Run the call (or ``run``) and check its results and every byte of every storage."""
    want = call.spec_reference()
    call = call.changed(out=spec_out(call) if out is None else out)
    before = {address: memory.clone() for address, memory in call.storages().items()}
    got = (run or call.run)()
    assert got is call["out"]
    got = got.reshape(want.out.shape)
    assert_out_close(got[want.live], want.out[want.live])
    assert not as_bits(got)[~want.live].any(), "out: a token of no live row is not +0.0"
    for slot, state in want.state.items():
        assert_state_close(call["state"][slot : slot + 1], state.unsqueeze(0))
    for slot, columns in want.conv.items():
        for part, pool in enumerate(windows(call)):
            assert_same_bits(
                pool[slot, :, : columns.shape[-1]], columns[part], f"conv_state of {'qkv'[part]}"
            )

    # With what was there before in the places of the results, the storages are as they were.
    def earlier(view: torch.Tensor) -> torch.Tensor:
        old = torch.empty(0, dtype=view.dtype, device=view.device)
        memory = before[view.untyped_storage().data_ptr()]
        return old.set_(memory.untyped_storage(), view.storage_offset(), view.shape, view.stride())

    after = call.copy()
    for slot in want.state:
        as_bits(after["state"])[slot] = as_bits(earlier(call["state"]))[slot]
    for slot, columns in want.conv.items():
        for copied, pool in zip(windows(after), windows(call), strict=True):
            kept = (slot, slice(None), slice(columns.shape[-1]))
            as_bits(copied)[kept] = as_bits(earlier(pool))[kept]
    as_bits(after["out"]).copy_(as_bits(earlier(call["out"])))
    for name, value in call.args.items():
        for original, copied in zip(tensors(value), tensors(after[name]), strict=True):
            old = before.pop(original.untyped_storage().data_ptr(), None)
            assert old is None or torch.equal(old, whole(copied)), f"memory of {name}: bytes changed"
    return got


def assert_same_caches(left: Call, right: Call) -> None:
    """Two calls left the same bits in pools of one shape."""
    assert_same_bits(as_bits(left["state"]), as_bits(right["state"]), "state")
    for one, other in zip(windows(left), windows(right), strict=True):
        assert_same_bits(one, other, "conv_state")
