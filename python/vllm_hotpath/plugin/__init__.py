"""The entry point that vLLM calls in every process (group ``vllm.general_plugins``)."""


def register() -> None:
    """Do nothing: this version patches no part of vLLM. Never raises, and may be called again."""
