"""Post-import hooks: call a function when a module has been imported, now or later."""

from __future__ import annotations

import importlib.abc
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

# In a module's globals: the features that have patched it since it was last executed.
PATCHED_BY = "__vllm_hotpath_patched_by__"


class _Finder(importlib.abc.MetaPathFinder):
    """First in ``sys.meta_path``: lets the others find the modules it waits for, and wraps their loaders."""

    is_vllm_hotpath = True

    def __init__(self) -> None:
        self.callbacks: dict[str, dict[str, Callable[[ModuleType], None]]] = {}
        # Modules whose import runs through one of our loaders, callbacks included.
        self.running: set[str] = set()
        self._asking = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        asking: set[str] = self._asking.__dict__.setdefault("names", set())
        # Another finder may ask every finder too, and so come back to this one.
        if fullname not in self.callbacks or fullname in asking:
            return None
        asking.add(fullname)
        try:
            for finder in tuple(sys.meta_path):
                if finder is self or not hasattr(finder, "find_spec"):
                    continue
                spec = finder.find_spec(fullname, path, target)
                if spec is not None:
                    if hasattr(spec.loader, "exec_module") and not isinstance(spec.loader, _Loader):
                        spec.loader = _Loader(spec.loader, spec, self)
                    return spec
            return None
        finally:
            asking.discard(fullname)


class _Loader(importlib.abc.Loader):
    """Runs a module's own loader and then the callbacks; the module keeps its own loader."""

    def __init__(self, loader: Any, spec: ModuleSpec, finder: _Finder) -> None:
        self._loader, self._spec, self._finder = loader, spec, finder

    def __getattr__(self, name: str) -> Any:
        if name in {"_loader", "_spec", "_finder"}:
            raise AttributeError(name)
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._spec.loader = module.__loader__ = self._loader
        module.__dict__.pop(PATCHED_BY, None)
        name, running = module.__name__, self._finder.running
        running.add(name)
        try:
            self._loader.exec_module(module)
            # A private copy of a module is not the one that vLLM uses.
            if sys.modules.get(name) is module:
                for callback in tuple(self._finder.callbacks.get(name, {}).values()):
                    callback(module)
        finally:
            running.discard(name)


def when_imported(module: str, key: str, callback: Callable[[ModuleType], None]) -> bool:
    """Call ``callback(module)`` whenever ``module`` has been executed, and now if it has been already.

    ``key`` names the callback: the same key replaces it. False if the module is halfway through an import
    that began before anyone waited for it here: the callback is not called for that one.
    """
    finder = _installed()
    if finder is None:
        finder = _Finder()
        sys.meta_path.insert(0, finder)
    finder.callbacks.setdefault(module, {})[key] = callback
    present = sys.modules.get(module)
    if present is None:
        return True
    if module in finder.running:
        return True
    if getattr(present.__spec__, "_initializing", False):
        return False
    callback(present)
    return True


def _installed() -> Any:
    """Our finder, of this module or of one that it replaced."""
    return next((finder for finder in sys.meta_path if getattr(finder, "is_vllm_hotpath", False)), None)
