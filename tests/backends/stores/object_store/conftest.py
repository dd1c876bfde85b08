"""One server for all tests of these files, started by the first that needs it."""

import pytest


@pytest.fixture(scope="session")
def s3():
    """A server that speaks S3, with a bucket named bucket."""
    from kit.backends.buckets.s3_cases import S3Server

    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def proxy(s3):
    """A proxy before that server, which fails on demand."""
    from kit.backends.buckets.proxy import Proxy

    one = Proxy(s3.port)
    yield one
    one.close()
