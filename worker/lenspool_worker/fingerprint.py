"""The fingerprint of a model folder: a hash of every file that decides what the model computes.

Hashing gigabytes of weights is done once per file: digests are remembered by (path, size, modification time, inode).
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from lenspool_cache.keys import canonical_json

_RELEVANT = (".safetensors", ".bin", ".pt", ".gguf", ".json", ".model", ".jinja", ".txt", ".py")
_IRRELEVANT = {"README.txt", "trainer_state.json", "training_args.bin"}


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/lenspool`, by default `~/.cache/lenspool`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lenspool"


def fingerprint(folder: Path) -> str:
    """SHA-256 (hex) over the names and contents of weights, config, tokenizer and template files of a folder.

    Raises
    ------
    FileNotFoundError
        The folder does not exist or holds no `config.json`.
    """
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} is not a model folder: it has no config.json")
    files = sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix in _RELEVANT and path.name not in _IRRELEVANT
    )
    memo = cache_folder() / "fingerprints.json"
    known = _read(memo)
    digests: dict[str, str] = {}
    fresh: dict[str, str] = {}
    for name in files:
        path = (folder / name).resolve()
        stat = path.stat()
        identity = f"{path}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ino}"
        digest = known.get(identity)
        if digest is None:
            with path.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            fresh[identity] = digest
        digests[name] = digest
    if fresh:
        _write(memo, _read(memo) | fresh)
    return hashlib.sha256(canonical_json(digests)).hexdigest()


def _read(memo: Path) -> dict[str, str]:
    try:
        known: dict[str, str] = json.loads(memo.read_text())
    except (OSError, ValueError):  # no memo yet, or a torn one: hash again
        return {}
    return known


def _write(memo: Path, digests: dict[str, str]) -> None:
    memo.parent.mkdir(parents=True, exist_ok=True)
    draft = memo.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(json.dumps(digests))
    draft.replace(memo)
