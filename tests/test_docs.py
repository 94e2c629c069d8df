"""docs/findings.md lists every code that verify can give, and no other."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FAMILIES = ("scale", "format", "layer", "provenance", "reference", "require", "config", "index",
            "files", "engine", "live")  # fmt: skip
CODE = re.compile(rf"({'|'.join(FAMILIES)})\.[a-z0-9_]+")


MAKERS = [*(ROOT / "kvq" / "checks").glob("*.py"), ROOT / "kvq/pipeline/probe.py",
          ROOT / "kvq/pipeline/verify.py"]  # fmt: skip


def codes_of_findings():
    """Every string that looks like a code, in the modules that make findings."""
    found = set()
    for path in MAKERS:
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


def test_every_finding_names_a_fix():
    for path in MAKERS:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding":
                where = f"{path.name}:{node.lineno}"
                assert "fix" in {keyword.arg for keyword in node.keywords}, where


def test_the_rules_that_an_engine_replaces_are_listed():
    """findings.md names those of `@rule(spelling=True)`, and the rest are asked with an engine."""
    replaced, always = set(), set()
    for path in (ROOT / "kvq" / "checks").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.FunctionDef) or not node.decorator_list:
                continue
            text = ast.unparse(node)
            codes = {match[1] for match in re.finditer(rf"'({CODE.pattern})'", text)}
            (replaced if "spelling=True" in ast.unparse(node.decorator_list[0]) else always).update(
                codes - {"config.json"}
            )
    intro = (ROOT / "docs" / "findings.md").read_text().partition("## Scales")[0]
    sentence = intro.partition("Where an `--engine` is asked")[2].partition("without one alone")[0]
    listed = {match[0] for match in CODE.finditer(sentence)}
    assert {code for code in replaced if not code.startswith("config.")} == (
        listed - {"config.attention_group"}
    )
    assert {code for code in always if code.startswith("config.")} == {"config.attention_group"}
