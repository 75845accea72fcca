"""What became of every feature: one INFO line per feature and process, and the table of ``doctor``."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from vllm_hotpath import envs
from vllm_hotpath.plugin.features import FEATURES
from vllm_hotpath.plugin.plan import OFF, STOCK, Outcome, resolve

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_hotpath.plugin.plan import Feature

LOGGER = logging.getLogger("vllm.hotpath")

# Feature -> the process that it was reported in: a forked child reports for itself if it registers.
_reported: dict[str, int] = {}


def say(feature: str, outcome: Outcome) -> bool:
    """Log the one INFO line of a feature in this process. False if there was one: nothing is logged."""
    if _reported.get(feature) == os.getpid():
        return False
    _reported[feature] = os.getpid()
    if LOGGER.hasHandlers() or not _wants_info():
        LOGGER.info("%s: %s", feature, outcome)
        return True
    # vLLM 0.33.0 loads plugins in its front end before it sets up logging, and forks engines from there.
    record = LOGGER.makeRecord(LOGGER.name, logging.INFO, __file__, 0, f"{feature}: {outcome}", (), None)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s [%(name)s] %(message)s"))
    handler.handle(record)
    return True


def _wants_info() -> bool:
    """What vLLM's variables say about its logging, which has not been set up yet."""
    level = os.environ.get("VLLM_LOGGING_LEVEL", "INFO").upper()
    return os.environ.get("VLLM_CONFIGURE_LOGGING", "1") != "0" and level in {"DEBUG", "INFO"}


def table(environ: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """What the flags in ``environ`` make of every feature with the vLLM that is installed.

    Reads vLLM's source files and imports nothing of it. ``state`` and ``reason`` are those of the INFO line,
    or ``off`` where no flag asks for the feature; ``available`` says whether it could be turned on.
    """
    environ = os.environ if environ is None else environ
    return [_row(feature, environ) for feature in FEATURES]


def _row(feature: Feature, environ: Mapping[str, str]) -> dict[str, Any]:
    force = {envs.FORCE: environ.get(envs.FORCE, "")}
    possible = resolve(feature, {**force, feature.flags[0]: "1"})
    found = resolve(feature, environ)
    if found is None:
        outcome = Outcome(OFF, "")
    elif envs.is_disabled(environ):
        outcome = disabled(environ)
    else:
        outcome = found.outcome()
    return {
        "feature": feature.name,
        "flags": {name: environ.get(name) for name in feature.flags},
        "state": outcome.state,
        "reason": outcome.detail,
        "available": possible is not None and not possible.problem,
        "unavailable_reason": possible.problem if possible is not None else "",
        "patches": [
            f"{patch.target.module}.{definition.name}"
            for patch, definition in (possible.patches if possible is not None else ())
        ],
    }


def disabled(environ: Mapping[str, str]) -> Outcome:
    """The outcome of every feature where ``VLLM_HOTPATH_DISABLE`` is set."""
    return Outcome(STOCK, f"{envs.DISABLE}={environ.get(envs.DISABLE, '')}")
