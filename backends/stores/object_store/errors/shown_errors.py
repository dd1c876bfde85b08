"""`without_secrets`: what may be shown of an error of an object store's client, or of another library that asks a server.

Providers and gateways repeat tokens, signatures and headers in their answers, in fields of any name. So nothing of an answer is shown but its status and a code
of letters; and what the client says is known by its form: a text of another form is not shown.
"""

import os
import re
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any, Final

from trainfold.backends.stores.object_store.over_fsspec.exceptions import GenericError

CUT: Final = "…"
"""What ends a text of which something is not shown."""

_DETAIL: Final = "\n\nDebug source:"  # after each text of obstore; it repeats the answer
_ABOUT: Final = re.compile(
    r"(?:Generic \w+ error|Object at location .*? (?:not found|already exists|not modified)|Request precondition failure for path .*?"
    r"|The operation lacked [a-z ]+ for path .*?|Operation not supported): "
)
_REQUEST: Final = re.compile(
    r"(?:Error [a-z]+ [\w ]*request.*?: )?Error performing (?P<what>[A-Z]+ \S+) in \S+?(?:, after (?P<tries>\d+) retries, max_retries: \d+, retry_timeout: \S+ )? +- "
)
_ANSWER: Final = re.compile(
    r"Server returned (?:non-2xx status code: (?P<status>\d{3} [^:\n]*): |(?P<other>error response): )"
)
_PASSED: Final = re.compile(r"(Unable to extract metadata from headers|Error [a-z]+ [\w ]*body|HTTP error): ")
_CLAUSE: Final = re.compile(
    r"[A-Za-z](?:(?! for key )[A-Za-z_ ,.-])*"
)  # what a client says begins with words of its own
_UNSENT: Final = "error sending request"
_WHY: Final = {  # in the detail of a request without an answer, from where its kind is
    '"dns error"': "no machine of that name is found (DNS)",
    "kind: ConnectionRefused": "connection refused",
    "Unreachable,": "no way to that machine",
    "InvalidCertificate(": "its certificate is not trusted here (TLS)",
    "ProxyAuthRequired": "the proxy asks for a login (407)",
    "TimedOut": "no answer in time",
}
_CODE: Final = re.compile(
    r"""<Code>([A-Za-z_.]{2,64})</Code>|"(?:code|error)"\s*:\s*"([A-Za-z_.]{2,64})"|\(code: ([A-Za-z_.]{2,64})\)"""
)
_IS_CODE: Final = re.compile(r"[A-Za-z_.]{2,64}")
_LOGIN: Final = re.compile(r"(?<=://).*@", re.DOTALL)  # of an address: a password may have any sign in it
_QUERY: Final = re.compile(r"\?.*", re.DOTALL)  # it may hold a signature
_LIMIT: Final = 400
_OWN_WORDS: Final = frozenset({  # other libraries' errors that are made before there is an answer
    "ClientConnectorCertificateError", "ClientConnectorDNSError", "ClientConnectorError", "ConfigNotFound", "ConnectTimeoutError",
    "EndpointConnectionError", "NoCredentialsError", "NoRegionError", "PartialCredentialsError", "ProfileNotFound",
    "ReadTimeoutError", "ServerDisconnectedError", "ServiceRequestError",
})  # fmt: skip


def without_secrets(error: BaseException) -> str:
    r"""What is shown of an error: the request without its query and logins, what the client says of it, and of an answer the status and the code.

    Examples:
        >>> without_secrets(OSError("Error performing GET http://h/a?sig=x in 1s - Server returned non-2xx status code: 403 Forbidden: <Code>AccessDenied</Code> x\n\nDebug source:"))
        'GET http://h/a?…: 403 Forbidden: AccessDenied …'
        >>> without_secrets(OSError("Generic S3 error: Got invalid list response: invalid type: string \"x\"\n\nDebug source:"))
        'Got invalid list response …'
        >>> without_secrets(OSError(13, "x is not allowed to"))
        'PermissionError: Permission denied …'
    """
    if is_panic(error):
        return f"{type(error).__name__}: an answer that the client cannot take {CUT}"
    text, mark, detail = str(error).partition(_DETAIL)
    is_of_client = mark and len(list(_chain(error))) == 1 and not _status_and_code(error)
    return (_client_said(text, detail) if is_of_client else _library_said(error))[:_LIMIT]


def is_panic(error: BaseException) -> bool:
    """Whether the code of obstore has given up on an answer. No module has the class, which is not an `Exception`: it would pass all that a failed save or a retention is kept from the training by."""
    kind = type(error)
    return (kind.__module__, kind.__name__) == ("pyo3_runtime", "PanicException")


def _client_said(text: str, detail: str) -> str:
    """What obstore says in its own words. Each form is looked for where the one before it ends: an answer may repeat any of them."""
    at, said = 0, []
    while found := _ABOUT.match(text, at):
        at = found.end()
    if found := _REQUEST.match(text, at):
        at = found.end()
        said.append(
            _without_logins_or_query(found["what"]) + (f", after {found['tries']} retries" if found["tries"] else "")
        )
    if found := _ANSWER.match(text, at):
        code = _CODE.search(text, found.end())
        said += [found["status"] or found["other"], *(filter(None, code.groups()) if code else ())]
        return ": ".join(said) + (f" {CUT}" if text[found.end() :].strip() else "")
    while found := _PASSED.match(text, at):
        at = found.end()
        said.append(found[1])
    found, code = _CLAUSE.match(text, at), _CODE.search(text, at)
    said += [found[0].strip()] if found else []
    said += filter(None, code.groups()) if code else ()
    if text[at:] == _UNSENT:
        said += [why for sign, why in _WHY.items() if sign in detail.partition("inner: Http(")[2]][:1]
    return ": ".join(said) + (f" {CUT}" if found is None or text[found.end() :].strip(" .") else "")


def _library_said(error: BaseException) -> str:
    """The classes of an error and its causes, with the status and the code if one of them is an answer."""
    chain = list(_chain(error))
    said = list(dict.fromkeys(type(each).__name__ for each in chain if type(each) is not GenericError))
    for each in chain:
        if known := _status_and_code(each):
            return ": ".join((*said, *known)) + f" {CUT}"
        if type(each).__name__ in _OWN_WORDS:
            return ": ".join((*said, _without_logins_or_query(str(each))))
        if isinstance(each, OSError) and each.errno:
            said.append(os.strerror(each.errno))
    return ": ".join(said) + f" {CUT}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _status_and_code(error: BaseException) -> list[str]:
    """Of an answer, as the libraries of three providers keep them in errors."""
    response: Any = getattr(error, "response", None)
    about, meta = (
        (response.get(key, {}) for key in ("Error", "ResponseMetadata")) if isinstance(response, Mapping) else ({}, {})
    )
    numbers = (
        getattr(error, "status_code", None),
        getattr(error, "status", None),
        getattr(error, "code", None),
        meta.get("HTTPStatusCode"),
    )
    codes = (about.get("Code"), getattr(error, "error_code", None))
    status = next((int(text) for each in numbers if (text := str(each)).isdigit()), 0)
    code = next((text for each in codes if _IS_CODE.fullmatch(text := str(getattr(each, "value", each or "")))), "")
    reason = next((each.phrase for each in HTTPStatus if each == status), "")
    return [*([f"{status} {reason}".strip()] if status else []), *([code] if code else [])]


def _without_logins_or_query(text: str) -> str:
    return _QUERY.sub(f"?{CUT}", _LOGIN.sub(f"{CUT}@", text))
