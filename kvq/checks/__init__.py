"""verify's rules: plain functions that yield findings.

A rule takes the context and yields one `Finding` per thing wrong, nothing when all is well. To add
one, write the function with the decorator `rule()` in the module of its subject.
"""

from kvq.checks import (
    against,
    configuration,
    heads,
    layers,
    modelopt,
    names,
    plausible,
    records,
    scales,
    shards,
)
from kvq.checks.context import rules_for

__all__ = [
    "against",
    "configuration",
    "heads",
    "layers",
    "modelopt",
    "names",
    "plausible",
    "records",
    "rules_for",
    "scales",
    "shards",
]
