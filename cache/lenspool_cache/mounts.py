"""Whether a folder is on a network file system: SQLite has no shared memory there, and locks may be of one machine."""

from __future__ import annotations

import os
import re
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_NETWORK = {"9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3", "virtiofs"}


def is_network(folder: Path, mounts: Path = _MOUNTS) -> bool:
    """Whether other machines may write there. `LENSPOOL_NETWORK_STORE=1` (or 0) says so where it cannot be seen."""
    told = os.environ.get("LENSPOOL_NETWORK_STORE")
    if told:
        return told != "0"
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return False
    best, kind, whole = -1, "", folder.resolve()
    for line in lines:
        head, _, tail = line.partition(" - ")
        # Blanks and the like in it are written as \040.
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), head.split()[4])
        if whole.is_relative_to(point) and len(point) >= best:  # of several at one place the last counts
            best, kind = len(point), tail.split()[0]
    return kind in _NETWORK or kind.startswith("fuse.")
