"""Sphinx: MyST pages by hand, the reference from docstrings; built with -W -n, so that a broken link fails."""

import importlib
import inspect
import pkgutil
import re
import types
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

import trainfold
from trainfold.adapters.cli import schema as schemas
from trainfold.adapters.cli.app import app
from trainfold.adapters.cli.terminal.output import exit_code
from trainfold.core import errors
from trainfold.core.resume.drift import KINDS

project = "trainfold"
author = "the trainfold authors"
copyright = "the trainfold authors"
release = version = trainfold.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"trainfold {version}"
html_static_path = ["_static"]
html_css_files = ["trainfold.css"]
copybutton_prompt_text = r">>> |\.\.\. |\$ "  # a copied session is what was typed
copybutton_prompt_is_regexp = True
default_role = "code"

napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_use_type_comments = False  # there are none, and to look for them takes time
suppress_warnings = ["ref.python"]  # a name that a module re-exports has two homes, and a link to either is right
nitpick_ignore_regex = [
    (r"py:.*", r"(?!trainfold\.).*"),  # other projects are not linked: the build needs no network
    (r"py:.*", r"trainfold\.(\w+\.)*_?[A-Z]\w?"),  # type variables
    (r"py:.*", r"trainfold\.(\w+\.)*_\w+"),  # private types in signatures
    (r"py:.*", r".* \| .*"),  # a union inside brackets, which Sphinx takes for one name
]

GENERATED = Path(__file__).parent / "reference" / "generated"
TESTERS = (
    "laws",
    "contracts",
    "strategies",
    "metrics.metric_laws",
    "metrics.metric_contract",
    "metrics.metric_rules",
    "collectives_contract",
)
BESIDE = (
    "trainfold.adapters.bridges.lightning",
    "trainfold.adapters.bridges.torchmetrics",
    "trainfold.adapters.bridges.transformers",
)  # imports what is not always installed, so that no public module names it
PLACES = ["trainfold", *(f"trainfold.{name}" for name in trainfold._MODULES)]  # noqa: SLF001 the table is the source of the pages


def publics() -> dict[str, str]:
    """Each public name -> the module that a user imports it from: the top, or a module by subject."""
    return {
        name: place for place in reversed(PLACES) for name in getattr(importlib.import_module(place), "__all__", ())
    }


def homes() -> dict[str, str]:
    """The full name of what is public, where it is defined -> the one that a user types."""
    values = {f"{place}.{name}": getattr(importlib.import_module(place), name) for name, place in PUBLIC.items()}
    return {
        f"{value.__module__}.{value.__qualname__}": full
        for full, value in values.items()
        if isinstance(value, type | types.FunctionType)
    }


def first_line(value: object) -> str:
    """The one line that a docstring starts with."""
    return (inspect.getdoc(value) or "").partition("\n\n")[0].replace("\n", " ")


PUBLIC = publics()
HOMES = homes()
LINKED = {full.rpartition(".")[2]: full for full in HOMES.values()}


def write_reference(_app: Sphinx) -> None:
    """Write one page for the names at the top, and one for each public module, under the names that a user types."""
    pages = {"facade": page_of_names(), "drift-kinds": table_of_kinds(), "exit-codes": table_of_exit_codes()}
    pages["command-line"] = page_of_commands()
    pages |= {name: page_of_subject(name) for name in PLACES[1:]}
    for name in [*(f"trainfold.properties.{name}" for name in TESTERS), *BESIDE]:
        pages[name] = f"{name}\n{'=' * len(name)}\n\n.. automodule:: {name}\n   :members:\n"
    GENERATED.mkdir(parents=True, exist_ok=True)
    for old in GENERATED.glob("*.rst"):
        if old.stem not in pages:
            old.unlink()
    for name, text in pages.items():
        page = GENERATED / f"{name}.rst"
        if not page.exists() or page.read_text() != text:
            page.write_text(text)


def page_of_names() -> str:
    """The page of the names at the top."""
    rows = [
        f"   * - :py:obj:`{name} <trainfold.{name}>`\n     - {first_line(getattr(trainfold, name))}"
        for name in trainfold.__all__
        if PUBLIC[name] == "trainfold" and name not in trainfold._MODULES and name != "__version__"  # noqa: SLF001
    ]
    head = "trainfold\n=========\n\n.. list-table::\n   :widths: 30 70\n\n"
    return (
        head
        + "\n".join(rows)
        + "\n\n.. automodule:: trainfold\n   :members:\n   :imported-members:\n   :inherited-members: Exception, dict\n"
    )


def page_of_subject(name: str) -> str:
    """The page of a public module; what is at the top too is described there, once."""
    page = f"{name}\n{'=' * len(name)}\n\n.. automodule:: {name}\n   :members:\n   :imported-members:\n"
    page += "   :inherited-members:\n" if name == "trainfold.metrics" else ""  # twins share a private base
    above = [word for word in getattr(importlib.import_module(name), "__all__", ()) if PUBLIC[word] == "trainfold"]
    if not above:
        return page
    links = ", ".join(f":py:obj:`{word} <trainfold.{word}>`" for word in above)
    return f"{page}   :exclude-members: {', '.join(above)}\n\nHere too: {links}.\n"


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
    found, kinds = [errors.TrainfoldError], []
    for module in pkgutil.walk_packages(trainfold.__path__, "trainfold."):
        if ".adapters." in module.name and ".bridges." not in module.name:
            importlib.import_module(module.name)
    while found:
        kind = found.pop()
        kinds.append(kind)
        found += [below for below in kind.__subclasses__() if below.__module__.startswith("trainfold.")]
    rows = [
        (str(exit_code(kind)), linked(kind), first_line(kind))
        for kind in sorted(set(kinds), key=lambda kind: (exit_code(kind), kind.__module__, kind.__name__))
    ]
    return table("Errors and exit codes", ("exit code", "error", "what it says"), rows)


def page_of_commands() -> str:
    """Every command of the command line with its arguments, from the program itself; and what its exit codes and JSON mean."""
    title = "The command line"
    lines = [title, "=" * len(title), "", *app.help.split("\n"), ""]
    lines += ["Every error has an exit code of its own: see :doc:`exit-codes`.", ""]
    for name in sorted(each for each in app if not each.startswith("-")):
        command = app[name]
        heading = f"trainfold {name}"
        lines += [heading, "-" * len(heading), "", *inspect.cleandoc(str(command.help)).split("\n"), ""]
        rows = [argument_row(each) for each in command.assemble_argument_collection() if each.show]
        lines += ["", ".. list-table::", "   :header-rows: 1", "   :widths: 25 15 60", ""]
        for row in [("argument", "default", "what it is"), *rows]:
            lines += [f"   {'*' if i == 0 else ' '} - {cell}" for i, cell in enumerate(row)]
        if name in schemas.names():
            lines += ["", f"``trainfold schema {name}`` prints the JSON Schema of what ``--json`` prints."]
        lines.append("")
    return "\n".join(lines) + "\n"


def argument_row(argument: Any) -> tuple[str, str, str]:
    """The names of an argument of a command, its default, and what it is."""
    names = [each if each.startswith("-") else each.upper() for each in argument.names]
    if argument.field_info.kind is not inspect.Parameter.KEYWORD_ONLY:
        names = [argument.field_info.name.upper()]  # the option of that name is redundant
    default = argument.field_info.default
    is_given = default is inspect.Parameter.empty or default is None
    return (
        ", ".join(f"``{each}``" for each in names),
        "" if is_given else f"``{default}``",
        str(argument.parameter.help),
    )


def linked(kind: type) -> str:
    """The name of a class, as a link where it is public."""
    full = HOMES.get(f"{kind.__module__}.{kind.__qualname__}")
    return f":py:obj:`{kind.__name__} <{full}>`" if full else f"``{kind.__name__}``"


def link_names(_app: Sphinx, _what: str, name: str, _obj: object, _options: object, lines: list[str]) -> None:
    """Turn `Name` in a docstring into a link where it is public."""

    def link(found: re.Match[str]) -> str:
        word = found[1]
        return f":py:obj:`{word} <{LINKED[word]}>`" if word in LINKED and not name.endswith(f".{word}") else found[0]

    text = "\n".join(lines)
    lines[:] = [re.sub(r"(?<![:`\w])`(\w+)`(?!`)", link, line) for line in text.split("\n")]


def find_public(app: Sphinx, env: Any, node: Any, content: Any) -> Any:
    """Lead a reference to where a name is defined, as annotations have it, to the name that a user types.

    A signature may name what is not public: that is shown without a link. A page that links to it is an error.
    """
    target = str(node.get("reftarget"))
    if target in HOMES:
        domain = env.get_domain("py")
        return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", HOMES[target], node, content)
    is_generated = node["refdoc"].startswith("reference/generated/")
    return content if is_generated and re.match(r"trainfold\.(core|backends|adapters|properties)\.", target) else None


def setup(app: Sphinx) -> None:
    """Connect the functions above."""
    app.connect("builder-inited", write_reference)
    app.connect("missing-reference", find_public)
    app.connect("autodoc-process-docstring", link_names, priority=400)
