"""Deleting in a bucket: packs that nobody needs, and with limits the oldest.

Any number of machines may do it at once, and upload and read meanwhile. First come new shards without the packs that
go, then the old shards are deleted, then the packs. Who has read an old shard finds a pack missing, which is a miss;
with the next look at the bucket its index forgets it. Of packs that hold the same rows all machines keep the same one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from lenspool_cache.keys import run_key
from lenspool_cache.policy import Policy
from lenspool_cache.reader import PackReader
from lenspool_cache.remote import Remote
from lenspool_cache.scan import scan_pack
from lenspool_cache.upload import GRACE_S, add_shard, sweep


@dataclass(slots=True)
class Pruned:
    """What was deleted: packs and their bytes, shards that named them, and packs that no shard named."""

    packs: int = 0
    nbytes: int = 0
    shards: int = 0
    swept: int = 0


def prune(remote: Remote, policy: Policy, pinned: Collection[bytes] = ()) -> Pruned:
    """Delete packs whose rows all are in others, too, packs beyond the limits, and those that no shard names.

    Parameters
    ----------
    policy
        `max_bytes` of all packs together, and `max_age_s` since a pack was uploaded. A bucket does not tell what is
        used: the oldest go first.
    pinned
        Keys of runs and entries; packs with any of them stay whatever the limits.

    Raises
    ------
    CacheError
        The bucket cannot be reached, or refuses.
    """
    remote.refresh()
    report, there = Pruned(), remote.bucket.objects("packs")
    shards = {shard: dict(remote.packs_of(shard)) for shard in remote.shards()}
    readers = {pack: reader for packs in shards.values() for pack, reader in packs.items()}
    victims = readers.keys() - there.keys()  # deleted by others while a shard that names them was made
    victims |= {pack for pack in _superseded(readers, victims) if there[pack].age_s > GRACE_S}
    left = [pack for pack in readers if pack not in victims]
    total = sum(there[pack].nbytes for pack in left)
    for pack in sorted(left, key=lambda pack: -there[pack].age_s):
        old = policy.max_age_s is not None and there[pack].age_s > policy.max_age_s
        if (old or (policy.max_bytes is not None and total > policy.max_bytes)) and not _holds(readers[pack], pinned):
            victims.add(pack)
            total -= there[pack].nbytes
    with tempfile.TemporaryDirectory(prefix="lenspool-prune-") as folder:
        for shard, packs in shards.items():
            if victims.isdisjoint(packs):
                continue
            if rest := {pack: reader for pack, reader in packs.items() if pack not in victims}:
                add_shard(remote, rest, Path(folder))
            remote.bucket.delete(f"index/{shard}")
            report.shards += 1
    for pack in victims & there.keys():
        remote.bucket.delete(f"packs/{pack}")
        report.packs += 1
        report.nbytes += there[pack].nbytes
    report.swept = sweep(remote)
    return report


def _superseded(readers: dict[str, PackReader], gone: Collection[str]) -> set[str]:
    """Packs of which each row is in a pack whose name comes before: so nobody deletes what another relies on."""
    out: set[str] = set()
    seen: set[tuple[bytes, int, int]] = set()
    for pack in sorted(readers.keys() - gone):
        rows = {(r.key, r.start, r.rows) for _, r in scan_pack(pack, readers[pack]).records if r.live}
        if rows <= seen:
            out.add(pack)
        seen |= rows
    return out


def _holds(reader: PackReader, keys: Collection[bytes]) -> bool:
    """Whether a pack has rows of these entries or runs."""
    for _, record in scan_pack(reader.path.name, reader).records if keys else ():
        document = reader.document(record)
        if record.key in keys or (document is not None and run_key(document) in keys):
            return True
    return False
