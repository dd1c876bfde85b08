"""`rules_named`: what `--rules` names: a family, or a transform or converter in a module of the user's."""

import sys
from importlib import import_module
from keyword import iskeyword
from pathlib import Path

from trainfold.core.errors import InvalidArgument, error_text
from trainfold.core.transform.conversion import own_rules
from trainfold.core.transform.transform import Transform

_WHERE = "convert.rules"


def rules_named(text: str | None) -> str | Transform | None:
    """The rules that an option names. A module is imported if the text has a colon, from the current folder too.

    Args:
        text: a family, which is returned as it is; or a module, a colon, and a name in it.

    Raises:
        InvalidArgument: if there is no such module or name, or it is neither a transform nor a converter.
    """
    if text is None or ":" not in text:
        return text
    module, _, name = text.partition(":")
    if not all(part.isidentifier() and not iskeyword(part) for part in [*module.split("."), name]):
        raise InvalidArgument(_WHERE, expected="package.module:name", found=repr(text), fix="write the module, a colon, and the name of a transform in it")  # fmt: skip
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        found = import_module(module)
    except (Exception, SystemExit) as error:
        raise InvalidArgument(_WHERE, expected=f"a module {module}", found=error_text(error),
                              fix=f"correct the name, or see the cause: import {module} in a shell") from error  # fmt: skip
    finally:
        sys.path.remove(here)
    try:
        given = getattr(found, name)
    except AttributeError as error:
        raise InvalidArgument(_WHERE, expected=f"{name} in {module}", found="none", fix="correct the name") from error
    return own_rules(given, text)
