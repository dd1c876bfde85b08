"""What rules of a contract check with: two values are equal, a call raises, calls run in threads."""

import threading
from collections.abc import Callable
from typing import Any

from trainfold.core.errors import TrainfoldError
from trainfold.properties.differences import ContractBroken


def equal(what: str, *, expected: object, found: object) -> None:
    """Raise `ContractBroken` if two values differ."""
    if expected != found:
        raise ContractBroken(f"{what}: expected {expected!r}, found {found!r}"[:400])


def raises(kind: type[BaseException], call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Raise `ContractBroken` unless a call raises an error of this kind; one of ours names a place and a fix."""
    about = f"{getattr(call, '__name__', call)}{args}"[:80]
    try:
        call(*args, **kwargs)
    except kind as error:
        if isinstance(error, TrainfoldError) and not (error.where and error.fix):
            raise ContractBroken(f"{kind.__name__} of {about} lacks a place or a fix: {error}") from error
        return
    except Exception as error:
        raise ContractBroken(f"{about}: expected {kind.__name__}, found {type(error).__name__}: {error}") from error
    raise ContractBroken(f"{about}: expected {kind.__name__}, and nothing was raised")


def in_threads(jobs: list[Callable[[], None]]) -> None:
    """Run all at once, and raise the first error of one."""
    failed: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # noqa: BLE001  # raised in the caller's thread below
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
