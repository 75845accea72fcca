"""What a feature is made of, and how the flags and the installed vLLM decide about it. Patches nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_hotpath import envs
from vllm_hotpath.plugin import targets

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vllm_hotpath.plugin.targets import Definition, Target

ON, NATIVE, STOCK, OFF = "on", "native upstream", "stock", "off"


class Outcome(NamedTuple):
    """State of a feature. ``detail`` is the reason of ``stock``, and what is patched for ``on``."""

    state: str
    detail: str

    def __str__(self) -> str:
        return f"{self.state}: {self.detail}" if self.detail else self.state


@dataclass(frozen=True)
class Patch:
    """One replacement: ``replace(original)`` makes the new object, when vLLM's module has been imported.

    An ``optional`` target that this vLLM does not have is left out; any other problem turns the feature off.
    """

    target: Target
    replace: Callable[[Any], Any]
    optional: bool = False


class Need(NamedTuple):
    """A parameter that a target must have although it is not patched, and the reason to give without it."""

    target: Target
    parameter: str
    otherwise: str


@dataclass(frozen=True)
class Plan:
    """What the flags ask of a feature: the state that they lead to, and the patches that it takes.

    ``detail`` is for the INFO line; empty, it names the patched objects. A plan for ``stock`` is a kill
    switch: where there is nothing to switch off, it is fulfilled. ``known`` are objects that the patches rely
    on without replacing them: where they exist, they have to be what we know. Where ``native`` exists, vLLM
    does it all by itself. A ``refusal`` is why the feature stays off, whatever vLLM is, without FORCE.
    """

    patches: tuple[Patch, ...]
    state: str = ON
    detail: str = ""
    needs: tuple[Need, ...] = ()
    known: tuple[Target, ...] = ()
    native: Target | None = None
    refusal: str = ""


@dataclass(frozen=True)
class Feature:
    """A feature, its flags (the first turns it on), and what they ask for: None if for nothing.

    ``plan`` raises ValueError for a flag that it cannot read.
    """

    name: str
    flags: tuple[str, ...]
    plan: Callable[[Mapping[str, str]], Plan | None]

    def switches_off(self, environ: Mapping[str, str]) -> bool:
        """Whether its flags are set as a kill switch."""
        try:
            plan = self.plan(environ)
        except ValueError:
            return False
        return plan is not None and plan.state == STOCK


@dataclass(frozen=True)
class Resolution:
    """A plan held against the installed vLLM. With a ``problem`` there are no patches, and vLLM is stock."""

    plan: Plan | None
    patches: tuple[tuple[Patch, Definition], ...] = ()
    problem: str = ""
    native: Definition | None = None

    def outcome(self) -> Outcome:
        """What the INFO line says once the patches are in place."""
        if self.problem or self.plan is None:
            return Outcome(STOCK, self.problem)
        if self.native is not None:
            return Outcome(NATIVE, self.native.name)
        return Outcome(self.plan.state, self.plan.detail or ", ".join(d.name for _, d in self.patches))


def resolve(feature: Feature, environ: Mapping[str, str] | None = None) -> Resolution | None:
    """Decide about a feature without importing anything of vLLM; None if no flag asks for it."""
    environ = os.environ if environ is None else environ
    try:
        plan = feature.plan(environ)
    except ValueError as error:
        return Resolution(None, problem=str(error))
    if plan is None:
        return None
    vllm = targets.find_vllm()
    if vllm is None:
        return Resolution(plan, problem="vLLM is not installed")
    root, version = vllm
    force = envs.is_on(envs.FORCE, environ)
    if plan.native is not None:
        native = targets.probe(plan.native, root, version, force=True).definition
        if native is not None:
            return Resolution(plan, native=native)
    if plan.refusal and not force:
        return Resolution(plan, problem=plan.refusal)
    for need in plan.needs:
        found = targets.parameters(need.target, root)
        if found and need.parameter not in found:
            return Resolution(plan, problem=need.otherwise)
    for target in plan.known:
        probe = targets.probe(target, root, version, force=force)
        if probe.problem and not probe.nothing_to_patch:
            return Resolution(plan, problem=probe.problem)
    patches = []
    for patch in plan.patches:
        # A kill switch does not build on what it takes away, so an unknown source is no reason to leave it.
        probe = targets.probe(patch.target, root, version, force=force or plan.state == STOCK)
        if probe.nothing_to_patch and (patch.optional or plan.state == STOCK):
            continue
        if probe.problem or probe.definition is None:
            return Resolution(plan, problem=probe.problem)
        patches.append((patch, probe.definition))
    return Resolution(plan, tuple(patches))
