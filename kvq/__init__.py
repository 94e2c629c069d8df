"""Calibrate, export, inspect and verify KV-cache quantization scales."""

__version__ = "0.1.0"
