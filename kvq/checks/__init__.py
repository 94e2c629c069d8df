"""verify's rules: plain functions that yield findings.

A rule takes the context and yields one `Finding` per thing wrong, nothing when all is well. To add
one, write the function with the decorator `rule()` in the module of its subject.
"""

from kvq.checks import configuration, declarations, heads, layers, scales, shards
from kvq.checks.context import rules_for

__all__ = ["configuration", "declarations", "heads", "layers", "rules_for", "scales", "shards"]
