"""A Hugging Face Hub on this machine, whose repositories are folders."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """The server.

    Attributes:
        url: for HF_ENDPOINT.
        asked: the paths that clients have asked for.
        commit: of the revision "main".
    """

    commit = COMMIT

    def __init__(self, repositories: dict[str, Path]) -> None:
        asked: list[str] = []
        hub = self

        def files(name: str) -> list[Path]:
            return sorted(path for path in repositories[name].rglob("*") if path.is_file())

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                asked.append(self.path)
                path = self.path.partition("?")[0]
                if match := re.fullmatch(r"/api/models/(\w+/\w+)/revision/(\w+)", path):
                    return self._info(*match.groups())
                if match := re.fullmatch(r"/api/models/(\w+/\w+)/tree/(\w+)", path):
                    return self._tree(*match.groups())
                if match := re.fullmatch(r"/(\w+/\w+)/resolve/(\w+)/(.+)", path):
                    return self._file(*match.groups())
                return self._answer(404, b"{}")

            def _info(self, name: str, revision: str) -> None:
                if name not in repositories or revision not in ("main", COMMIT, hub.commit):
                    word = "RepoNotFound" if name not in repositories else "RevisionNotFound"
                    return self._answer(404, b"{}", {"X-Error-Code": word})
                names = [file.relative_to(repositories[name]).as_posix() for file in files(name)]
                siblings = [{"rfilename": each} for each in names]
                commit = hub.commit if revision == "main" else revision
                info = {"id": name, "sha": commit, "siblings": siblings}
                return self._answer(200, json.dumps(info).encode())

            def _tree(self, name: str, revision: str) -> None:
                entries = [
                    {
                        "type": "file",
                        "path": file.relative_to(repositories[name]).as_posix(),
                        "size": file.stat().st_size,
                        "oid": hashlib.sha1(file.read_bytes()).hexdigest(),
                    }
                    for file in files(name)
                ]
                return self._answer(200, json.dumps(entries).encode())

            def _file(self, name: str, revision: str, file: str) -> None:
                path = repositories[name] / file
                if not path.exists():
                    return self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
                content = path.read_bytes()
                etag = hashlib.sha1(content).hexdigest()
                headers = {"ETag": f'"{etag}"', "X-Repo-Commit": revision}
                return self._answer(200, content, headers)

            def _answer(
                self, status: int, content: bytes, headers: dict[str, str] | None = None
            ) -> None:
                self.send_response(status)
                for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(content)

        self.asked = asked
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def serve(repositories: dict[str, Path]) -> Iterator[Hub]:
    """Serve folders by their names, such as ``org/name``."""
    hub = Hub(repositories)
    try:
        yield hub
    finally:
        hub.close()
