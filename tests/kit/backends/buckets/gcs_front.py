"""`GcsFront`: the XML interface of Google Cloud Storage, as far as a run in a bucket uses it, over a server that has the JSON interface only.

No emulator that could be installed speaks it. This is our own translation of requests, by Google's pages; generations, preconditions, lists and the bytes are those of the
server behind it (fake-gcs-server), but parts are kept and put together here. So it proves what a run sends to ``gs://``, with which credentials, and what it makes of the answers: not that Google answers so.

Sources: https://cloud.google.com/storage/docs/request-preconditions, https://cloud.google.com/storage/docs/xml-api/get-bucket-list,
https://cloud.google.com/storage/docs/multipart-uploads, https://cloud.google.com/storage/docs/xml-api/reference-headers
"""

import base64
import http.client
import itertools
import json
import re
import threading
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit
from xml.sax.saxutils import escape

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

_ATTRIBUTE = "x-goog-meta-"
_KEPT = ("content-range", "etag", "last-modified", "x-goog-generation")


class GcsFront:
    """A server on the loopback, which takes requests that its `account` has signed, and passes them on.

    Attributes:
        port: of it.
        unsigned: how many requests had no valid signature; they got a 401.
    """

    def __init__(self, json_port):
        self.json_port, self.unsigned = json_port, 0
        self.uploads, self.numbers = {}, itertools.count(1)
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        handler = type("Handler", (_Handler,), {"front": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def account(self, port=None):
        """What Google gives to a service account, for this server or a proxy before it."""
        private = self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return json.dumps({"private_key": private.decode(), "private_key_id": "1", "client_email": "run@test", "gcs_base_url": f"http://127.0.0.1:{port or self.port}"})  # fmt: skip

    def is_signed(self, authorization):
        """Whether a request has a token that the account has signed (RFC 7515)."""
        found = re.fullmatch(r"Bearer ([\w-]+\.[\w-]+)\.([\w-]+)", authorization or "")
        if found is None:
            return False
        signature = base64.urlsafe_b64decode(found[2] + "=" * (-len(found[2]) % 4))
        try:
            self._key.public_key().verify(signature, found[1].encode(), padding.PKCS1v15(), hashes.SHA256())
        except Exception:  # noqa: BLE001  # whatever is wrong with it
            return False
        return True


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer in two packets waits 40 ms for a word of the client
    front: GcsFront

    def log_message(self, *args):
        """Say nothing."""

    def _serve(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if not self.front.is_signed(self.headers.get("Authorization")):
            self.front.unsigned += 1
            return self._error(401, "AuthenticationRequired")
        parts = urlsplit(self.path)
        bucket, _, key = parts.path[1:].partition("/")
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        if not key:
            return self._list(bucket, query)
        if "uploads" in query or "uploadId" in query:
            return self._part(bucket, key, query, body)
        match self.command:
            case "PUT":
                attributes = {
                    name.lower().removeprefix(_ATTRIBUTE): value
                    for name, value in self.headers.items()
                    if name.lower().startswith(_ATTRIBUTE)
                }
                return self._insert(bucket, key, body, attributes, self.headers.get("x-goog-if-generation-match"))
            case "DELETE":
                status, _, _ = self._ask("DELETE", f"/storage/v1/b/{bucket}/o/{key.replace('/', '%2F')}")
                return self._error(status, "NoSuchKey") if status >= 400 else self._answer(204)
        span = {"Range": self.headers["Range"]} if "Range" in self.headers else {}
        status, headers, data = self._ask(
            "GET", f"/download/storage/v1/b/{bucket}/o/{key.replace('/', '%2F')}?alt=media", headers=span
        )
        if status >= 400:
            return self._error(status, {404: "NoSuchKey", 416: "InvalidRange"}.get(status, "InternalError"))
        kept = {
            name: value
            for name, value in headers.items()
            if name.lower() in _KEPT or name.lower().startswith(_ATTRIBUTE)
        }
        return self._answer(status, data, **kept)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    def _insert(self, bucket, key, data, attributes, generation):
        about = json.dumps({"name": unquote(key), "metadata": attributes}).encode()
        mark = md5(data).hexdigest().encode()
        body = b"--%b\r\nContent-Type: application/json\r\n\r\n%b\r\n--%b\r\nContent-Type: application/octet-stream\r\n\r\n%b\r\n--%b--" % (mark, about, mark, data, mark)  # fmt: skip
        query = {"uploadType": "multipart", **({} if generation is None else {"ifGenerationMatch": generation})}
        status, _, found = self._ask("POST", f"/upload/storage/v1/b/{bucket}/o?{urlencode(query)}", body, {"Content-Type": f"multipart/related; boundary={mark.decode()}"})  # fmt: skip
        if status >= 400:
            return self._error(status, {404: "NoSuchBucket", 412: "PreconditionFailed"}.get(status, "InternalError"))
        found = json.loads(found)
        tag = {"ETag": f'"{found["etag"]}"', "x-goog-generation": found["generation"]}
        if self.command == "PUT":
            return self._answer(200, **tag)
        return self._answer(200, f"<CompleteMultipartUploadResult><ETag>{escape(tag['ETag'])}</ETag></CompleteMultipartUploadResult>".encode(), **tag)  # fmt: skip

    def _part(self, bucket, key, query, body):
        uploads, name = self.front.uploads, query.get("uploadId")
        match self.command:
            case "POST" if "uploads" in query:
                name = f"u{next(self.front.numbers)}"
                uploads[name] = {}
                return self._answer(200, f"<InitiateMultipartUploadResult><UploadId>{name}</UploadId></InitiateMultipartUploadResult>".encode())  # fmt: skip
            case _ if name not in uploads:
                return self._error(404, "NoSuchUpload")
            case "PUT":
                tag = f'"{md5(body).hexdigest()}"'
                uploads[name][int(query["partNumber"])] = tag, body
                return self._answer(200, ETag=tag)
            case "DELETE":
                del uploads[name]
                return self._answer(204)
        listed = re.findall(rb"<ETag>(.*?)</ETag><PartNumber>(\d+)</PartNumber>", body)
        parts = [uploads[name].get(int(number)) for _, number in listed]
        if any(part is None or part[0] != tag.decode().replace("&quot;", '"') for part, (tag, _) in zip(parts, listed, strict=True)):  # fmt: skip
            return self._error(400, "InvalidPart")
        done = self._insert(bucket, key, b"".join(data for _, data in parts), {}, None)
        uploads.pop(name, None)
        return done

    def _list(self, bucket, query):
        asked = {"prefix": query.get("prefix", ""), "maxResults": query.get("max-keys", "1000")}
        for ours, theirs in (
            ("delimiter", "delimiter"),
            ("continuation-token", "pageToken"),
            ("start-after", "startOffset"),
        ):
            if ours in query:
                asked[theirs] = query[ours]
        status, _, found = self._ask("GET", f"/storage/v1/b/{bucket}/o?{urlencode(asked)}")
        if status >= 400:
            return self._error(status, "NoSuchBucket")
        found = json.loads(found)
        more = found.get("nextPageToken")
        rows = [
            f"<Contents><Key>{escape(each['name'])}</Key><Generation>{each['generation']}</Generation><LastModified>{each['updated']}</LastModified>"
            f"<ETag>&quot;{each['etag']}&quot;</ETag><Size>{each['size']}</Size></Contents>"
            for each in found.get("items", [])
        ]
        rows += [
            f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>" for each in found.get("prefixes", [])
        ]
        rows += [f"<NextContinuationToken>{escape(more)}</NextContinuationToken>"] if more else []
        text = f"<ListBucketResult><Name>{bucket}</Name><IsTruncated>{str(bool(more)).lower()}</IsTruncated>{''.join(rows)}</ListBucketResult>"
        return self._answer(200, text.encode())

    def _ask(self, method, path, body=b"", headers=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.front.json_port, timeout=30)
        try:
            connection.request(method, quote(path, safe="/?&=%+"), body, headers or {})
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def _error(self, status, code):
        self._answer(
            status, f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
        )

    def _answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
