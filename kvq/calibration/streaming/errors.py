"""Why a model cannot be run layer by layer."""


class NotStreamable(Exception):
    """The model cannot be run layer by layer with the result of a whole run; says why."""
