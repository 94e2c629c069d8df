"""Calibrate, export, inspect and verify KV-cache quantization scales."""

__version__ = "0.1.0"
__all__ = ["__version__", "calibrate", "write_calibration"]

_API = {"calibrate": "kvq.pipeline.live", "write_calibration": "kvq.state"}


def __getattr__(name: str) -> object:
    """Import the Python API late: `import kvq` costs nothing."""
    if name not in _API:
        raise AttributeError(f"module `kvq` has no attribute `{name}`")
    from importlib import import_module

    found: object = getattr(import_module(_API[name]), name)
    return found
