"""The error tree: every failure a user can act on, by what they should do next.

    KvqError
    ├── InputError              an option or a file given by the user
    ├── CheckpointError         a checkpoint or calibration folder that cannot be read or trusted
    ├── UnsupportedModelError   an architecture kvq does not calibrate
    ├── CalibrationError        a calibration that ran but has no valid result
    ├── DialectError            scales that a dialect or its readers cannot express
    ├── FormatError             a number no format can represent
    └── MissingDependencyError  an extra that is not installed

A failed verification is not an error but a `Report` with findings.
"""


class KvqError(Exception):
    """A failure the user can act on; `code` is stable, the text is not.

    With `repeated`, another one of several processes says so.
    """

    exit_code = 2
    repeated = False

    def __init__(self, message: str, *, code: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.hint = hint


def first_line(error: BaseException) -> str:
    """Return the first line of what an exception says; its name if it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class InputError(KvqError):
    """An option or an input file is wrong."""


class CheckpointError(KvqError):
    """A checkpoint or calibration folder is missing, damaged or inconsistent."""


class UnsupportedModelError(KvqError):
    """The architecture cannot be calibrated, and the reason is known."""


class CalibrationError(KvqError):
    """The calibration ran, but has no valid result."""


class DialectError(KvqError):
    """The dialect, or the engine it is written for, cannot express the scales."""


class FormatError(KvqError):
    """A value that the number format cannot represent."""


class MissingDependencyError(KvqError):
    """An optional dependency is not installed."""
