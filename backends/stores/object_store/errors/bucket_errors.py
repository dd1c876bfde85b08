"""`BucketErrors`: the errors of an object store's client, with names, what to do, and nothing secret.

None has the client's own error as its cause or its context: that has the whole answer, and providers repeat tokens there.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NoReturn, TypeVar, final

from trainfold.backends.stores.object_store.errors.credential_chains import missing_credentials
from trainfold.backends.stores.object_store.errors.shown_errors import CUT, is_panic, without_secrets
from trainfold.core.errors import (
    CheckpointError,
    CheckpointUnreadable,
    InvalidArgument,
    NotWritable,
    SaveFailed,
    TrainfoldError,
)

E = TypeVar("E", bound=TrainfoldError)

_REJECTED: Final = re.compile(  # by their codes, where the client has no class for them, as of a list
    r"\b401 Unauthorized|\b(ExpiredToken|InvalidToken|InvalidAccessKeyId|SignatureDoesNotMatch)\b"
)
_SKEWED: Final = re.compile(r"\bRequestTimeTooSkewed\b")
_REJECTED_OR_SKEWED: Final = re.compile(r"\b(AuthenticationFailed|invalid_grant)\b")  # Azure's and Google's, of both
_DISABLED: Final = re.compile(
    r"\b(AccountIsDisabled|AccountProblem|AllAccessDisabled|InvalidPayer|UserProjectAccountProblem|accountDisabled)\b"
)
_MISNAMED: Final = re.compile(r"\b(InvalidBucketName|InvalidResourceName|OutOfRangeInput)\b")
_ELSEWHERE: Final = re.compile(r"\b(AuthorizationHeaderMalformed|PermanentRedirect)\b|redirect without LOCATION")
_DENIED: Final = re.compile(r"\b403 Forbidden|\b(AccessDenied|AuthorizationPermissionMismatch)\b")
_BARRED: Final = re.compile(r": 407 |\(407\)$")
_UNTRUSTED: Final = re.compile(r"\(TLS\)$|\b(SSLError|ClientConnectorCertificateError)\b")
_NO_SUCH_BUCKET: Final = (
    re.compile(  # Google and Azure say no more of a list, and an object that is not there has a class of its own
        r"\b(NoSuchBucket|ContainerNotFound)\b|^GET \S+\?…: 404 Not Found"
    )
)
_NO_BUCKET: Final = "create it, or correct its name"
_MAY_WRITE: Final = "give these credentials the right to write and delete there, or save elsewhere"
_MAY_READ: Final = "give these credentials the right to read and list there (without s3:ListBucket, S3 denies what is not there too); this does not prove damage"
_RENEW: Final = "renew or correct these credentials"
_SET_CLOCK: Final = "set this machine's clock: a store refuses what is signed at another time than its own"
_ENABLE: Final = "look at the account at its provider: it is closed, or not paid for"
_TOOLS: Final = {
    "s3": "`aws s3`",
    "gs": "`gcloud storage`",
    "gcs": "`gcloud storage`",
    "az": "`az storage`",
    "abfs": "`az storage`",
}
_BY_PROXY: Final = "give HTTPS_PROXY or HTTP_PROXY a login that the proxy takes, or name the store in NO_PROXY"
_NO_PROXY: Final = re.compile(r"\bProxyConnectionError\b")
_LOOK_AT_PROXY: Final = f"look whether the proxy runs that HTTPS_PROXY or HTTP_PROXY names; {_BY_PROXY}"
_LOOK: Final = "look at the network and at the store"
_TRUST: Final = (
    "correct the address of the store, or let this machine trust the authority that has signed its certificate"
)
_SET_REGION: Final = "set AWS_REGION to the region of the bucket"

_BY_SIGN: Final = (
    (_SKEWED, "a request with the time of the store", _SET_CLOCK),
    (_REJECTED_OR_SKEWED, "credentials that the store takes", f"{_RENEW}; or {_SET_CLOCK}"),
    (_DISABLED, "an account that the store serves", _ENABLE),
    (_MISNAMED, "a name that a bucket can have", "correct the name of the bucket in the URL"),
    (_ELSEWHERE, "the region of the bucket", _SET_REGION),
    (_BARRED, "a proxy that passes requests on", _BY_PROXY),
    (_UNTRUSTED, "a store whose certificate is trusted", _TRUST),
)


class NotThere(SaveFailed):
    """There is no bucket, or no object to replace."""


class NoCredentials(SaveFailed):
    """There are none, so nothing was put."""


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
        try:
            yield
        except BaseException as error:
            if not self._is_of_client(error):
                raise
            raise_alone(self.unreadable(key, error))

    @contextmanager
    def writing(self, key: str) -> Iterator[None]:
        """Name what a change of an object raises.

        Raises:
            Refused: if the condition of a put does not hold.
            NotThere: if there is no bucket, or no object to replace.
            NoCredentials: if nothing gives any.
        """
        kinds = self._kinds
        try:
            yield
        except (kinds.AlreadyExistsError, kinds.PreconditionError, FileExistsError):
            raise_alone(Refused())
        except BaseException as error:
            if not (self._is_of_client(error) or isinstance(error, NotImplementedError)):
                raise
            raise_alone(self._unwritten(key, error))

    def _is_of_client(self, error: BaseException) -> bool:
        """Whether the client has raised it. `FileNotFoundError` is of the bucket, as of a list, or of an object that is to be replaced."""
        return isinstance(error, self._kinds.BaseError | PermissionError | FileNotFoundError) or is_panic(error)

    def _unwritten(self, key: str, error: BaseException) -> CheckpointError | InvalidArgument:
        if isinstance(error, FileNotFoundError):
            return self._named(NotThere, key, expected="a bucket", found=without_secrets(error), fix=_NO_BUCKET)
        if isinstance(error, self._kinds.NotSupportedError | NotImplementedError):
            return self._named(
                InvalidArgument,
                key,
                expected="a store with conditional puts",
                found=without_secrets(error),
                fix="use a provider that has them: without them two writers cannot be distinguished",
            )
        if said := missing_credentials(error):
            return self._named(NoCredentials, key, **said)
        if said := self._refusal(error, "write", _MAY_WRITE):
            return self._named(NotWritable, key, **said)
        found = without_secrets(error)
        return self._named(
            SaveFailed,
            key,
            expected="the planned bytes to be stored",
            found=found,
            fix=f"{_look_at(found)}; earlier checkpoints are intact",
        )

    def unreadable(self, key: str, error: BaseException) -> CheckpointUnreadable:
        """What says that an object cannot be read now. It may be there though it is denied."""
        if said := missing_credentials(error) or self._refusal(error, "read", _MAY_READ):
            return self._named(CheckpointUnreadable, key, **said)
        found = without_secrets(error)
        if isinstance(error, FileNotFoundError) or _NO_SUCH_BUCKET.search(found):
            return self._named(CheckpointUnreadable, key, expected="a bucket", found=found, fix=_NO_BUCKET)
        return self._named(
            CheckpointUnreadable,
            key,
            expected="bytes from the store",
            found=found,
            fix=f"{_look_at(found)}, and try again; this does not prove damage",
        )

    def _named(self, kind: type[E], key: str, *, expected: str, found: str, fix: str) -> E:
        if found.endswith(CUT):
            tool = next((tool for scheme, tool in _TOOLS.items() if self._url.startswith(scheme)), "its own tool")
            fix = f"{fix}; the words of the provider may repeat credentials and are not shown: {tool} prints them"
        return kind(self.where(key), expected=expected, found=found, fix=fix)

    def _refusal(self, error: BaseException, verb: str, fix: str) -> dict[str, str] | None:
        """The ``expected``, ``found`` and ``fix`` of a refusal, by a provider or on the way to it; None of any other error."""
        kinds, found = self._kinds, without_secrets(error)
        for sign, expected, what in _BY_SIGN:
            if sign.search(found):
                return {"expected": expected, "found": found, "fix": what}
        if isinstance(error, kinds.UnauthenticatedError) or _REJECTED.search(found):
            return {"expected": "credentials that the store takes", "found": found, "fix": _RENEW}
        if isinstance(error, kinds.PermissionDeniedError | PermissionError) or _DENIED.search(found):
            return {"expected": f"the right to {verb}", "found": found, "fix": fix}
        return None

    def is_final(self, error: BaseException) -> bool:
        """Whether a second try soon after would end alike."""
        return missing_credentials(error) is not None or self._refusal(error, "read", "") is not None


def _look_at(found: str) -> str:
    """Where to look after a request that was not answered: a proxy may be in between, which may be back soon."""
    return _LOOK_AT_PROXY if _NO_PROXY.search(found) else _LOOK


def raise_alone(error: Exception) -> NoReturn:
    """Raise an error without what is handled now: Python keeps that as its context, and what reports errors may show it."""
    try:
        raise error
    finally:
        error.__context__ = None
