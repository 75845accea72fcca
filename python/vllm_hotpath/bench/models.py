"""The models whose shapes verify and bench use. What a later op needs to know of a model is added here.

Nothing in this file imports torch: the command line reads it to check its arguments.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gate:
    """The gate of a model's MoE layers, which every rank has whole, and how it selects experts."""

    experts: int
    hidden: int
    top_k: int
    n_group: int = 1
    topk_group: int = 1
    scaling: float = 1.0
    fp32_logits: bool = False

    def __str__(self) -> str:
        return f"E={self.experts} K={self.hidden}"


@dataclass(frozen=True)
class Model:
    """Sizes of a model, in elements, and the tensor-parallel sizes it is served with.

    ``heads`` are those of its MLA layers, ``kda_heads`` those of its Kimi Delta Attention layers, 0 without.
    ``hidden`` and ``moe_intermediate`` are the widths of an NVFP4 mixture of experts, 0 without one.
    """

    name: str
    title: str
    heads: int
    tp_sizes: tuple[int, ...]
    nope: int = 128
    rope: int = 64
    v: int = 128
    kda_heads: int = 0
    hidden: int = 0
    moe_intermediate: int = 0
    gate: Gate | None = None

    def heads_per_rank(self, tp: int) -> int:
        """Heads of an MLA layer on one of ``tp`` ranks.

        Raises:
            ValueError: the heads do not split into ``tp`` equal parts.
        """
        return self._share(self.heads, tp)

    def kda_heads_per_rank(self, tp: int) -> int:
        """Heads of a KDA layer on one of ``tp`` ranks, 0 for a model without such layers.

        Raises:
            ValueError: the heads do not split into ``tp`` equal parts.
        """
        return self._share(self.kda_heads, tp)

    def _share(self, heads: int, tp: int) -> int:
        if heads % tp:
            raise ValueError(f"{self.title} has {heads} heads, which {tp} ranks cannot share equally")
        return heads // tp


MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        Model(
            "kimi-k3",
            "Kimi-K3",
            heads=96,
            tp_sizes=(1, 2, 4, 8, 16, 32),
            kda_heads=96,
            gate=Gate(896, 7168, 16, fp32_logits=True),
        ),
        Model(
            "kimi-k2.6",
            "Kimi-K2.6",
            heads=64,
            tp_sizes=(1, 2, 4, 8, 16, 32),
            hidden=7168,
            moe_intermediate=2048,
            gate=Gate(384, 7168, 8, scaling=2.827),
        ),
        Model(
            "deepseek-v3",
            "DeepSeek-V3",
            heads=128,
            tp_sizes=(1, 2, 4, 8, 16, 32),
            hidden=7168,
            moe_intermediate=2048,
            gate=Gate(256, 7168, 8, n_group=8, topk_group=4, scaling=2.5),
        ),
        Model(
            "kimi-linear",
            "Kimi-Linear",
            heads=32,
            tp_sizes=(1, 2, 4, 8),
            kda_heads=32,
            gate=Gate(256, 2304, 8, scaling=2.446),
        ),
    )
}


def placements(names: list[str] | None = None, tp: int | None = None) -> list[tuple[Model, int]]:
    """Every (model, tensor-parallel size) asked for.

    Args:
        names: model names, all of them if empty or None.
        tp: one tensor-parallel size, or None for all that are meaningful for each model.

    Raises:
        ValueError: none of the models is served with ``tp`` ranks.
    """
    models = [MODELS[name] for name in names or MODELS]
    chosen = [(model, size) for model in models for size in model.tp_sizes if tp is None or size == tp]
    if not chosen:
        offered = "; ".join(f"{m.name}: {', '.join(map(str, m.tp_sizes))}" for m in models)
        raise ValueError(f"no model asked for is served with --tp {tp} ({offered})")
    return chosen
