"""What is wrong with a command line or with its Python, as errors with a fix."""

from cyclopts.exceptions import CycloptsError, UnusedCliTokensError

from trainfold.adapters.cli.terminal.output import PackageMissing, UsageError


def no_command() -> UsageError:
    """The error for a rehearsal without ``--``: options of the program would be read as options of the rehearsal."""
    return UsageError(
        "trainfold rehearse",
        expected="your program and its arguments after --",
        found="no --",
        fix="put -- before it, as in: trainfold rehearse --steps 40 -- python train.py --out {run}",
    )


def package_missing(error: ModuleNotFoundError, command: str) -> PackageMissing:
    """The error for a command that needs a package, such as torch, which is not installed here.

    Raises:
        ModuleNotFoundError: the given one, if it is a module of trainfold that is missing.
    """
    package = (error.name or "").partition(".")[0]
    if package in ("", "trainfold"):
        raise error
    return PackageMissing(
        f"trainfold {command}",
        expected=f"the package {package}",
        found="no such package",
        fix=f"install it, such as with pip install {package}; ls, inspect, diff, verify and prune need no torch",
    )


def usage_error(error: CycloptsError) -> UsageError:
    """The error for a command line that cyclopts refused."""
    command = " ".join(("trainfold", *(error.command_chain or ())))
    first, _, rest = str(error).strip().partition(". ")
    if isinstance(error, UnusedCliTokensError):
        first = f"more than it takes: {' '.join(error.unused_tokens or ())}"
    return UsageError(
        command,
        expected=f"a command line as `{command} --help` shows",
        found=first.rstrip("."),
        fix=rest.strip() or f"see `{command} --help`",
    )
