"""The command line: `main`. A heavy package is imported only by the command that needs it, so that the others start quickly.

May import every other room, inside its functions.
"""

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: the command line without the program's name; None for that of this process.

    Returns:
        The exit code: 0; 2 for a command line that cannot be parsed, or an argument that can never work; otherwise the
        `exit_code` of the error (see `trainfold.core.errors`).
    """
    from trainfold.adapters.cli.app import run

    return run(arguments)
