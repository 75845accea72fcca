"""What ``engines_two_gpus.py`` asks of vLLM's workers, and weights for a model without a checkpoint.

vLLM imports this module in every worker before it loads the model (``worker_extension_cls``).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import statistics
import sys
import time
import zlib
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from vllm_hotpath.plugin import hooks

if TYPE_CHECKING:
    from collections.abc import Callable

# Tokens of context that one chunk holds. vLLM's own size would take all that a short test has at once.
CONTEXT_WORKSPACE = int(os.environ.get("HOTPATH_CONTEXT_WORKSPACE", "512"))

KERNEL, MEMCPY, MEMSET = 0, 1, 2
_LOOPS = ("_context_parallel_compute_prefill_context", "_compute_prefill_context")


class _KeptGraph(torch.cuda.CUDAGraph):
    """A CUDA graph that can still be read after it was captured."""

    def __new__(cls, keep_graph: bool = True) -> _KeptGraph:
        return super().__new__(cls, True)

    def __init__(self, keep_graph: bool = True) -> None:
        super().__init__(True)  # type: ignore[call-arg]


def prepare() -> None:
    """Keep captured graphs and make context chunks small, in this process."""
    torch.cuda.CUDAGraph = torch.cuda.graphs.CUDAGraph = _KeptGraph  # type: ignore[misc]
    size = staticmethod(lambda vllm_config: CONTEXT_WORKSPACE)
    MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size = size


prepare()


@register_model_loader("scaled_random")
class ScaledRandom(DummyModelLoader):  # type: ignore[misc]
    """Random weights that keep the variance from layer to layer, each from the seed of its name."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Fill the parameters of ``model``."""
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if not parameter.is_floating_point():
                    continue
                rng = torch.Generator(device=parameter.device).manual_seed(zlib.crc32(name.encode()))
                if "e_score_correction_bias" in name:
                    parameter.normal_(0, 0.01, generator=rng)
                elif parameter.ndim == 1:
                    parameter.fill_(1.0 if "norm" in name else 0.0)
                else:
                    deviation = 1.0 if "embed_tokens" in name else parameter.shape[-1] ** -0.5
                    parameter.normal_(0, deviation, generator=rng)


class Probe:
    """Methods that vLLM's worker inherits, for ``LLM.collective_rpc``."""

    _hotpath_loop: ClassVar[dict[str, Any]] = {}

    def hotpath_watch_context(self, calls: int) -> bool:
        """Time the next context loop of the first MLA layer that has more than one chunk, ``calls`` times."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        impl = next(m.impl for m in model.modules() if hasattr(getattr(m, "impl", None), _LOOPS[0]))
        for name in _LOOPS:
            setattr(impl, name, _watch(name, getattr(impl, name), calls, self._hotpath_loop))
        return True

    def hotpath_context(self) -> dict[str, Any]:
        """What the watch has found."""
        return dict(self._hotpath_loop)

    def hotpath_patched(self) -> dict[str, list[str]]:
        """The features of which this rank's process runs patches, and the modules that have them."""
        found: dict[str, list[str]] = {}
        for name, module in sorted(sys.modules.items()):
            for feature in vars(module).get(hooks.PATCHED_BY, ()) if module else ():
                found.setdefault(feature, []).append(name)
        return found

    def hotpath_graphs(self) -> list[dict[str, Any]]:
        """The structure of every captured full decode graph."""
        graphs = sorted(self._hotpath_full().items())
        return [{"tokens": tokens, **_structure(graph)} for tokens, graph in graphs]

    def hotpath_replay(self, tokens: int, sets: int, replays: int) -> float | None:
        """GPU time of a replay of the full decode graph of ``tokens``, microseconds, median over ``sets``."""
        graph = self._hotpath_full().get(tokens)
        if graph is None:
            return None
        for _ in range(10):
            graph.replay()
        times = []
        for _ in range(sets):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(replays):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / replays * 1e3)
        return float(statistics.median(times))

    def _hotpath_full(self) -> dict[int, torch.cuda.CUDAGraph]:
        entries = getattr(self.model_runner.model, "concrete_cudagraph_entries", {})  # type: ignore[attr-defined]
        return {
            shape.num_tokens: entry.cudagraph
            for shape, entry in entries.items()
            if entry.cudagraph is not None
        }


def _watch(name: str, loop: Callable[..., Any], calls: int, found: dict[str, Any]) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        result = loop(*args, **kwargs)
        metadata = next(a for a in (*args, *kwargs.values()) if hasattr(a, "prefill"))
        chunks = len(metadata.prefill.chunked_context.seq_tot)
        if found or chunks < 2:
            return result
        repeated = True
        host, device = [], []
        for _ in range(calls):
            torch.cuda.synchronize()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin = time.perf_counter()
            start.record()
            again = loop(*args, **kwargs)
            end.record()
            host.append((time.perf_counter() - begin) * 1e6)
            torch.cuda.synchronize()
            device.append(start.elapsed_time(end) * 1e3)
            repeated &= all(torch.equal(a, b) for a, b in zip(result, again, strict=True))
        digest = hashlib.sha256()
        for tensor in result:
            digest.update(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes())
        found.update(
            loop=name,
            chunks=chunks,
            tokens=[int(t) for t in metadata.prefill.chunked_context.seq_tot],
            host_us=statistics.median(host),
            device_us=statistics.median(device),
            repeated=repeated,
            sha=digest.hexdigest()[:16],
        )
        return result

    return watched


class _KernelParams(ctypes.Structure):
    _fields_ = (
        ("func", ctypes.c_void_p),
        ("sizes", ctypes.c_uint * 7),
        ("kernel_params", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_void_p),
        ("ctx", ctypes.c_void_p),
    )


def _structure(graph: torch.cuda.CUDAGraph) -> dict[str, Any]:
    """How many nodes there are, how many are collectives, and how many could run beside a collective.

    A collective on a side stream is concurrent with what the main stream does meanwhile, so none is there if
    that count is zero.
    """
    driver = ctypes.CDLL("libcuda.so.1")

    def ask(function: str, *arguments: Any) -> None:
        code = getattr(driver, function)(*arguments)
        if code:
            raise RuntimeError(f"{function}: CUDA driver error {code}")

    handle, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    ask("cuGraphGetNodes", handle, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    ask("cuGraphGetNodes", handle, nodes, ctypes.byref(count))
    index = {node: i for i, node in enumerate(nodes)}
    ask("cuGraphGetEdges_v2", handle, None, None, None, ctypes.byref(count))
    sources, targets = (ctypes.c_void_p * count.value)(), (ctypes.c_void_p * count.value)()
    data = (ctypes.c_uint64 * count.value)()
    ask("cuGraphGetEdges_v2", handle, sources, targets, data, ctypes.byref(count))

    work, collectives, ours = 0, [], 0
    names = [""] * len(nodes)
    for i, node in enumerate(nodes):
        kind = ctypes.c_int()
        ask("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
        if kind.value in (KERNEL, MEMCPY, MEMSET):
            work |= 1 << i
        if kind.value == KERNEL:
            params, name = _KernelParams(), ctypes.c_char_p()
            ask("cuGraphKernelNodeGetParams_v2", ctypes.c_void_p(node), ctypes.byref(params))
            if params.func:
                ask("cuFuncGetName", ctypes.byref(name), ctypes.c_void_p(params.func))
            else:
                ask("cuKernelGetName", ctypes.byref(name), ctypes.c_void_p(params.kern))
            symbol = names[i] = (name.value or b"").decode()
            if "nccl" in symbol.lower():
                collectives.append(i)
            ours += symbol.startswith(("moe_router_", "mla_kv_pack", "kda_decode", "nvfp4_", "moe_fp4_"))

    after: list[list[int]] = [[] for _ in nodes]
    before: list[list[int]] = [[] for _ in nodes]
    for source, target in zip(sources, targets, strict=True):
        after[index[source]].append(index[target])
        before[index[target]].append(index[source])
    ancestors, descendants = _closure(before, after), _closure(after, before)
    beside = [work & ~ancestors[i] & ~descendants[i] & ~(1 << i) for i in collectives]
    kernels = {names[k] for nodes_of in beside for k in range(len(nodes)) if nodes_of >> k & 1}
    branching = sum(
        bool(work & ~ancestors[i] & ~descendants[i] & ~(1 << i)) for i in range(len(nodes)) if work >> i & 1
    )
    return {
        "nodes": work.bit_count(),
        "ours": ours,
        "collectives": len(collectives),
        "concurrent_with_collectives": sum(nodes_of.bit_count() for nodes_of in beside),
        "kernels_beside_collectives": sorted(kernels),
        "nodes_that_overlap": branching,
    }


def _closure(before: list[list[int]], after: list[list[int]]) -> list[int]:
    """For every node the bits of all nodes from which it can be reached."""
    reached = [0] * len(before)
    waiting = [len(b) for b in before]
    ready = [i for i, n in enumerate(waiting) if n == 0]
    while ready:
        node = ready.pop()
        for follower in after[node]:
            reached[follower] |= reached[node] | 1 << node
            waiting[follower] -= 1
            if waiting[follower] == 0:
                ready.append(follower)
    return reached
