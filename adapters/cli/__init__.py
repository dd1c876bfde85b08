"""The command line: `main`. Nothing heavy is imported before a command needs it, so that ``--help`` is quick.

May import every other room, inside of its functions.
"""

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: without the program's name; None for those of this process.

    Returns:
        The exit code: 0, 2 for a command line that cannot be read or an argument that can never work, or the
        `exit_code` of the error (see `trainfold.core.errors`).
    """
    from trainfold.adapters.cli.app import run

    return run(arguments)
