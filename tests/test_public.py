"""The public surface: sorted, documented, and light to import."""

import importlib
import inspect
import pkgutil
import subprocess
import sys

import pytest

import samestep

OPTIONAL = {"accelerate", "lightning", "pytest_plugin"}  # need a package that may be absent
MODULES = [name for name in samestep.__all__ if name not in OPTIONAL]


def test_the_list_of_modules_is_sorted_and_complete():
    assert list(samestep.__all__) == sorted(samestep.__all__)
    found = {m.name for m in pkgutil.iter_modules(samestep.__path__) if not m.name.startswith("_")}
    assert found - {"cli", "recipes"} == set(samestep.__all__)


def test_an_unknown_module_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nothing_of_ours"):
        _ = samestep.nothing_of_ours
    assert "schedules" in dir(samestep)


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_is_documented(name):
    module = importlib.import_module(f"samestep.{name}")
    assert module.__doc__
    assert list(module.__all__) == sorted(module.__all__)
    for public in module.__all__:
        thing = getattr(module, public)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert thing.__doc__, f"{name}.{public} has no docstring"


def test_the_package_itself_imports_nothing_heavy():
    code = "import sys, samestep.cli; print([m for m in ('torch', 'numpy', 'pyarrow') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
