"""A local Hugging Face hub with one repository, as far as `snapshot_download` needs it; it can also refuse."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

REPO = "somebody/something"
COMMIT = "0" * 40


@contextmanager
def hub(folder: Path | None, error_code: str = "") -> Iterator[tuple[str, list[str]]]:
    """Its address, and the list of files that were fetched. folder: the repository; None: every answer is a 401 with
    `error_code`, like the real hub's.
    """
    fetched: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(has_body=False)

        def do_GET(self) -> None:
            self._answer(has_body=True)

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self, *, has_body: bool) -> None:
            if folder is None:
                self._send(401, b"", {"x-error-code": error_code, "x-error-message": "no"}, has_body)
            elif self.path.startswith("/api/"):
                names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
                listing = {"id": REPO, "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
                sizes = {name: (folder / name).stat().st_size for name in names}
                tree = [{"type": "file", "path": name, "size": size, "oid": name} for name, size in sizes.items()]
                body = json.dumps(tree if "/tree/" in self.path else listing).encode()
                self._send(200, body, {"content-type": "application/json"}, has_body)
            else:
                self._send_file(self.path.partition(f"/resolve/{COMMIT}/")[2].partition("?")[0], has_body)

        def _send_file(self, name: str, has_body: bool) -> None:
            assert folder is not None
            data = (folder / name).read_bytes()
            if has_body:
                fetched.append(name)
            headers = {"etag": f'"{hashlib.sha1(data).hexdigest()}"', "x-repo-commit": COMMIT}
            self._send(200, data, headers, has_body)

        def _send(self, status: int, body: bytes, headers: dict[str, str], has_body: bool) -> None:
            self.send_response(status)
            for name, value in (headers | {"content-length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            if has_body:
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", fetched
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
