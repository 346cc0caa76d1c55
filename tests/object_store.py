"""A local server of S3, for tests of folders in an object store."""

import logging
import os
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from moto.server import ThreadedMotoServer
from s3fs import S3FileSystem

from composer3d.facts import remote
from composer3d.facts.remote import RemotePath

BUCKET = "bucket"


@contextmanager
def s3_server() -> Iterator[RemotePath]:
    """Yield the folder of an empty bucket in a server that ends with the block.

    The environment names the server, for this process and those that it starts.
    """
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # not a line for each request
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    variables = {
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": address,
    }
    try:
        with patch.dict(os.environ, variables):
            forget_connections()
            urllib.request.urlopen(urllib.request.Request(f"{address}/{BUCKET}", method="PUT"))
            yield RemotePath(f"s3://{BUCKET}/runs")
    finally:
        forget_connections()
        server.stop()


def forget_connections() -> None:
    """Let the next request look at the environment. Another server would not be found."""
    remote._system.cache_clear()
    S3FileSystem.clear_instance_cache()
