"""A hub on 127.0.0.1: the addresses that ``huggingface_hub`` asks when it downloads a model, and an index of packages."""

import contextlib
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator, Mapping

SHA = "5" * 40


class Hub:
    """What the server gives, and what it was asked.

    Attributes:
        repositories: files by path, by repository.
        packages: files of an index by project.
        refused: the status and ``X-Error-Code`` that a repository's files get instead.
        cut: files of which only a half is sent before the connection ends.
        log: the method and path of every request.
        url: the server's address.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Mapping[str, bytes]] = {}
        self.packages: dict[str, Mapping[str, bytes]] = {}
        self.refused: dict[str, tuple[int, str]] = {}
        self.cut: set[str] = set()
        self.log: list[str] = []
        self.url = ""

    def downloads(self) -> list[str]:
        """The names of the files that were asked for, and not only looked at."""
        return [entry.rsplit("/", 1)[1] for entry in self.log if entry.startswith("GET") and "/resolve/" in entry]


@contextlib.contextmanager
def serve() -> Iterator[Hub]:
    """A running hub."""
    hub = Hub()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Says nothing."""

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, body: bool) -> None:
            path = self.path.partition("?")[0]
            hub.log.append(f"{self.command} {path}")
            if match := re.fullmatch(r"/simple/([^/]+)/", path):
                links = [f'<a href="/files/{match[1]}/{file}">{file}</a>' for file in hub.packages.get(match[1], ())]
                return self._send(body, "".join(links).encode(), kind="text/html", status=200 if links else 404)
            if match := re.fullmatch(r"/files/([^/]+)/(.+)", path):
                return self._send(body, hub.packages[match[1]][match[2]], cut=match[2] in hub.cut)
            if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/[^/]+)?(/tree/[^/]+)?", path):
                files = hub.repositories.get(match[1])
                if files is None:
                    return self._send(body, b"{}", status=401, headers={"X-Error-Code": "RepoNotFound"})
                return self._send(body, _about(match[1], files, tree=bool(match[2])), kind="application/json")
            match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path)
            if match and match[1] in hub.refused:
                status, code = hub.refused[match[1]]
                return self._send(body, b"", status=status, headers={"X-Error-Code": code})
            if not match or match[2] not in hub.repositories.get(match[1], {}):
                headers = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": SHA}
                return self._send(body, b"", status=404, headers=headers)
            data = hub.repositories[match[1]][match[2]]
            headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": SHA, "Accept-Ranges": "bytes"}
            self._send(body, data, headers=headers, cut=match[2] in hub.cut)

        def _send(self, body, data, *, status=200, kind="application/octet-stream", headers=None, cut=False) -> None:
            headers = dict(headers or {})
            begin = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            if begin and status == 200:
                status, whole, data = 206, len(data), data[int(begin[1]) :]
                headers["Content-Range"] = f"bytes {begin[1]}-{whole - 1}/{whole}"
            self.send_response(status)
            for name, value in {"Content-Type": kind, "Content-Length": len(data), **headers}.items():
                self.send_header(name, str(value))
            self.end_headers()
            if body:
                self.wfile.write(data[: len(data) // 2] if cut else data)
                self.close_connection = self.close_connection or cut

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield hub
        server.shutdown()
        thread.join()


def _about(name: str, files: Mapping[str, bytes], tree: bool) -> bytes:
    """What the hub's API says about a repository, or about its files."""
    blobs = {file: hashlib.sha1(data).hexdigest() for file, data in files.items()}
    if tree:
        entries = [{"type": "file", "path": file, "oid": blobs[file], "size": len(files[file])} for file in files]
        return json.dumps(entries).encode()
    siblings = [{"rfilename": file, "size": len(files[file]), "blobId": blobs[file]} for file in files]
    about = {"id": name, "modelId": name, "sha": SHA, "private": False, "gated": False, "downloads": 0, "likes": 0}
    return json.dumps({**about, "tags": ["license:mit"], "siblings": siblings}).encode()
