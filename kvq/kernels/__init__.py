"""Quantize, pack and attend on the GPU; `reference` holds a naive twin of every kernel."""
