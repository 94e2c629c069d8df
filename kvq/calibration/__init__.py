"""Observation of keys, values and queries; needs the extra `calibrate`."""
