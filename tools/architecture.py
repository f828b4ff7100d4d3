"""The module list of docs/architecture.md, made from the first sentence of each module.

`python -m tools.architecture` writes it, a test checks it. The rest of the page is written by hand.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- modules: python -m tools.architecture -->\n", "<!-- end of modules -->\n"


def modules() -> str:
    """One bullet per module, rooms as headings."""
    lines = []
    package = ROOT / "deepinfer"
    folders = sorted({path.parent for path in package.rglob("*.py")}, key=lambda folder: (folder != package, folder))
    for folder in folders:
        name = folder.relative_to(ROOT).as_posix()
        lines += [f"\n### {name}/", "", _charter(folder / "__init__.py"), ""]
        files = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
        lines += [f"- `{path.name}`: {_charter(path)}" for path in files]
    return "\n".join(lines).strip() + "\n"


def _charter(path: Path) -> str:
    """The first paragraph of the docstring, on one line."""
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) if path.exists() else None
    return " ".join((doc or "(no docstring)").split("\n\n")[0].split())


def page() -> str:
    """The page with the current list."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n" + modules() + "\n" + END + after


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
