"""Run real vLLM engines on two GPUs, with and without the plugin's flags.

    python benchmarks/engines_two_gpus.py [--out FOLDER] [--starts N]

Needs vLLM, the installed package and two GPUs. Every engine is a small DeepSeek-V3 style model with random
weights under tensor parallelism, half of them under decode context parallelism as well, and prompts so
long that their context is read in chunks; collectives go through NCCL. Writes
``<gpu>-two-gpus.{md,json}``: whether tokens and context loops are bit by bit those of the stock engine,
what each rank's process runs of the features, whether the captured decode graphs have a collective that
anything could overlap, times, and how many of the starts came up and answered.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BIT_EXACT = ("VLLM_HOTPATH_MLA_KV_PACK", "VLLM_MLA_TWO_STREAM_DECODE", "VLLM_MOE_SHARED_EXPERTS_TWO_STREAM")
ALL = (*BIT_EXACT, "VLLM_HOTPATH_MOE_ROUTER")
FEATURES = ("mla_kv_pack", "mla_two_stream", "moe_shared_experts", "moe_router")
# vLLM 0.22.1 decodes up to 512 tokens of a request at once: only longer pieces of a prompt read context.
LAYERS, PROMPT, TOKENS, BATCHES = 12, 3000, 64, (1, 8)
PIECE = 1024


def write_model(folder: Path, layers: int) -> None:
    """A DeepSeek-V3 style configuration without weights."""
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 2048,
        "intermediate_size": 4096,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "kv_lora_rank": 512,
        "q_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 32,
        "num_experts_per_tok": 6,
        "n_shared_experts": 1,
        "moe_intermediate_size": 512,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.0,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "initializer_range": 0.02,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


# ---- One engine, in a process of its own -----------------------------------------------------------------


def engine(run: dict[str, Any]) -> dict[str, Any]:
    """Start an engine, let it answer, and if ``run`` says so measure it while no other engine does."""
    import torch
    import vllm
    from vllm import LLM

    import engine_worker

    engine_worker.prepare()
    model = Path(run["scratch"]) / "model"
    write_model(model, run["layers"])
    compilation: dict[str, Any] = {"cudagraph_capture_sizes": list(BATCHES)}
    if run["measure"]:
        # Inductor's timing-driven choices off: tokens are then the same in every process.
        compilation["inductor_compile_config"] = {"combo_kernels": True, "benchmark_combo_kernel": False}
    else:
        compilation |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    begin = time.time()
    llm = LLM(
        model=str(model),
        skip_tokenizer_init=True,
        load_format="scaled_random",
        dtype="bfloat16",
        max_model_len=4096,
        max_num_seqs=max(BATCHES),
        max_num_batched_tokens=PIECE,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.08,
        kv_cache_memory_bytes=1 << 30,
        seed=0,
        disable_log_stats=True,
        tensor_parallel_size=2,
        decode_context_parallel_size=run["dcp"],
        distributed_executor_backend="mp",
        disable_custom_all_reduce=True,
        worker_extension_cls="engine_worker.Probe",
        compilation_config=compilation,
    )
    result: dict[str, Any] = {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(0),
        "ready_s": time.time() - begin,
        "cudagraph_mode": str(llm.llm_engine.vllm_config.compilation_config.cudagraph_mode),
    }
    with open(run["lock"], "w") as lock:
        if run["measure"]:
            fcntl.flock(lock, fcntl.LOCK_EX)
        llm.collective_rpc("hotpath_watch_context", args=(20 if run["measure"] else 1,))
        answer(llm, 1, 8, "first")
        result["context"] = llm.collective_rpc("hotpath_context")
        result["graphs"] = llm.collective_rpc("hotpath_graphs")
        result["patched"] = llm.collective_rpc("hotpath_patched")
        result["runs"] = {}
        for batch in BATCHES:
            tokens = TOKENS if run["measure"] else 8
            answer(llm, batch, tokens, f"warm{batch}")
            answers = [answer(llm, batch, tokens, f"b{batch}r{i}") for i in range(3 if run["measure"] else 1)]
            times, hashes = zip(*answers, strict=True)
            replay = (9, 40) if run["measure"] else (1, 2)
            result["runs"][batch] = {
                "ids": sorted(set(hashes)),
                "token_us": sorted(times)[len(times) // 2],
                "graph_us": llm.collective_rpc("hotpath_replay", args=(batch, *replay)),
            }
    return result


def answer(llm: Any, batch: int, tokens: int, tag: str) -> tuple[float, str]:
    """Time per token after the first of all requests, microseconds, and a hash of all tokens."""
    import random

    from vllm import SamplingParams

    rng = random.Random(1234)
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    for i in range(batch):
        prompt = [rng.randrange(10, 31990) for _ in range(PROMPT)]
        llm.llm_engine.add_request(f"{tag}-{i}", {"prompt_token_ids": prompt}, sampling)
    made: dict[str, list[int]] = {}
    all_began, last = 0.0, 0.0
    begun_tokens = 0
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            made[output.request_id] = list(output.outputs[0].token_ids)
            last = time.perf_counter()
        if not all_began and len(made) == batch:
            all_began, begun_tokens = time.perf_counter(), sum(map(len, made.values()))
    rest = sum(map(len, made.values())) - begun_tokens
    ids = [made[name] for name in sorted(made)]
    digest = hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]
    return (last - all_began) / max(rest / batch, 1) * 1e6, digest


# ---- All of them -----------------------------------------------------------------------------------------


def start(run: dict[str, Any], number: int, scratch: Path) -> dict[str, Any]:
    """Start the process of a run."""
    folder = scratch / f"run{number}"
    folder.mkdir()
    run |= {"scratch": str(folder), "lock": str(scratch / "lock"), "log": str(folder / "log.txt")}
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("VLLM_HOTPATH", "VLLM_M"))
    }
    environment |= {
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TORCHINDUCTOR_DETERMINISTIC": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "2",
        "OMP_NUM_THREADS": "2",
        "VLLM_PORT": str(21000 + 300 * number),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        # Kept wherever the collectives run: multicast can put GPUs that others share out of service.
        "NCCL_NVLS_ENABLE": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")])),
        **dict.fromkeys(run["flags"], "1"),
    }
    with open(run["log"], "w") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, "--engine", json.dumps(run)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    return run | {"process": process, "began": time.time()}


def finish(runs: list[dict[str, Any]], limit: float) -> None:
    """Wait for processes; one that takes longer than ``limit`` seconds has hung and is killed."""
    for run in runs:
        process, began = run.pop("process"), run.pop("began")
        try:
            status = process.wait(max(1.0, began + limit - time.time()))
            run["outcome"] = "answered" if status == 0 else f"failed with status {status}"
        except subprocess.TimeoutExpired:
            run["outcome"] = f"hung: no answer in {limit:.0f} s"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        result = Path(run["scratch"]) / "result.json"
        run.update(json.loads(result.read_text()) if result.exists() else {})
        run["lines"] = route_lines(Path(run["log"]).read_text(errors="replace"))
        if run["outcome"] != "answered":
            run["tail"] = Path(run["log"]).read_text(errors="replace")[-3000:]


def route_lines(log: str) -> list[str]:
    """What the engine's processes have reported of the features, each line once.

    A forked worker inherits the patches, and the line with them.
    """
    pattern = re.compile(rf"\] ({'|'.join(FEATURES)}): (.*)$", re.MULTILINE)
    return sorted({f"{feature}: {outcome.strip()}" for feature, outcome in pattern.findall(log)})


def main() -> int:
    """Run the engines and write the page; 1 if anything was not as it must be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=HERE / "results", metavar="FOLDER")
    parser.add_argument("--starts", type=int, default=20, metavar="N", help="engines to start in all")
    parser.add_argument("--at-once", type=int, default=7, metavar="N", help="engines that start side by side")
    parser.add_argument(
        "--limit", type=float, default=240, metavar="S", help="seconds until a start has hung"
    )
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        run = json.loads(arguments.engine)
        result = engine(run)
        (Path(run["scratch"]) / "result.json").write_text(json.dumps(result))
        return 0

    measured: list[dict[str, Any]] = [
        {"dcp": dcp, "flags": list(flags), "layers": LAYERS, "measure": True}
        for dcp in (1, 2)
        for flags in ((), BIT_EXACT, ALL)
    ]
    started: list[dict[str, Any]] = [
        {"dcp": 1 + i % 2, "flags": list(ALL), "layers": 3, "measure": False}
        for i in range(max(0, arguments.starts - len(measured)))
    ]
    scratch = Path(tempfile.mkdtemp(prefix="two-gpus-"))
    runs: list[dict[str, Any]] = []
    size = arguments.at_once
    groups = [measured, *(started[i : i + size] for i in range(0, len(started), size))]
    for group in groups:
        running = [start(run, len(runs) + i, scratch) for i, run in enumerate(group)]
        finish(running, arguments.limit)
        runs += running
        for run in running:
            print(json.dumps({k: run.get(k) for k in ("dcp", "flags", "outcome", "ready_s")}), flush=True)
            if "tail" in run:
                print(run["tail"], flush=True)
    for run in runs:
        for key in ("scratch", "lock", "log"):
            run.pop(key, None)
    shutil.rmtree(scratch, ignore_errors=True)
    return write(runs, len(measured), arguments.out)


def write(runs: list[dict[str, Any]], measured: int, out: Path) -> int:
    """Write the page and its record; 1 if anything was not as it must be."""
    import torch

    from vllm_hotpath.bench import environment, report

    device = torch.device("cuda", 0)
    facts = environment.collect(f"python benchmarks/{Path(__file__).name}", device, HERE.parent)
    facts["vllm"] = ", ".join(sorted({run["vllm"] for run in runs if "vllm" in run}))
    name = f"{environment.slug(device)}-two-gpus"
    text, wrong = page(runs[:measured], runs)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps({"facts": facts, "runs": runs}, indent=1) + "\n")
    head = report.head(f"Engines on two GPUs, {facts['device']}", facts)
    report.write(out / f"{name}.md", f"{head}\n{text}")
    for problem in wrong:
        print(problem, file=sys.stderr)
    return bool(wrong)


def page(measured: list[dict[str, Any]], runs: list[dict[str, Any]]) -> tuple[str, list[str]]:
    """The page's tables, and what in them is not as it must be."""
    from vllm_hotpath.bench import report

    wrong = [
        f"run {i}, DCP {run['dcp']}, {len(run['flags'])} flags: {run['outcome']}"
        for i, run in enumerate(runs)
        if run["outcome"] != "answered"
    ]
    stock = {run["dcp"]: run for run in measured if not run["flags"]}
    times, graphs, contexts, lines = [], [], [], []
    for run in measured:
        if run["outcome"] != "answered" or stock[run["dcp"]]["outcome"] != "answered":
            continue
        base = stock[run["dcp"]]
        which = [str(run["dcp"]), _set_name(run["flags"])]
        for batch, mine in run["runs"].items():
            other = base["runs"][batch]
            same = mine["ids"] == other["ids"] and len(mine["ids"]) == 1
            if not same and "MOE_ROUTER" not in " ".join(run["flags"]):
                wrong.append(f"DCP {run['dcp']}, {which[1]}, B={batch}: tokens differ from stock")
            row = [*which, str(batch)]
            for key in ("graph_us", "token_us"):
                got, want = _slowest(mine[key]), _slowest(other[key])
                row += (
                    ["-", ""]
                    if got is None or want is None
                    else [f"{got:.1f}", _change(got, want, run is base)]
                )
            times.append([*row, "" if run is base else "equal" if same else "differ"])
        for rank, found in enumerate(run["graphs"]):
            for graph in found:
                numbers = [graph[k] for k in ("nodes", "ours", "collectives", "nodes_that_overlap")]
                overlapped = graph["concurrent_with_collectives"]
                graphs.append([*which, str(rank), str(graph["tokens"]), *map(str, numbers), str(overlapped)])
                if overlapped:
                    wrong.append(f"DCP {run['dcp']}, {which[1]}: a collective can be overlapped")
        for rank, (mine, other) in enumerate(zip(run["context"], base["context"], strict=True)):
            if not mine:
                wrong.append(f"DCP {run['dcp']}, {which[1]}: no context of several chunks was seen")
                continue
            same = mine["sha"] == other.get("sha") and mine["repeated"]
            if not same:
                wrong.append(f"DCP {run['dcp']}, {which[1]}, rank {rank}: the context loop's result differs")
            chunks = mine["chunks"]
            row = [
                *which,
                str(rank),
                str(chunks),
                *(f"{mine[k] / chunks:.1f}" for k in ("device_us", "host_us")),
            ]
            contexts.append([*row, "" if run is base else "equal" if same else "differ"])
    for kind in dict.fromkeys((run["dcp"], tuple(run["flags"])) for run in runs):
        answers = [run for run in runs if (run["dcp"], tuple(run["flags"])) == kind and "patched" in run]
        which = [str(kind[0]), _set_name(list(kind[1]))]
        for rank in range(2):
            features = {", ".join(sorted(run["patched"][rank])) for run in answers}
            lines += [[*which, f"rank {rank}", each or "none"] for each in sorted(features)]
        lines += [
            [*which, "lines", line] for line in sorted({line for run in answers for line in run["lines"]})
        ]
        for run in answers:
            ranks = run["patched"]
            # A feature that stays stock says so and patches nothing.
            outcomes = [line.split(": ") for line in run["lines"] if " stays stock: " not in line]
            on = {feature for feature, state, *_ in outcomes if state == "on"}
            if len(ranks) != 2 or ranks[0] != ranks[1]:
                problem = "the ranks run different features"
            elif len(outcomes) != len(kind[1]):
                problem = f"{len(kind[1])} features were asked for and {len(outcomes)} reported"
            elif on != set(ranks[0]):
                problem = f"{sorted(on)} are said to be on, and {sorted(ranks[0])} are"
            else:
                continue
            wrong.append(f"DCP {which[0]}, {which[1]}: {problem}")
    answered = sum(run["outcome"] == "answered" for run in runs)
    table = report.markdown_table
    parts = [
        "Tensor parallel size 2; `DCP` is the decode context parallel size. DeepSeek-V3 style model, "
        f"{LAYERS} layers, 16 heads, hidden size 2048, 32 experts, random weights; prompts of {PROMPT} "
        f"tokens, {TOKENS} new ones, chunked prefill of {PIECE} tokens, context chunks of 512 tokens. All "
        "reductions through NCCL, NVLink multicast off. `bit-exact` is "
        + ", ".join(f"`{flag}`" for flag in BIT_EXACT)
        + "; `all` adds `VLLM_HOTPATH_MOE_ROUTER`, whose logits are summed in another order.",
        "",
        f"{answered} of {len(runs)} starts came up and answered; the engines of a group started side by "
        f"side. {len(runs) - len(measured)} of them, with all flags, had 3 layers and were not measured.",
        "",
        "## Tokens and time per token",
        "",
        "Microseconds, medians; `graph` is a replay of the captured decode graph on the slower rank.",
        "",
        table(["DCP", "flags", "B", "graph", "", "token", "", "tokens"], times, text_columns=2),
        "",
        "## The context loop of the first layer",
        "",
        "Microseconds per chunk, median of 20 calls on the data of a real prefill; the result is compared "
        "with that of the stock engine bit by bit.",
        "",
        table(["DCP", "flags", "rank", "chunks", "device", "host", "result"], contexts, text_columns=2),
        "",
        "## Collectives in the captured decode graphs",
        "",
        "`overlap` counts the nodes that can run beside another one; `beside collectives`, summed over the "
        "collectives, the nodes that could run beside it: a collective on a side stream would have some.",
        "",
        table(
            ["DCP", "flags", "rank", "B", "nodes", "ours", "collectives", "overlap", "beside collectives"],
            graphs,
            text_columns=2,
        ),
        "",
        "## What each rank runs",
        "",
        "Features whose patches are in the modules of the rank's process, and the lines that the engine's "
        "processes have logged.",
        "",
        table(["DCP", "flags", "", ""], lines, text_columns=4),
    ]
    if wrong:
        parts += ["", "## Not as it must be", "", *(f"- {problem}" for problem in wrong)]
    return "\n".join(parts) + "\n", wrong


def _set_name(flags: list[str]) -> str:
    return {0: "none", len(BIT_EXACT): "bit-exact", len(ALL): "all"}[len(flags)]


def _slowest(value: Any) -> float | None:
    values = value if isinstance(value, list) else [value]
    return None if any(v is None for v in values) else max(values)


def _change(got: float, want: float, is_stock: bool) -> str:
    return "" if is_stock else f"{100 * (got / want - 1):+.1f} %"


if __name__ == "__main__":
    sys.exit(main())
