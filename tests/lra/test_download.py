"""Downloads from a local server: they resume, time out, and report what to do."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from skyformer.errors import DataError
from skyformer.lra.download import Download, OfficialSource
from skyformer.report.progress import Silent

CONTENT = bytes(range(256)) * 2000


class Server:
    """Serves one file at any address, with the faults that a test sets."""

    def __init__(self) -> None:
        self.content = CONTENT
        self.tag: str | None = '"v1"'
        self.cut_after: list[int] = []
        self.status = 200
        self.honours_ranges = True
        self.delay = 0.0
        self.ranges: list[str | None] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.answer(self)

            def log_message(self, *_: object) -> None:
                """Print nothing."""

        class QuietServer(ThreadingHTTPServer):
            def handle_error(self, *_: object) -> None:
                """Print nothing: the tests make clients hang up."""

        self.http = QuietServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_port}/official.tar.gz"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.ranges.append(request.headers["Range"])
        time.sleep(self.delay)
        start = self._start(request)
        if self.status >= 400 or start > len(self.content):
            request.send_error(self.status if self.status >= 400 else 416)
            return
        body = self.content[start:]
        request.send_response(206 if start else 200)
        request.send_header("Content-Length", str(len(body)))
        if self.tag:
            request.send_header("ETag", self.tag)
        if start:
            request.send_header("Content-Range", f"bytes {start}-{len(self.content) - 1}/{len(self.content)}")
        request.end_headers()
        request.wfile.write(body[: self.cut_after.pop(0)] if self.cut_after else body)

    def _start(self, request: BaseHTTPRequestHandler) -> int:
        wanted = request.headers["Range"]
        same = request.headers["If-Range"] == self.tag
        return int(wanted.split("=")[1].rstrip("-")) if wanted and same and self.honours_ranges else 0

    def stop(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


class Recorder(Silent):
    """Records the progress of the last task."""

    def begin(self, task: str, total: int | None = None, done: int = 0) -> None:
        self.total, self.first, self.done = total, done, done

    def update(self, task: str, *, done: int | None = None, advance: int = 0, text: str | None = None) -> None:
        self.done += advance


def download(server: Server, folder: Path, md5: str | None = None, timeout: float = 5.0) -> Path:
    return Download(OfficialSource(server.url, md5), folder, timeout=timeout, pause=0.0).run()


def test_whole_file_with_progress(server: Server, tmp_path: Path) -> None:
    recorder = Recorder()
    path = Download(OfficialSource(server.url), tmp_path / "new", recorder).run()
    assert path.read_bytes() == CONTENT
    assert (recorder.first, recorder.done, recorder.total) == (0, len(CONTENT), len(CONTENT))
    assert not list(path.parent.glob("*.part*"))


def test_broken_connection_resumes_where_it_broke(server: Server, tmp_path: Path) -> None:
    server.cut_after = [100_000, 50_000]
    recorder = Recorder()
    assert Download(OfficialSource(server.url), tmp_path, recorder, pause=0.0).run().read_bytes() == CONTENT
    assert (recorder.first, recorder.done, recorder.total) == (150_000, len(CONTENT), len(CONTENT))
    assert server.ranges == [None, "bytes=100000-", "bytes=150000-"]


@pytest.mark.parametrize("changed", [False, True])
def test_the_next_run_resumes_unless_the_file_has_changed(server: Server, tmp_path: Path, changed: bool) -> None:
    server.cut_after = [1000] * 4
    with pytest.raises(DataError, match=r"4,000 bytes are kept; run the same command to resume"):
        download(server, tmp_path)
    if changed:
        server.content, server.tag = CONTENT[::-1], '"v2"'
    assert download(server, tmp_path).read_bytes() == server.content
    assert server.ranges[-1] == "bytes=4000-"


@pytest.mark.parametrize("fault", [{"tag": None}, {"tag": 'W/"weak"'}, {"honours_ranges": False}], ids=str)
def test_a_server_that_cannot_resume_is_asked_for_the_whole_file(
    server: Server, tmp_path: Path, fault: dict[str, Any]
) -> None:
    vars(server).update(fault, cut_after=[1000])
    assert download(server, tmp_path).read_bytes() == CONTENT
    assert server.ranges == [None, None if "tag" in fault else "bytes=1000-"]


def test_partial_file_longer_than_the_whole_starts_over(server: Server, tmp_path: Path) -> None:
    (tmp_path / "official.tar.gz.part").write_bytes(b"x" * (len(CONTENT) + 5))
    (tmp_path / "official.tar.gz.part.version").write_text('"v1"')
    assert download(server, tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("fault", "message", "attempts"),
    [({"status": 404}, "HTTP 404", 1), ({"status": 503}, "HTTP 503", 4), ({"delay": 0.2}, "timed out", 4)],
    ids=str,
)
def test_only_temporary_errors_are_tried_again(
    server: Server, tmp_path: Path, fault: dict[str, Any], message: str, attempts: int
) -> None:
    vars(server).update(fault)
    with pytest.raises(DataError, match=message):
        download(server, tmp_path, timeout=0.05 if "delay" in fault else 5.0)
    assert len(server.ranges) == attempts


def test_offline_says_what_to_put_where(tmp_path: Path) -> None:
    source = OfficialSource("http://127.0.0.1:9/official.tar.gz")
    with pytest.raises(DataError, match="--from PATH, or put it at") as caught:
        Download(source, tmp_path, pause=0.0).run()
    assert str(tmp_path / "official.tar.gz") in str(caught.value)
    assert source.url in str(caught.value)


def test_published_hash(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="instead of the published 0000"):
        download(server, tmp_path, "0" * 32)
    assert not list(tmp_path.glob("official.tar.gz")) + list(tmp_path.glob("*.part"))
    assert download(server, tmp_path, hashlib.md5(CONTENT).hexdigest()).exists()


def test_an_existing_file_is_not_downloaded(server: Server, tmp_path: Path) -> None:
    (tmp_path / "official.tar.gz").write_bytes(b"put here by hand")
    assert download(server, tmp_path).read_bytes() == b"put here by hand"
    assert server.ranges == []


def test_two_at_once_download_once(server: Server, tmp_path: Path) -> None:
    server.delay = 0.1
    with ThreadPoolExecutor() as pool:
        paths = list(pool.map(lambda _: download(server, tmp_path), range(2)))
    assert [path.read_bytes() for path in paths] == [CONTENT] * 2
    assert len(server.ranges) == 1
