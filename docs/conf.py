"""Sphinx: MyST pages by hand, the reference from docstrings; built with -W -n, so that a broken link fails."""

import ast
import importlib
import inspect
import pkgutil
import re
import types
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

import trainfold
from trainfold.adapters.cli.terminal.output import exit_code
from trainfold.core import errors
from trainfold.core.resume.drift import KINDS

project = "trainfold"
author = "the trainfold authors"
copyright = "the trainfold authors"
release = version = trainfold.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"trainfold {version}"
default_role = "code"

napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
suppress_warnings = ["ref.python"]  # a name that a module re-exports has two homes, and a link to either is right
nitpick_ignore_regex = [
    (r"py:.*", r"(?!trainfold\.).*"),  # other projects are not linked: the build needs no network
    (r"py:.*", r"trainfold\.(\w+\.)*_?[A-Z]\w?"),  # type variables
    (r"py:.*", r"trainfold\.(\w+\.)*_\w+"),  # private types in signatures
    (r"py:.*", r".* \| .*"),  # a union inside brackets, which Sphinx takes for one name
]

GENERATED = Path(__file__).parent / "reference" / "generated"
GROUPS = {
    "core": "Pure functions and frozen values.",
    "backends": "Effects: where bytes, ranks and time are.",
    "adapters": "Mutable torch objects and the command line.",
    "properties": "Laws, contracts and strategies for your own tests.",
}


def modules_of(package: str) -> list[str]:
    """The public modules of one of the four packages, the package itself first."""
    root = importlib.import_module(f"trainfold.{package}")
    walked = pkgutil.walk_packages(root.__path__, f"{root.__name__}.")
    return [root.__name__, *sorted(found.name for found in walked if not re.search(r"\._", found.name))]


def homes() -> dict[str, str]:
    """Each public name, and the module that it is documented in; not those of other names for a type, which have no page."""
    found = {}
    for subject in trainfold._MODULES:  # noqa: SLF001
        tree = ast.parse(Path(str(getattr(trainfold, subject).__file__)).read_text())
        imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
        found.update({alias.name: str(node.module) for node in imports for alias in node.names})
    found |= trainfold._MODULE_OF  # noqa: SLF001
    places = [trainfold, *(getattr(trainfold, subject) for subject in trainfold._MODULES)]  # noqa: SLF001
    values = {name: getattr(place, name) for place in places for name in place.__all__}
    return {name: home for name, home in found.items() if getattr(values.get(name), "__module__", None) == home}


def first_line(value: object) -> str:
    """The one line that a docstring starts with."""
    line = (inspect.getdoc(value) or "").partition("\n\n")[0].replace("\n", " ")
    return re.sub(r"\s+\([A-Z]\d\d(?:, [A-Z]\d\d)*\)", "", line)


HOMES = homes()


def write_reference(_app: Sphinx) -> None:
    """Write one page for each module, one for each package and one for the names of the facade."""
    pages: dict[str, str] = {}
    for package, says in GROUPS.items():
        root, *names = modules_of(package)
        for name in names:
            pages[name] = f"{name}\n{'=' * len(name)}\n\n.. automodule:: {name}\n   :members:\n{contents(name, names)}"
        pages[package] = f"{root}\n{'=' * len(root)}\n\n{says}\n{contents(root, names)}"
    pages["facade"] = page_of_names()
    for name in trainfold._MODULES:  # noqa: SLF001 the table is the source of the pages
        title = f"trainfold.{name}"
        pages[name] = f"{title}\n{'=' * len(title)}\n\n.. automodule:: {title}\n   :members:\n   :imported-members:\n"
    pages["drift-kinds"] = table_of_kinds()
    pages["exit-codes"] = table_of_exit_codes()
    GENERATED.mkdir(parents=True, exist_ok=True)
    for old in GENERATED.glob("*.rst"):
        if old.stem not in pages:
            old.unlink()
    for name, text in pages.items():
        page = GENERATED / f"{name}.rst"
        if not page.exists() or page.read_text() != text:
            page.write_text(text)


def contents(package: str, names: list[str]) -> str:
    """The modules and rooms that lie directly in a package; nothing for a module."""
    listed = [f"   {name}" for name in names if name.rpartition(".")[0] == package]
    return "\n.. toctree::\n   :maxdepth: 1\n\n" + "\n".join(listed) + "\n" if listed else ""


def page_of_names() -> str:
    """The page of the names at the top, and of the modules by subject below them."""
    title = "The names of ``trainfold``"
    rows = [
        f"   * - :py:obj:`{name} <{home}.{name}>`\n     - {first_line(getattr(trainfold, name))}"
        for name, home in HOMES.items()
        if name in trainfold.__all__
    ]
    below = "\n.. toctree::\n   :maxdepth: 1\n\n" + "\n".join(f"   {name}" for name in trainfold._MODULES)  # noqa: SLF001
    return f"{title}\n{'=' * len(title)}\n\n.. list-table::\n   :widths: 30 70\n\n" + "\n".join(rows) + f"\n{below}\n"


def table(title: str, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A page with one table."""
    lines = [title, "=" * len(title), "", ".. list-table::", "   :header-rows: 1", ""]
    for row in [head, *rows]:
        lines += [f"   {'*' if i == 0 else ' '} - {cell}" for i, cell in enumerate(row)]
    return "\n".join(lines) + "\n"


def table_of_kinds() -> str:
    """The kinds of drift, with what each does by default and what a policy may choose."""
    rows = [
        (f"``{kind}``", default, ", ".join(sorted(allowed)), about) for kind, (default, allowed, about) in KINDS.items()
    ]
    return table("Kinds of drift", ("kind", "by default", "a policy may say", "what it is"), rows)


def table_of_exit_codes() -> str:
    """The exit code of each error, as the command line gives it."""
    for name in modules_of("adapters"):
        importlib.import_module(name)
    found, kinds = [errors.TrainfoldError], []
    while found:
        kind = found.pop()
        kinds.append(kind)
        found += [below for below in kind.__subclasses__() if below.__module__.startswith("trainfold.")]
    rows = [
        (str(exit_code(kind)), f":py:obj:`{kind.__name__} <{kind.__module__}.{kind.__name__}>`", first_line(kind))
        for kind in sorted(set(kinds), key=lambda kind: (exit_code(kind), kind.__module__, kind.__name__))
    ]
    return table("Errors and exit codes", ("exit code", "error", "what it says"), rows)


def link_names(_app: Sphinx, _what: str, name: str, _obj: object, _options: object, lines: list[str]) -> None:
    """Turn `Name` in a docstring into a link where it is a name of the facade or of the same module."""
    module = sys_module_of(name)

    def link(found: re.Match[str]) -> str:
        word = found[1]
        if word in HOMES:
            return f":py:obj:`{word} <{HOMES[word]}.{word}>`"
        if module is not None and getattr(getattr(module, word, None), "__module__", None) == module.__name__:
            return f":py:obj:`{word} <{module.__name__}.{word}>`"
        return found[0]

    text = re.sub(r"\s+\([A-Z]\d\d(?:, [A-Z]\d\d)*\)", "", "\n".join(lines))  # ids of requirements are for contributors
    lines[:] = [re.sub(r"(?<![:`\w])`(\w+)`(?!`)", link, line) for line in text.split("\n")]


def sys_module_of(name: str) -> types.ModuleType | None:
    """The module that a documented name is in."""
    while name:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            name = name.rpartition(".")[0]
    return None


def collapse_navigation(_app: Sphinx, _page: str, _template: str, context: dict[str, Any], _tree: object) -> None:
    """Leave the rooms that a page is not in closed: the theme writes all 300 modules beside each, for most of the build's time."""
    whole = context.get("toctree")
    if whole is not None:
        context["toctree"] = lambda **options: whole(**{**options, "collapse": True})


def setup(app: Sphinx) -> None:
    """Connect the functions above."""
    app.connect("builder-inited", write_reference)
    app.connect("html-page-context", collapse_navigation, priority=400)
    app.connect("autodoc-process-docstring", link_names, priority=400)
