"""`trainfold completion SHELL`: a script that completes commands, options and paths, for ``eval`` or ``source``."""

from typing import Final, Literal

from cyclopts import App

Shell = Literal["bash", "zsh", "fish"]

# The script of cyclopts only defines a function: zsh finds it by the first line of a file in its fpath, but not after an eval.
_REGISTERED: Final = """
case "${funcstack[1]-}" in
  _trainfold|_cyclopts_trainfold) _cyclopts_trainfold "$@" ;;
  *) compdef _cyclopts_trainfold trainfold ;;
esac
"""


def script_of(app: App, shell: Shell) -> str:
    """The script for a shell.

    For zsh, it works in an ``eval`` after ``compinit``, and as a file ``_trainfold`` in the fpath.
    """
    script: str = app.generate_completion(prog_name="trainfold", shell=shell)
    return script + _REGISTERED if shell == "zsh" else script
