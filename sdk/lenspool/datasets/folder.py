"""What a dataset is on the disk: a folder that any number of processes fill, and that a kill leaves good.

folder/
  dataset.json    what was asked for, and where the rows of activations are
  parts/*.jsonl   a file for each chunk of rows, whole or not there: a header, then a line for each sequence or failure
  index.npy       of each sequence: chunk, place and length of its line, first row; made at the end
  manifest.json   counts and the hash of it all; written last
  claims/*        who works on which chunk; see `claims.py`
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from collections.abc import Iterator, Sequence
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
        self.claims = self.path / "claims"

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
        for folder in (self._parts, self.claims):
            folder.mkdir(parents=True, exist_ok=True)
        path, data = self.path / "dataset.json", json.dumps({"spec": spec, "about": about}, indent=2).encode()
        if self.document() is None and self._write(path, data, new=True):
            return
        found = (self.document() or {})["spec"]
        if found == spec:
            return
        if self.done():
            raise InvalidJob(
                ", ".join(name for name in spec if spec[name] != found.get(name)),
                f"the dataset in {self.path} was asked for otherwise",
                "the same as before, or another name or folder",
            )
        self._write(path, data)  # the digests of chunks tell two drivers that begin otherwise at the same moment

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
        path, data = self._part(chunk), b"".join(map(line, [header, *lines]))
        if path.exists() and path.read_bytes() == data:
            return
        manifest = self.path / "manifest.json"
        manifest.unlink(missing_ok=True)
        self._write(path, data)
        manifest.unlink(missing_ok=True)  # of who began to finish in between

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

    # -- the end

    def finish(self, chunks: int) -> dict[str, Any]:
        """Write index and manifest of a dataset whose chunks are all done; returns the manifest.

        Any number of drivers may do so at a time, and one of them leave another part meanwhile (a row that failed
        was tried again): what is written last is of the parts that there are then.
        """
        while True:
            before = self._marks(chunks)
            manifest = self._finish(chunks)
            if self._marks(chunks) == before:
                return manifest

    def _finish(self, chunks: int) -> dict[str, Any]:
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

    def _marks(self, chunks: int) -> list[tuple[int, int, int]]:
        """What differs when a part is another one."""
        found = (self._part(chunk).stat() for chunk in range(chunks))
        return [(stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in found]

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

    def _write(self, path: Path, data: bytes, *, new: bool = False) -> bool:
        """Leave a file, at once and whole; with `new` only where there is none, and whether that was so."""
        draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
        with draft.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        if new:
            try:
                os.link(draft, path)
            except FileExistsError:
                draft.unlink()
                return False
            except OSError:  # a file system without links: the last of two at the same moment stands
                pass
            else:
                draft.unlink()
                return True
        draft.replace(path)
        return True
