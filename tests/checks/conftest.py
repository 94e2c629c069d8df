"""The rules are asked as the reports are: on the command line, of checkpoints made for it."""

from tests.reports.conftest import variant, verify

__all__ = ["variant", "verify"]
