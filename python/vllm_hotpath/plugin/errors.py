"""The error of the plugin: apart from ``register``, so that a reload of that leaves it the same class."""


class FeatureUnavailableError(RuntimeError):
    """With ``VLLM_HOTPATH_STRICT=1``: a feature that was asked for cannot be turned on here."""
