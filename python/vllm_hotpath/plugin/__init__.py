"""The entry point that vLLM calls in every process (group ``vllm.general_plugins``).

Here is only :func:`register`. What may be patched is in ``features``, whether it is what we know in
``targets``, how it is replaced in ``patching`` and ``hooks``, and what is said about it in ``report``.
"""

from __future__ import annotations

from vllm_hotpath.plugin.errors import FeatureUnavailableError

__all__ = ["FeatureUnavailableError", "register"]


def register() -> None:
    """Add our flags to vLLM's, and patch what they ask for: at once, or when vLLM imports it.

    Without a flag nothing is patched and no import hook is installed. May be called again, and after a fork.
    Imports neither torch nor vLLM.

    Raises:
        FeatureUnavailableError: with ``VLLM_HOTPATH_STRICT=1`` only. Without it, whatever goes wrong is
            logged and leaves stock behaviour.
    """
    try:
        from vllm_hotpath.plugin import patching

        patching.register()
    except Exception as error:
        import logging
        import os

        if os.environ.get("VLLM_HOTPATH_STRICT", "0").strip().lower() in {"1", "true", "on"}:
            if isinstance(error, FeatureUnavailableError):
                raise
            raise FeatureUnavailableError(f"vllm-hotpath: {error}") from error
        logging.getLogger("vllm.hotpath").warning(
            "vllm-hotpath stays off, vLLM is stock: %s: %s", type(error).__name__, error
        )
