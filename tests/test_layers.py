"""A module imports only from layers below its own, or along the arrows drawn in docs/architecture.md."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "samestep"

# Lower layers first; inside a layer a module may import those that stand before it.
LAYERS = [
    ["errors"],
    # pure: what they need of other workers is passed in
    [
        "native",
        "jsonlines",
        "pooling",
        "schedules",
        "momentum",
        "scaling",
        "sharding",
        "kmeans",
        "codebooks",
        "targets",
        "fingerprint",
        "streams",
    ],
    # between workers: the only ones that import torch.distributed
    [
        "environment",
        "transport",
        "handshake",
        "group",
        "launch",
        "agent",
        "reduce",
        "bulk",
        "tree",
        "hooks",
        "tally",
        "partials",
        "carrier",
        "gradients",
        "survive",
    ],
    # over time
    [
        "compiled",
        "lossfn",
        "trial",
        "watch",
        "buffers",
        "forward",
        "start",
        "step",
        "scheduler",
        "checkpoint",
        "weighing",
    ],
    # proof
    ["audit", "compare", "explain", "doctor", "report"],
    # edge
    ["caffe2", "lightning", "accelerate", "recipes", "pytest_plugin", "cli", "__main__"],
]
PLACE = {name: (layer, i) for layer, names in enumerate(LAYERS) for i, name in enumerate(names)}
# torch's distributed checkpoint reads and writes files; it is not a way to talk to other workers.
MAY_TALK = {*LAYERS[2], "checkpoint"}


def module_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


FILES = sorted(file for file in PACKAGE.rglob("*.py") if file.parent != PACKAGE or file.name != "__init__.py")


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports_point_down(file):
    me = module_of(file)
    assert me in PLACE, f"{me} has no layer: name it in docs/architecture.md and in this test"
    for name in imports(file):
        parts = name.split(".")
        if parts[0] != "samestep" or len(parts) < 2 or parts[1] == me or parts[1] == "__version__":
            continue
        other = parts[1]
        assert other in PLACE, f"{me} imports {name}, which has no layer"
        lower = PLACE[other][0] < PLACE[me][0]
        beside = PLACE[other][0] == PLACE[me][0] and PLACE[other][1] < PLACE[me][1]
        assert lower or beside, f"{me} must not import {other}"


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_only_the_layer_between_workers_talks(file):
    talks = any(
        name == "torch.distributed" or name.startswith("torch.distributed.") for name in imports(file)
    )
    assert not talks or module_of(file) in MAY_TALK


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_files_and_functions_are_short(file):
    text = file.read_text()
    assert text.count("\n") <= 300
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node, clean=False) or ""
            lines = (node.end_lineno or node.lineno) - node.lineno + 1 - docstring.count("\n")
            assert lines <= 50, f"{node.name} has {lines} lines"


def test_heavy_packages_are_imported_where_they_are_used():
    heavy = {
        "pyarrow",
        "matplotlib",
        "jinja2",
        "pydantic",
        "rich",
        "typer",
        "lightning",
        "accelerate",
        "faiss",
    }
    for file in FILES:
        if PLACE[module_of(file)][0] >= 5:
            continue
        at_top = {
            name.split(".")[0]
            for node in ast.parse(file.read_text()).body
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in imports_of(node)
        }
        assert not at_top & heavy, f"{file.name} imports {at_top & heavy} at import time"


def imports_of(node):
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
