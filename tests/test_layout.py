"""The shape of the package: imports point one way, light modules stay light, no number twice."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "kvq"
MODULES = sorted(PACKAGE.rglob("*.py"))
LAYERS = [  # a module may import from its own layer and from those below
    {"errors"},
    {"files", "formats"},
    {"tensorfile", "quantizers"},
    {"checkpoint", "configs", "geometry", "state", "tree", "scales", "provenance", "outliers"},
    {"dialects", "engines", "calibration", "kernels", "reference"},
    {"checks"},
    {"pipeline"},
    {"reporting"},
    {"console"},
    {"commands"},
    {"cli", "__main__"},
]
HEAVY = {"torch", "transformers", "datasets", "accelerate", "triton"}
MAY_BE_HEAVY = ("calibration/", "reference.py", "kernels/", "engines/probes/")


def layer(name):
    return next(i for i, names in enumerate(LAYERS) if name in names)


def imports(path, *, top_level_only=False):
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own == "__init__":
        return
    for name in imports(path):
        part = name.split(".")[1:2] if name.startswith("kvq.") else []
        assert not part or layer(part[0]) <= layer(own), f"{own} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_heavy_import_at_the_top_of_light_modules(path):
    relative = str(path.relative_to(PACKAGE))
    if not relative.startswith(MAY_BE_HEAVY):
        roots = {name.split(".")[0] for name in imports(path, top_level_only=True)}
        assert not roots & HEAVY


def test_format_constants_are_derived_not_typed_again():
    literal = re.compile(r"(?<![\w.])(448|57344|2688|240)(\.0)?(?![\w.])")
    for path in MODULES:
        if path.name != "formats.py":
            code = re.sub(r'"""(?s:.*?)"""|#.*', "", path.read_text())
            assert not literal.search(code), path


def test_modules_stay_readable():
    for path in MODULES:
        assert len(path.read_text().splitlines()) <= 300, path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                body = node.end_lineno - node.body[0].lineno
                assert body <= 60, (path.name, node.name, body)
