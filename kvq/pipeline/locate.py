"""Where a model is: a local folder, or a hub id to fetch."""

from contextlib import suppress
from pathlib import Path

from kvq.errors import InputError, MissingDependencyError
from kvq.state import is_calibration


def refuse_calibration(path: Path) -> None:
    """Refuse a calibration where a model is expected.

    Raises:
        InputError: what it is, and what it is for.
    """
    alone = False
    with suppress(OSError):  # of a path that no file can have, others speak
        alone = is_calibration(path) and len(list(path.glob("*.safetensors"))) == 1
    if alone:
        raise InputError(
            f"`{path}` is a calibration, and a checkpoint is expected",
            code="model.calibration",
            hint=f"`kvq inspect {path}` shows it, `kvq export MODEL --scales {path}` writes its "
            f"scales into a checkpoint, and `kvq verify CHECKPOINT --against {path}` compares them",
        )


def locate(model: str) -> Path:
    """Return the folder of a checkpoint, fetching a hub id.

    Raises:
        InputError: neither a folder nor a reachable hub id.
        MissingDependencyError: a hub id, and huggingface_hub is not installed.
    """
    path = Path(model)
    refuse_calibration(path)
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        if not path.is_dir():
            words = "is not a checkpoint folder" if path.exists() else "does not exist"
            raise InputError(
                f"`{model}` {words}",
                code="model.not_folder",
                hint="give a folder in Hugging Face form, or a hub id such as org/name",
            )
        return path
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
        )
    except ImportError as error:
        raise MissingDependencyError(
            "fetching a hub id needs huggingface_hub",
            code="dependency.huggingface_hub",
            hint='pip install "kvq[calibrate]"',
        ) from error
    patterns = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.py"]
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise InputError(
            f"cannot fetch `{model}`: {str(error).splitlines()[0]}",
            code="model.unreachable",
            hint="check the id and the network, or give a local folder",
        ) from error
