"""What ``kda_decode_spec`` refuses beyond ``kda_decode``: nothing is written, and the message says why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.helpers import as_bits
from tests.kda_spec_cases import make_spec_call, spec_out

if TYPE_CHECKING:
    from collections.abc import Callable

BAD: dict[str, tuple[str, Callable[[Any], Any], type[Exception], str]] = {
    "one dimension of indices": ("state_indices", lambda t: t[:, 0], ValueError, "[rows, 1 to 8 tokens]"),
    "nine columns": ("state_indices", lambda t: t.repeat(1, 3)[:, :9], ValueError, "[rows, 1 to 8 tokens]"),
    "no columns": ("state_indices", lambda t: t[:, :0], ValueError, "[rows, 1 to 8 tokens]"),
    "float indices": ("state_indices", lambda t: t.float(), TypeError, "dtype int32 or int64"),
    "a start too few": ("query_start_loc", lambda t: t[1:], ValueError, "shape [4]"),
    "starts of two dimensions": ("query_start_loc", lambda t: t[None], ValueError, "shape [4]"),
    "int16 starts": ("query_start_loc", lambda t: t.short(), TypeError, "dtype int32 or int64"),
    "a count too many": ("num_accepted_tokens", lambda t: t.repeat(2), ValueError, "shape [3]"),
    "uint8 counts": ("num_accepted_tokens", lambda t: t.to(torch.uint8), TypeError, "dtype int32 or int64"),
    "no counts": ("num_accepted_tokens", lambda t: None, TypeError, "num_accepted_tokens"),
    "few columns": ("conv_state", lambda t: t[..., :5], ValueError, "6 or more"),
    "few gates": ("raw_gate", lambda t: t[1:], ValueError, "shape [8, 3, 128]"),
    "few betas": ("raw_beta", lambda t: t[1:], ValueError, "shape [8, 3]"),
    "few output gates": ("output_gate", lambda t: t[1:], ValueError, "shape [8, 3, 128]"),
    "a scalar of x": ("x", lambda t: t[0, 0], ValueError, "shape [0, 1152]"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_a_bad_argument_is_named_and_nothing_is_written(
    name: str, device: torch.device, rng: torch.Generator
) -> None:
    argument, change, error, expected = BAD[name]
    call = make_spec_call(device, rng)
    call.args["out"] = spec_out(call)
    before = [memory.clone() for memory in call.storages().values()]
    with pytest.raises(error) as caught:
        call.run(**{argument: change(call[argument])})
    text = str(caught.value)
    assert text.startswith("kda_decode_spec: "), text
    assert expected in text
    for memory, old in zip(call.storages().values(), before, strict=True):
        assert torch.equal(memory, old)


def test_tokens_without_rows_are_refused(device: torch.device, rng: torch.Generator) -> None:
    call = make_spec_call(device, rng)
    none = {"state_indices": 0, "query_start_loc": 1, "num_accepted_tokens": 0}
    with pytest.raises(ValueError, match="no tokens, as state_indices has no rows"):
        call.run(**{name: call[name][:count] for name, count in none.items()})


def test_outputs_apart_from_counts(device: torch.device, rng: torch.Generator) -> None:
    call = make_spec_call(device, rng)
    out = spec_out(call)
    for name in ("query_start_loc", "num_accepted_tokens"):
        inside = as_bits(out).view(-1)[: 2 * call[name].numel()].view(torch.int32)
        with pytest.raises(ValueError, match=f"memory apart from {name}"):
            call.run(out=out, **{name: inside.copy_(call[name])})
