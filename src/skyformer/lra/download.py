"""Downloads that resume after an interruption, also in a later run, and appear under their name only when complete.

Written here because pooch, the usual library for this, starts an interrupted download over.
"""

from __future__ import annotations

import os
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path

from filelock import FileLock

from skyformer.errors import DataError
from skyformer.files import md5_of, sync_folder, write_atomic
from skyformer.report.progress import Progress, Silent

TIMEOUT_SECONDS = 30.0
ATTEMPTS = 4
_PAUSE_SECONDS = 1.0
_BLOCK = 2**18
_NETWORK_ERRORS = (urllib.error.URLError, HTTPException, OSError)


@dataclass(frozen=True)
class OfficialSource:
    """The address of a published file, and its MD5 sum if that is published too."""

    url: str
    md5: str | None = None

    @property
    def file_name(self) -> str:
        return self.url.rsplit("/", 1)[-1]


class _InterruptedError(Exception):
    """The connection broke; what was received is kept."""


class Download:
    """The download of one official file into a folder."""

    def __init__(
        self,
        source: OfficialSource,
        folder: Path,
        progress: Progress | None = None,
        timeout: float = TIMEOUT_SECONDS,
        pause: float = _PAUSE_SECONDS,
    ) -> None:
        self.source, self.timeout, self.pause = source, timeout, pause
        self.progress = progress or Silent()
        self.target = folder / source.file_name
        self._partial = folder / f"{source.file_name}.part"
        self._version = folder / f"{source.file_name}.part.version"

    def run(self) -> Path:
        """Download the file unless it is there already; returns its path."""
        self.target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{self.target}.lock"):
            if not self.target.exists():
                self._fetch()
                self._check_md5()
                self._partial.replace(self.target)
                self._version.unlink(missing_ok=True)
                sync_folder(self.target.parent)
        return self.target

    def _fetch(self) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._fetch_once()
            except _InterruptedError as interruption:
                if attempt == ATTEMPTS:
                    raise DataError(self._advice(interruption.__cause__ or interruption)) from interruption
                time.sleep(self.pause * attempt)
        return None

    def _fetch_once(self) -> None:
        try:
            with urllib.request.urlopen(self._request(), timeout=self.timeout) as response:
                self._receive(response)
        except urllib.error.HTTPError as error:
            self._handle_refusal(error)
        except _NETWORK_ERRORS as error:
            raise _InterruptedError from error

    def _handle_refusal(self, error: urllib.error.HTTPError) -> None:
        if error.code == 416:
            # The partial file is longer than the file on the server: the next attempt starts over.
            self._partial.unlink(missing_ok=True)
            raise _InterruptedError from error
        if error.code in (408, 429) or error.code >= 500:
            raise _InterruptedError from error
        raise DataError(self._advice(error)) from error

    @property
    def _received(self) -> int:
        return self._partial.stat().st_size if self._partial.exists() else 0

    def _request(self) -> urllib.request.Request:
        headers = {"User-Agent": "skyformer", "Accept-Encoding": "identity"}
        if self._received and self._version.exists():
            headers["Range"] = f"bytes={self._received}-"
            headers["If-Range"] = self._version.read_text()
        return urllib.request.Request(self.source.url, headers=headers)

    def _receive(self, response: HTTPResponse) -> None:
        resumed = response.status == 206
        start = self._received if resumed else 0
        if resumed and not (response.headers["Content-Range"] or "").startswith(f"bytes {start}-"):
            self._partial.unlink()
            raise _InterruptedError("the server did not resume where it was asked to")
        length = response.headers["Content-Length"]
        total = start + int(length) if length else None
        self._remember_version(response)
        self._write(response, "ab" if resumed else "wb", start, total)
        if total is not None and self._received != total:
            raise _InterruptedError(f"the connection ended after {self._received:,} of {total:,} bytes")

    def _write(self, response: HTTPResponse, mode: str, start: int, total: int | None) -> None:
        title = f"downloading {self.source.file_name}"
        self.progress.begin(title, total, done=start)
        with self._partial.open(mode) as file:
            while block := response.read(_BLOCK):
                file.write(block)
                self.progress.update(title, advance=len(block))
            file.flush()
            os.fsync(file.fileno())
        self.progress.end(title)

    def _remember_version(self, response: HTTPResponse) -> None:
        """Store what identifies this version of the file; weak or missing ETags cannot identify a version."""
        tag = response.headers["ETag"] or ""
        version = tag if tag.startswith('"') else response.headers["Last-Modified"]
        if version:
            write_atomic(self._version, version)
        else:
            self._version.unlink(missing_ok=True)

    def _check_md5(self) -> None:
        if self.source.md5 is None:
            return
        found = md5_of(self._partial)
        if found != self.source.md5:
            self._partial.unlink()
            raise DataError(
                f"{self.source.url} has MD5 {found} instead of the published {self.source.md5}: the download was "
                f"deleted. Try again, or get {self.source.file_name} elsewhere and pass it with --from."
            )

    def _advice(self, cause: BaseException) -> str:
        kept = f" {self._received:,} bytes are kept; run the same command to resume." if self._received else ""
        return (
            f"cannot download {self.source.url} ({_reason(cause)}).{kept} Without a connection, get "
            f"{self.source.file_name} elsewhere and pass it with --from PATH, or put it at {self.target}."
        )


def _reason(cause: BaseException) -> str:
    reason = getattr(cause, "reason", None)
    if isinstance(cause, TimeoutError) or isinstance(reason, TimeoutError):
        return "timed out"
    if isinstance(cause, urllib.error.HTTPError):
        return f"HTTP {cause.code} {cause.reason}"
    return str(reason or cause) or type(cause).__name__
