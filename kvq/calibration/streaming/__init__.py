"""Calibrate a model whose weights do not fit: one decoder layer in memory at a time."""

from kvq.calibration.streaming.errors import NotStreamable

__all__ = ["NotStreamable"]
