"""One of two ranks under decode context parallelism: vLLM 0.33.0's context loop, stock and patched.

``python -m tests.vllm.two_ranks RANK PORT DEVICE``. The cache's gather and attention are stand-ins; the
gather between the ranks is ``torch.distributed`` (gloo on the CPU, NCCL on GPUs), the rest vLLM's own code.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers import BF16, E4M3, FP16, assert_same_bits
from tests.vllm.compare import LATENT, ROPE, Backend, counted, make_impl
from tests.vllm.driver import MLA, base

RANKS = 2
HEADS, NOPE, VALUE = 12, 128, 128
# Tokens of context, by request; a request may have none on a rank.
CONTEXTS = ((37, 5, 1), (64,), (3, 130, 16, 2))
CHUNK = 24  # local tokens of a request in a chunk


class Context:
    """The latent rows of some requests, the same on every rank, token i on rank i % 2."""

    def __init__(self, lengths: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        rng = torch.Generator().manual_seed(sum(lengths))
        self.rows = [
            torch.randn(n, LATENT + ROPE, generator=rng).mul(3).to(dtype).to(device) for n in lengths
        ]
        self.lengths = lengths

    def local_lengths(self) -> list[list[int]]:
        return [[len(range(rank, n, RANKS)) for rank in range(RANKS)] for n in self.lengths]

    def chunks(self, rank: int) -> list[Any]:
        """The metadata of every chunk, and the rows that the rank's cache has for it."""
        found = []
        local = self.local_lengths()
        for start in range(0, max(max(each) for each in local), CHUNK):
            padded = [max(0, min(CHUNK, max(each) - start)) for each in local]
            here = [range(start, min(start + n, each[rank])) for n, each in zip(padded, local, strict=True)]
            totals = [
                sum(max(0, min(n, each[other] - start)) for other in range(RANKS))
                for n, each in zip(padded, local, strict=True)
            ]
            chunk = SimpleNamespace(
                num_context_tokens=sum(totals),
                num_local_context_tokens=sum(padded),
                num_requests=len(self.lengths),
                max_seq_len=max(totals),
                request_slice=slice(0, len(self.lengths)),
                token_slice=slice(0, 3),
                starts=None,
                padded_local_seq_lens=padded,
                local_context_lens_allranks=local,
                local_starts=[start] * len(self.lengths),
                padded_local_cu_seq_lens=[0],
                padded_local_token_to_seq=[0],
            )
            chunk.local_rows = [
                rows[rank::RANKS][places.start : max(places.start, places.stop)]
                for rows, places in zip(self.rows, here, strict=True)
            ]
            found.append(chunk)
        return found


class Loop:
    """One run of the loop on this rank."""

    def __init__(self, impl: Any, context: Context, q_data_type: torch.dtype, rank: int) -> None:
        self.impl, self.backend = impl, Backend()
        dtype, device = context.rows[0].dtype, context.rows[0].device
        self._chunks = context.chunks(rank)
        most = max(chunk.num_local_context_tokens for chunk in self._chunks)
        # What no rank has written is not a number.
        workspace = torch.full(((RANKS + 1) * most, LATENT + ROPE), torch.nan, dtype=dtype, device=device)
        manager = SimpleNamespace(kv_gather=dist.all_gather_into_tensor)
        chunked = SimpleNamespace(
            chunks=self._chunks, empty_token_slices=[], workspace=workspace, dcp_manager=manager
        )
        self._metadata = SimpleNamespace(
            prefill=SimpleNamespace(
                prefill_backend=self.backend,
                chunked_context=chunked,
                q_data_type=q_data_type,
                block_table=[None] * len(context.lengths),
            )
        )
        self._q = torch.zeros(3, HEADS, NOPE + ROPE, dtype=dtype, device=device)
        self._gathers = iter(self._chunks)

    def gather(self, *, dst: torch.Tensor, **_: Any) -> None:
        """In place of ``cp_gather_cache``: this rank's rows, padding left as it is."""
        chunk = next(self._gathers)
        at = 0
        for rows, padded in zip(chunk.local_rows, chunk.padded_local_seq_lens, strict=True):
            dst[at : at + len(rows)] = rows
            at += padded

    def run(self, loop: Any) -> None:
        from vllm import _custom_ops

        _custom_ops.cp_gather_cache = self.gather
        loop(self.impl, self._q, None, self._metadata, k_scale=None, dcp_world_size=RANKS)


def main(rank: int, port: str, kind: str) -> None:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", rank=rank, world_size=RANKS)
    mla = importlib.import_module(MLA)
    mla.init_mla_context_partial = lambda *_, **__: (None, None)
    mla.accumulate_mla_context_chunk = lambda *_, **__: None
    from vllm_hotpath.plugin import register

    register()
    patched = base(mla)._context_parallel_compute_prefill_context
    stock_concat = base(mla)._concat_k_nope_k_pe.__wrapped__
    for dtype in (BF16, FP16):
        for q_data_type in (dtype, E4M3):
            for lengths in CONTEXTS:
                check(rank, patched, stock_concat, Context(lengths, dtype, device), q_data_type)
    dist.barrier()
    dist.destroy_process_group()
    print("both loops agree")


def check(rank: int, patched: Any, stock_concat: Any, context: Context, q_data_type: torch.dtype) -> None:
    """The keys and values of every chunk, bit by bit."""
    impl = make_impl(base(importlib.import_module(MLA)), HEADS, NOPE, VALUE, context.rows[0].dtype)
    impl.kv_b_proj.weight = impl.kv_b_proj.weight.to(context.rows[0].device)
    ours = Loop(impl, context, q_data_type, rank)
    fp8 = q_data_type == E4M3
    with counted("mla_kv_concat") as concats, counted("mla_kv_concat_quant_fp8") as packs:
        ours.run(patched)
    chunks = len(context.chunks(rank))
    assert (len(concats), len(packs)) == ((0, chunks) if fp8 else (chunks, 0))
    stock = Loop(impl, context, q_data_type, rank)
    impl._concat_k_nope_k_pe = lambda *arguments: stock_concat(impl, *arguments)
    stock.run(patched.__wrapped__)
    assert len(ours.backend.calls) == len(stock.backend.calls) == chunks
    for got, want in zip(ours.backend.calls, stock.backend.calls, strict=True):
        for name, one, other in zip("qkv", got, want, strict=True):
            assert not one.isnan().any(), name
            assert_same_bits(one, other, name)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
