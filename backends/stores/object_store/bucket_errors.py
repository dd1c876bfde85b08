"""`BucketErrors`: the errors of an object store's client, with names, what to do, and nothing secret."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, final

from trainfold.backends.stores.place import without_logins
from trainfold.core.errors import (
    CheckpointMissing,
    CheckpointUnreadable,
    InvalidArgument,
    NotWritable,
    SaveFailed,
)

_QUERY: Final = re.compile(r"\?[^\s\"')]*")  # of an address in an error's text: it may hold a signature
_TEXT_LIMIT: Final = 400
_NO_BUCKET: Final = "create it, or correct its name"


class NotThere(SaveFailed):
    """There is no bucket, or no object to replace."""


class Refused(Exception):
    """A conditional put was refused."""


@final
class BucketErrors:
    """The errors of one bucket.

    Args:
        kinds: the client's exceptions, as `obstore.exceptions` has them.
        url: the location in messages.
    """

    def __init__(self, kinds: Any, url: str) -> None:
        self._kinds = kinds
        self._url = url

    def where(self, key: str) -> str:
        """An object in messages."""
        return f"{self._url}/{key}" if key else self._url

    @contextmanager
    def reading(self, key: str) -> Iterator[None]:
        """Name what a read of an object raises."""
        kinds = self._kinds
        try:
            yield
        except (kinds.PermissionDeniedError, kinds.UnauthenticatedError, PermissionError) as error:
            raise CheckpointMissing(
                self.where(key),
                expected="the right to read",
                found=without_secrets(error),
                fix="give these credentials the right to read and list there",
            ) from shown_cause(error)
        except (
            kinds.BaseError,
            FileNotFoundError,
        ) as error:  # the second one is of a list, and so of the bucket
            raise self.unreadable(key, error) from shown_cause(error)

    @contextmanager
    def writing(self, key: str) -> Iterator[None]:
        """Name what a change of an object raises.

        Raises:
            Refused: if the condition of a put does not hold.
            NotThere: if there is no bucket, or no object to replace.
        """
        kinds = self._kinds
        try:
            yield
        except (kinds.AlreadyExistsError, kinds.PreconditionError, FileExistsError) as error:
            raise Refused from error
        except FileNotFoundError as error:  # of a bucket; or of an object that is to be replaced
            raise NotThere(
                self.where(key), expected="a bucket", found=without_secrets(error), fix=_NO_BUCKET
            ) from shown_cause(error)
        except (kinds.PermissionDeniedError, kinds.UnauthenticatedError, PermissionError) as error:
            raise NotWritable(
                self.where(key),
                expected="the right to write",
                found=without_secrets(error),
                fix="give these credentials the right to write there, or save elsewhere",
            ) from shown_cause(error)
        except (kinds.NotSupportedError, NotImplementedError) as error:
            raise InvalidArgument(
                self.where(key),
                expected="a store with conditional puts",
                found=without_secrets(error),
                fix="use a provider that has them: without them two writers cannot be distinguished",
            ) from shown_cause(error)
        except kinds.BaseError as error:
            raise SaveFailed(
                self.where(key),
                expected="the planned bytes to be stored",
                found=without_secrets(error),
                fix="look at the network and at the store; earlier checkpoints are intact",
            ) from shown_cause(error)

    def unreadable(self, key: str, error: BaseException) -> CheckpointUnreadable:
        """What says that an object cannot be read now."""
        if isinstance(error, FileNotFoundError) or "NoSuchBucket" in str(error):
            return CheckpointUnreadable(
                self.where(key), expected="a bucket", found=without_secrets(error), fix=_NO_BUCKET
            )
        return CheckpointUnreadable(
            self.where(key),
            expected="bytes from the store",
            found=without_secrets(error),
            fix="look at the network and at the store, and try again; this does not prove damage",
        )


def without_secrets(error: BaseException) -> str:
    """The text of an error without what may be secret in it, and without its many lines of detail."""
    lines = [line for line in str(error).split("\n\nDebug source:")[0].splitlines() if line.strip()]
    return _QUERY.sub("?…", without_logins(" ".join(lines)))[:_TEXT_LIMIT]


def shown_cause(error: BaseException) -> BaseException | None:
    """The cause that a traceback shows; None if its text has the login of a URL, such as that of an endpoint."""
    text = str(error)
    return error if without_logins(text) == text else None
