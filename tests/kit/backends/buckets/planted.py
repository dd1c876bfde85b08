"""Answers of servers that repeat a secret in every place, and what looks for it in errors."""

import json
import traceback

from trainfold.backends.stores.object_store.errors.bucket_errors import Refused
from trainfold.core.errors import TrainfoldError

SECRET = "IQoJb3JpZ2luX2VjSESS10N"
STATUSES = (200, 206, 301, 400, 401, 403, 404, 409, 412, 416, 429, 500, 501, 503)
HEADERS = (
    "Location: http://127.0.0.1:1/{0}?x={0}", "WWW-Authenticate: Bearer {0}", "x-amz-request-id: {0}", "x-ms-error-code: {0}", "Server: {0}",
    "Retry-After: 0",
)  # fmt: skip
KEPT_HEADERS = (
    "Last-Modified: {0}",
    'ETag: "{0}"',
    "Content-Range: {0}",
    "x-goog-generation: {0}",
    "x-amz-meta-trainfoldtoken: {0}",
)


def _listed(secret):
    return f"<?xml version='1.0'?><ListBucketResult><Contents><Key>{secret}</Key><Size>{secret}</Size></Contents></ListBucketResult>"


BODIES = {
    "xml": lambda s: f'<?xml version="1.0" encoding="UTF-8"?><!-- {s} --><Error a="{s}"><Code>InvalidRequest</Code><Message>{s}</Message><HostId>{s}</HostId><CanonicalRequest>GET\nx-amz-security-token:{s}</CanonicalRequest></Error>',
    "xml with a code of its own": lambda s: f"<Error><Code>{s}</Code><Message>no {s}</Message></Error>",
    "xml cut off": lambda s: f"<Error><Code>AccessDenied</Code><Message>no {s}",
    "xml in a 200": lambda s: f"<Error><Code>InternalError</Code><Message>{s}</Message></Error>",
    "list": _listed,
    "deletions": lambda s: f"<DeleteResult><Error><Key>run/k</Key><Code>{s}</Code><Message>{s}</Message></Error></DeleteResult>",
    "deletions of another object": lambda s: f"<DeleteResult><Error><Key>{s}</Key><Code>{s}</Code><Message>{s}</Message></Error></DeleteResult>",
    "json": lambda s: json.dumps({"error": {"code": 403, "message": f"no {s}", "status": s, "details": [{s: s}]}, "error_description": s}),
    "json with codes": lambda s: json.dumps({"error": s, "code": s, "message": s, "error_uri": f"http://h/{s}"}),
    "json of a text": json.dumps,
    "html": lambda s: f"<!DOCTYPE html><html><head><title>{s}</title></head><body>{s}<p>{s}</p></body></html>",
    "plain": lambda s: s,
    "plain lines": lambda s: f"upstream says\n\n{s}\r\n{s}",
    "words of a client": lambda s: f"Generic S3 error: Error performing GET http://{s}/?{s} in 1s - HTTP error: {s}\n\nDebug source:\n{s}",
    "nothing": lambda s: "",
}  # fmt: skip


def answer(status, body, *, secret=SECRET, headers=HEADERS):
    """All of an answer, with the secret in its body, headers and reason."""
    data = BODIES[body](secret).encode()
    lines = (f"HTTP/1.1 {status} {secret}", f"Content-Length: {len(data)}", *(each.format(secret) for each in headers))
    return "\r\n".join((*lines, "", "")).encode() + data


def always(given):
    """What `Proxy.fault` is for a server with one answer."""
    return lambda number, method, path: given


def failure_of(named, call):
    """What a call raises under the names of `BucketErrors`; None if it raises nothing."""
    try:
        with named("k"):
            call()
    except (TrainfoldError, Refused) as error:
        return error
    return None


def said_by(error):
    """All that an error, its causes and its contexts say."""
    texts, left, seen = traceback.format_exception(error), [error], set()
    while left:
        each = left.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        left += [each.__cause__, each.__context__, *getattr(each, "exceptions", ())]
        texts += [str(each), repr(each), repr(each.args), repr(vars(each)), repr(getattr(each, "__notes__", ()))]
    return "\n".join(texts)
