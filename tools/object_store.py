"""A local server of S3, for tests and proofs of folders in an object store."""

import logging
import os
import urllib.request
import uuid
from functools import cache

from composer3d.facts.remote import RemotePath

_BUCKET = "bucket"


def new_folder() -> RemotePath:
    """Return an empty folder in a server of S3 on this machine.

    The server starts with the first folder, and lives as long as this process. The environment
    names it from then on: processes that are started later find it too.
    """
    _start()
    return RemotePath(f"s3://{_BUCKET}/{uuid.uuid4().hex}")


@cache
def _start() -> None:
    """Start the server, with one bucket, and name it in the environment."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # or it logs each request
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": address,
    }
    urllib.request.urlopen(urllib.request.Request(f"{address}/{_BUCKET}", method="PUT"))
