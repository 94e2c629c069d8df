"""Predict what engines would make of a checkpoint."""

from collections.abc import Sequence
from pathlib import Path

from kvq.checkpoint import open_checkpoint
from kvq.engines import get_engines
from kvq.engines.base import EngineOptions, EngineReading
from kvq.errors import InputError
from kvq.geometry import read_geometry
from kvq.pipeline.locate import refuse_calibration


def read_engines(
    path: Path, names: Sequence[str], options: EngineOptions, version: str | None = None
) -> tuple[EngineReading, ...]:
    """Predict from a checkpoint's files which scales engines would use.

    Raises:
        KvqError: the path is no checkpoint folder, or an engine or its version is not known.
    """
    engines = get_engines(names, version)
    refuse_calibration(path)
    view = open_checkpoint(path)
    if not view.config:
        raise InputError(
            f"`{path}` is a single file; an engine reads the folder with its config.json",
            code="inspect.not_folder",
        )
    geometry = read_geometry(view.config, view.tensors)
    return tuple(engine.read(view, geometry, options) for engine in engines.values())
