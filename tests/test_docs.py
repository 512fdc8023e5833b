"""What the README and the docs show is run; what the package shows in docstrings is run."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import samestep

ROOT = Path(__file__).parents[1]
# Some pages show shells and other programs; what has >>> is run.
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OPTIONAL = {"samestep.lightning", "samestep.pytest_plugin"}  # need a package that may be absent


def modules():
    names = [m.name for m in pkgutil.walk_packages(samestep.__path__, "samestep.")]
    return [name for name in names if name not in OPTIONAL and not name.endswith("__main__")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_in_pages_run(page):
    outcome = doctest.testfile(str(page), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert outcome.failed == 0


@pytest.mark.parametrize("name", modules())
def test_examples_in_docstrings_run(name):
    outcome = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert outcome.failed == 0


def test_the_readme_is_short_and_its_links_lead_somewhere():
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") < 150
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} points to {target}"


def test_the_file_tree_in_the_readme_names_every_module():
    text = (ROOT / "README.md").read_text()
    missing = [name for name in samestep.__all__ if not re.search(rf"\b{name}(\.py|/)", text)]
    assert not missing, f"the README's file tree lacks {missing}"
