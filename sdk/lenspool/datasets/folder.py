"""What a dataset is on the disk: a folder that any number of processes fill, and that a kill leaves good.

folder/
  dataset.json    what was asked for, and where the rows of activations are
  parts/*.jsonl   a file for each chunk of rows, whole or not there: a header, then a line for each sequence or failure
  index.npy       of each sequence: chunk, place and length of its line, first row; made at the end
  manifest.json   counts and the hash of it all; written last
  claims/*        locks of chunks that a process works on; the system frees those of a process that dies
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lenspool.datasets.sources import line
from lenspool.errors import InvalidJob

VERSION = 1
_RECENT = 20
"""Parts by whose age the present rate is told."""


class Folder:
    """The files of one dataset."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self.index_path = self.path / "index.npy"
        self._parts = self.path / "parts"
        self._claims = self.path / "claims"

    # -- what was asked for

    def begin(self, spec: dict[str, Any], about: dict[str, Any]) -> None:
        """Make the folder, or find that it is of the same job.

        Parameters
        ----------
        spec
            What the sequences and their rows follow from; part of the hash.
        about
            The rest: where they are, how many rows are expected.

        Raises
        ------
        InvalidJob
            The folder holds a dataset that was asked for otherwise.
        """
        for folder in (self._parts, self._claims):
            folder.mkdir(parents=True, exist_ok=True)
        with self._lock(self.path / "claims" / "begin"):
            found = self.document()
            if found is None or (found["spec"] != spec and not self.done()):
                self._write(self.path / "dataset.json", json.dumps({"spec": spec, "about": about}, indent=2).encode())
            elif found["spec"] != spec:
                raise InvalidJob(
                    ", ".join(name for name in spec if spec[name] != found["spec"][name]),
                    f"the dataset in {self.path} was asked for otherwise",
                    "the same as before, or another name or folder",
                )

    def document(self) -> dict[str, Any] | None:
        """`dataset.json`; None where there is none."""
        return self._json("dataset.json")

    def manifest(self) -> dict[str, Any] | None:
        """`manifest.json`; None where the dataset is not finished."""
        return self._json("manifest.json")

    def _json(self, name: str) -> dict[str, Any] | None:
        try:
            document: dict[str, Any] = json.loads((self.path / name).read_bytes())
        except FileNotFoundError:
            return None
        return document

    # -- parts

    def header(self, chunk: int) -> dict[str, Any] | None:
        """Header of a chunk's part; None where it is not done."""
        try:
            with self._part(chunk).open("rb") as stream:
                header: dict[str, Any] = json.loads(stream.readline())
        except FileNotFoundError:
            return None
        return header

    def put(self, chunk: int, header: dict[str, Any], lines: Sequence[dict[str, Any]]) -> None:
        """Leave a chunk's part, at once and whole; what was finished with another is finished no more."""
        (self.path / "manifest.json").unlink(missing_ok=True)
        self._write(self._part(chunk), b"".join(map(line, [header, *lines])))

    def done(self) -> list[int]:
        """Chunks that are done."""
        return sorted(int(path.stem) for path in self._parts.glob("*.jsonl"))

    def lines(self, chunk: int) -> Iterator[tuple[int, bytes]]:
        """Place and bytes of each line of a part, without the header."""
        with self._part(chunk).open("rb") as stream:
            place = len(stream.readline())
            for text in stream:
                yield place, text
                place += len(text)

    def read(self, chunk: int, place: int, length: int) -> dict[str, Any]:
        """One line of a part."""
        with self._part(chunk).open("rb") as stream:
            stream.seek(place)
            document: dict[str, Any] = json.loads(stream.read(length))
        return document

    def claim(self, chunk: int) -> Callable[[], None] | None:
        """Take a chunk for this process until it ends or calls what is returned; None where another one has it."""
        path = self._claims / f"{chunk:08d}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None

        def release() -> None:
            path.unlink(missing_ok=True)
            os.close(fd)

        return release

    # -- the end

    def finish(self, chunks: int) -> dict[str, Any]:
        """Write index and manifest of a dataset whose chunks are all done; returns the manifest."""
        with self._lock(self._claims / "finish"):
            spec = (self.document() or {})["spec"]
            counts = {"rows": 0, "sequences": 0, "tokens": 0, "failures": 0}
            hashed = hashlib.sha256(line(spec))
            # line by line into a file, so that an index of any size takes no memory
            draft = self.path / f"index.{uuid.uuid4().hex}.tmp"
            with draft.open("wb") as index:
                for chunk in range(chunks):
                    header = self.header(chunk) or {}
                    counts["rows"] += header["rows"]
                    hashed.update(line(header))
                    for place, text in self.lines(chunk):
                        hashed.update(text)
                        document = json.loads(text)
                        if "error" in document:
                            counts["failures"] += 1
                            continue
                        counts["sequences"] += 1
                        counts["tokens"] += len(document["tokens"])
                        first = document["rows"][0][0]
                        index.write(np.array([chunk, place, len(text), first], dtype=np.int64).tobytes())
            table = np.memmap(draft, np.int64, "r") if counts["sequences"] else np.empty(0, np.int64)
            ready = self.path / f"index.{uuid.uuid4().hex}.tmp"
            with ready.open("wb") as stream:
                np.save(stream, table.reshape(-1, 4))
            ready.replace(self.index_path)
            draft.unlink()
            manifest = {"v": VERSION, **counts, "chunks": chunks, "hash": hashed.hexdigest()}
            self._write(self.path / "manifest.json", json.dumps(manifest, indent=2).encode())
        return manifest

    def status(self) -> dict[str, Any]:
        """How far it is: counts of what is done, present rate, and seconds that are left where that can be told.

        Raises
        ------
        InvalidJob
            There is no dataset.
        """
        document = self.document()
        if document is None:
            raise InvalidJob("folder", f"{self.path} holds no dataset", "a folder with a dataset.json")
        headers = {chunk: self.header(chunk) or {} for chunk in self.done()}
        rows = sum(header["rows"] for header in headers.values())
        times = sorted((self._part(chunk).stat().st_mtime, header["rows"]) for chunk, header in headers.items())
        recent, manifest, total = times[-_RECENT:], self.manifest(), document["about"].get("rows")
        span = recent[-1][0] - recent[0][0] if recent else 0.0
        rate = sum(count for _, count in recent[1:]) / span if span > 0 else None
        working = manifest is None and bool(times) and time.time() - times[-1][0] < 3600
        left = (total - rows) / rate if total is not None and rate and working else None
        return {
            "name": document["about"]["name"],
            "model": document["spec"]["model"],
            "hooks": document["spec"]["hooks"],
            "folder": str(self.path),
            "finished": manifest is not None,
            "rows": rows,
            "of": total if manifest is None else manifest["rows"],
            "failures": sum(header["failures"] for header in headers.values()),
            "rows_per_s": rate if working else None,
            "eta_s": left,
            "hash": manifest["hash"] if manifest else None,
        }

    # -- inside

    def _part(self, chunk: int) -> Path:
        return self._parts / f"{chunk:08d}.jsonl"

    def _write(self, path: Path, data: bytes) -> None:
        draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
        with draft.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(path)

    @contextlib.contextmanager
    def _lock(self, path: Path) -> Iterator[None]:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)
