"""Puts the patches that the flags ask for into vLLM's modules: all of a feature's in a module, or none."""

from __future__ import annotations

import os
import sys
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

from vllm_hotpath import envs
from vllm_hotpath.plugin import hooks, report
from vllm_hotpath.plugin.errors import FeatureUnavailableError
from vllm_hotpath.plugin.features import FEATURES
from vllm_hotpath.plugin.plan import STOCK, Outcome, resolve

if TYPE_CHECKING:
    from types import ModuleType

    from vllm_hotpath.plugin.plan import Feature, Patch, Resolution
    from vllm_hotpath.plugin.targets import Definition

_ENVS = "vllm.envs"


def register() -> None:
    """Do what :func:`vllm_hotpath.plugin.register` says; may raise."""
    _add_flags(sys.modules.get(_ENVS))
    for feature in FEATURES:
        try:
            _register(feature)
        except FeatureUnavailableError:
            raise
        except Exception as error:
            # One feature's trouble is not the others'.
            _stay_stock(feature, f"{type(error).__name__}: {error}")


def _register(feature: Feature) -> None:
    found = resolve(feature)
    if found is None:
        return
    if envs.is_disabled():
        report.say(feature.name, report.disabled(os.environ))
        return
    hooks.when_imported(_ENVS, "flags", _add_flags)
    if found.problem:
        _stay_stock(feature, found.problem)
    elif not found.patches:
        report.say(feature.name, found.outcome())
    for module in {patch.target.module: None for patch, _ in found.patches}:
        if not hooks.when_imported(module, feature.name, partial(_patch, feature, found)):
            _stay_stock(feature, f"{module} is being imported while plugins are loaded")


def _add_flags(module: ModuleType | None) -> None:
    variables = getattr(module, "environment_variables", None)
    if isinstance(variables, dict):
        envs.add_to(variables)


def _stay_stock(feature: Feature, reason: str) -> None:
    if envs.is_on(envs.STRICT):
        raise FeatureUnavailableError(f"{envs.STRICT}=1, and {feature.name} cannot be turned on: {reason}")
    if feature.switches_off(os.environ):
        report.LOGGER.warning("%s: the kill switch is NOT applied: %s", feature.name, reason)
        return
    if not report.say(feature.name, Outcome(STOCK, reason)):
        report.LOGGER.warning("%s is stock in part: %s", feature.name, reason)


def _patch(feature: Feature, found: Resolution, module: ModuleType) -> None:
    """Patch a module that has been imported. Raises only with STRICT."""
    patched_by: set[str] = module.__dict__.setdefault(hooks.PATCHED_BY, set())
    if feature.name in patched_by:
        report.say(feature.name, found.outcome())
        return
    try:
        problem = _replace_all(found, module)
    except Exception as error:
        problem = f"{module.__name__} cannot be patched: {type(error).__name__}: {error}"
        report.LOGGER.warning("%s: %s", feature.name, problem)
    if problem:
        _stay_stock(feature, problem)
        return
    patched_by.add(feature.name)
    report.say(feature.name, found.outcome())


def _replace_all(found: Resolution, module: ModuleType) -> str:
    """Replace every object of the plan that lies in ``module``, or none; the reason if none."""
    replacements = []
    for patch, definition in found.patches:
        if patch.target.module != module.__name__:
            continue
        owner, name = _owner(module, definition.name, imported=patch.target.defined_in is not None)
        original = vars(owner).get(name)
        problem = _stranger(original, patch, definition)
        # Anything may be taken away; what is wrapped has to take the layer as its first argument.
        takes_away = found.plan is not None and found.plan.state == STOCK
        wrapped_anyway = envs.is_on(envs.FORCE) and isinstance(original, FunctionType)
        if problem and not (original is not None and takes_away) and not wrapped_anyway:
            return problem
        replacements.append((owner, name, patch.replace(original)))
    for owner, name, replacement in replacements:
        setattr(owner, name, replacement)
    return ""


def _owner(module: ModuleType, qualified: str, *, imported: bool) -> tuple[Any, str]:
    """The class or module that an object is an attribute of, and its name there."""
    *path, name = qualified.split(".")
    owner: Any = module
    for part in () if imported else path:
        owner = vars(owner)[part]
    return owner, name


def _stranger(found: Any, patch: Patch, definition: Definition) -> str:
    """Why an object is not the one that was probed in its file; empty if it is."""
    where = f"{patch.target.module}.{definition.name}"
    if not isinstance(found, FunctionType):
        return f"{where} is {found!r}, not the function that its file defines"
    home = sys.modules.get(patch.target.source_module)
    inner = _undecorated(found, definition.decorators)
    same_file = home is not None and inner.__code__.co_filename == home.__file__
    if same_file and inner.__code__.co_firstlineno == definition.line:
        return ""
    return f"{where} has been replaced by a function of {found.__code__.co_filename}"


def _undecorated(function: FunctionType, decorators: int) -> FunctionType:
    """What other features of ours wrap, and vLLM's own decorators, as many as are in the file.

    Wrappers of others stay on.
    """
    vllm, ours = sys.modules.get("vllm"), sys.modules[report.__package__]
    root, home = (os.path.dirname(getattr(m, "__file__", None) or "?") + os.sep for m in (vllm, ours))
    while True:
        path = function.__code__.co_filename
        inner = getattr(function, "__wrapped__", None)
        if path.startswith(root) and decorators:
            decorators -= 1
        elif not path.startswith(home):
            return function
        if not isinstance(inner, FunctionType):
            return function
        function = inner
