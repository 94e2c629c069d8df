"""How a scale set is written into a checkpoint and read back; loaded late, by name."""

from difflib import get_close_matches
from importlib import import_module

from kvq.dialects.base import Dialect
from kvq.errors import DialectError

DIALECTS = {"compressed-tensors": "kvq.dialects.compressed_tensors:CompressedTensors"}


def get_dialect(name: str) -> Dialect:
    """Return a dialect by name.

    Raises:
        DialectError: unknown name; the message lists all names.
    """
    if name not in DIALECTS:
        near = get_close_matches(name, DIALECTS, n=1)
        raise DialectError(
            f"unknown dialect `{name}`; known: auto, {', '.join(DIALECTS)}",
            code="dialect.unknown",
            hint=f"did you mean `{near[0]}`?" if near else None,
        )
    module, attribute = DIALECTS[name].split(":")
    dialect: Dialect = getattr(import_module(module), attribute)()
    return dialect
