"""A pytest plugin for vLLM's own tests: loads vLLM's plugins before them, and says what ours patched."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


_lines = _Lines()


def pytest_configure() -> None:
    """As in any process of vLLM."""
    from vllm.plugins import load_general_plugins

    logger = logging.getLogger("vllm.hotpath")
    logger.addHandler(_lines)
    logger.setLevel(logging.INFO)
    load_general_plugins()


def pytest_sessionfinish() -> None:
    """Leave the lines of our log to the test that has started this process."""
    Path(os.environ["HOTPATH_TEST_LINES"]).write_text(json.dumps(_lines.lines))
