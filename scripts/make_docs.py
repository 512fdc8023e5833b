"""Write the pages of the docs that come out of the program itself: `docs/cli.md` and `docs/zoo.md`.

    python scripts/make_docs.py            write both
    python scripts/make_docs.py --check    write nothing; exit code 1 when a page is not what it would be

`cli.md` is every command's --help. `zoo.md` comes of running every script in `examples/zoo/`.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ZOO = ROOT / "examples" / "zoo"

CLI_HEAD = """# Command line

Made from `--help` by `scripts/make_docs.py`. All commands end with 0 when all is well, 1 when what was asked is not
so, 2 for wrong usage, and 3 when a worker failed.
"""

ZOO_HEAD = """# The bug zoo

Faults that people have reported of data-parallel training, each a script of a few lines for plain torch DDP in
`examples/zoo/`, and what samestep says of it on four workers. Made by running them all: `scripts/make_docs.py`.
In most of them the loss falls as usual.
"""


def cli_page() -> str:
    import typer
    from typer.testing import CliRunner

    from samestep.cli import app

    runner = CliRunner(env={"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"})
    names = sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    parts = [CLI_HEAD]
    for name in ["", *names]:
        words = [name] if name else []
        told = runner.invoke(app, [*words, "--help"], prog_name="samestep").stdout
        lines = "\n".join(line.rstrip() for line in told.strip("\n").splitlines())
        parts.append(f"## samestep {name}".rstrip() + f"\n\n```text\n{lines}\n```\n")
    return "\n".join(parts)


def run_zoo(names: list[str] | None = None) -> dict[str, str]:
    """Return what samestep says of each script, by name; workers are started twice for all of them."""
    from samestep import explain, launch

    sys.path.insert(0, str(ZOO))
    try:
        names = names or sorted(path.stem for path in ZOO.glob("*.py"))
        modules = {name: importlib.import_module(name) for name in names}
        steps = [name for name in names if hasattr(modules[name], "build")]
        loops = [name for name in names if hasattr(modules[name], "train")]
        cases = [(modules[name].build, modules[name].global_batch) for name in steps]
        said = dict(zip(steps, (found.sentence for found in explain.many(cases, 4)), strict=True))
        if loops:
            said |= dict(zip(loops, launch.run(run_loops, 4, loops)[0], strict=True))
    finally:
        sys.path.remove(str(ZOO))
    return said


def run_loops(group: Any, names: list[str]) -> list[str]:
    """Run some of the zoo's loops as one of the workers."""
    sys.path.insert(0, str(ZOO))
    return [importlib.import_module(name).train(group) for name in names]


def zoo_page(said: dict[str, str]) -> str:
    lines = [ZOO_HEAD, "| fault | samestep says |", "|---|---|"]
    for name in sorted(said, key=lambda name: (name.startswith("unseen"), name)):
        title, body, reports = (ast.get_docstring(ast.parse((ZOO / f"{name}.py").read_text())) or "").split(
            "\n\n"
        )
        wrong = f"**{title}** {' '.join(body.split())} *{reports.removeprefix('Reports: ')}* `{name}.py`"
        lines.append(f"| {_cell(wrong)} | {_cell(stable(said[name]))} |")
    return "\n".join(lines) + "\n"


def stable(text: str) -> str:
    """Return what is said without digests and the last digits of measured figures, which differ by machine."""
    text = re.sub(r"\b[0-9a-f]{16}\b", "…", text)
    return re.sub(r"\b(\d\.\d)\d*(e-?\d+)", r"\1\2", text)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write docs/cli.md and docs/zoo.md.")
    parser.add_argument("--check", action="store_true", help="only say whether they are up to date")
    check = parser.parse_args().check
    pages = {"cli.md": cli_page(), "zoo.md": zoo_page(run_zoo())}
    stale = [name for name, text in pages.items() if _read(ROOT / "docs" / name) != text]
    for name in stale:
        if not check:
            (ROOT / "docs" / name).write_text(pages[name])
    if check and stale:
        sys.exit(f"make_docs: {', '.join(stale)} out of date. Run python scripts/make_docs.py.")


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


if __name__ == "__main__":
    main()
