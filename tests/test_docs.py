"""docs/findings.md lists every code that verify can give, and no other."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FAMILIES = ("scale", "format", "layer", "provenance", "reference", "require", "config", "index",
            "files", "engine", "live")  # fmt: skip
CODE = re.compile(rf"({'|'.join(FAMILIES)})\.[a-z0-9_]+")


def codes_of_findings():
    """Every string that looks like a code, in the modules that make findings."""
    found = set()
    for path in [*(ROOT / "kvq" / "checks").glob("*.py"), ROOT / "kvq/pipeline/probe.py",
                 ROOT / "kvq/pipeline/verify.py"]:  # fmt: skip
        tree = ast.parse(path.read_text())
        errors = {
            id(keyword.value)  # of exceptions, which are no findings
            for node in ast.walk(tree) if isinstance(node, ast.Call)
            for keyword in node.keywords if keyword.arg == "code"
        }  # fmt: skip
        found |= {
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
            and id(node) not in errors and CODE.fullmatch(node.value)
        }  # fmt: skip
    return found - {"config.json"}


def test_every_code_is_documented_and_exists():
    text = (ROOT / "docs" / "findings.md").read_text()
    listed = {match[0] for match in CODE.finditer(text) if f"`{match[0]}`" in text}
    assert listed == codes_of_findings()
    assert len(listed) > 60
