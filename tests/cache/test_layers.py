"""A store over others that are only read: a folder, and a bucket of a server that speaks S3.

`Under` is what any layer must do; a new kind of layer inherits it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from store_samples import a_run, flip, pack_files, rows_of, same_bits
from test_prefix import PATTERN

from lenspool_cache import CacheCorrupt, CacheError, CacheMiss, Policy, Store, save_lower
from lenspool_cache.prune import Pruned, prune
from lenspool_cache.remote import Remote, mirror_folder
from lenspool_cache.shards import read_shard
from lenspool_cache.upload import sweep, upload

WIDE = 9000  # rows of 64 float32 in one entry, which are these
SEGMENTS = 3


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """Endpoint of a server that speaks S3."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of a new bucket. This test's machine has no shards of any bucket yet."""
    import s3fs

    for name, value in (
        ("AWS_ENDPOINT_URL", s3),
        ("AWS_ACCESS_KEY_ID", "test"),
        ("AWS_SECRET_ACCESS_KEY", "test"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
        ("XDG_CACHE_HOME", str(tmp_path / "machine")),
    ):
        monkeypatch.setenv(name, value)
    name = f"b{abs(hash(str(tmp_path)))}"
    s3fs.S3FileSystem(skip_instance_cache=True).mkdir(name)
    return f"s3://{name}/lab"


def filled(folder: Path, runs: range = range(3)) -> None:
    with Store(folder) as store:
        for number in runs:
            store.put(a_run(number), {"h": [(2, rows_of(number))], "g": [(0, rows_of(number, dtype="bfloat16"))]})
        store.put(a_run(99), {"wide": [(0, rows_of(99, WIDE))]})
        store.put_array(rows_of(7))


class Under:
    """What a store gives that has a filled layer under it; `place` makes that and says where it is."""

    @pytest.fixture
    def place(self) -> str:
        raise NotImplementedError

    def test_hits_come_from_below_and_writes_go_above(self, place: str, folder: Path) -> None:
        with Store(folder, lower=[place]) as store:
            for number in range(3):
                assert same_bits(store.rows(a_run(number), "h", [(2, 18)]), rows_of(number))
                assert same_bits(store.rows(a_run(number), "g", [(3, 5)]), rows_of(number, dtype="bfloat16")[3:5])
            (segment,) = store.lookup(a_run(1), ["h"])["h"]
            assert same_bits(store.read(segment), rows_of(1))
            assert store.covered(a_run(1), ["h", "g", "x"]) == {"h": [(2, 18)], "g": [(0, 16)]}
            assert store.put(a_run(1), {"h": [(0, rows_of(5, 18))]}) == 2 * 64 * 4, "only what nobody has is stored"
            joined = store.rows(a_run(1), "h", [(0, 18)])
            assert same_bits(joined[:2], rows_of(5, 18)[:2])
            assert same_bits(joined[2:], rows_of(1))
            with pytest.raises(CacheMiss):
                store.rows(a_run(4), "h", [(0, 1)])
            assert store.stats()["lower"] == place
            assert store.stats()["corrupt"] == 0

    def test_large_entries(self, place: str, folder: Path) -> None:
        with Store(folder, lower=[place]) as store:
            assert len(store.lookup(a_run(99), ["wide"])["wide"]) == SEGMENTS
            ranges = [(1, 2), (700, 5000), (WIDE - 1, WIDE)]
            want = np.concatenate([rows_of(99, WIDE)[slice(*r)] for r in ranges])
            assert same_bits(store.rows(a_run(99), "wide", ranges), want)
            assert same_bits(store.rows(a_run(99), "wide", [(0, WIDE)]), rows_of(99, WIDE))

    def test_arrays(self, place: str, folder: Path) -> None:
        with Store(folder, lower=[place]) as store:
            digest = Store(folder.parent / "other").put_array(rows_of(7))
            assert store.has_array(digest)
            assert same_bits(store.get_array(digest), rows_of(7))
            assert not store.has_array("0" * 64)
            with pytest.raises(KeyError):
                store.get_array("0" * 64)

    def test_a_store_names_its_layers(self, place: str, folder: Path) -> None:
        Store(folder).close()
        save_lower(folder, [place])
        for read_only in (True, False):
            with Store(folder, read_only=read_only) as store:
                assert same_bits(store.rows(a_run(0), "h", [(2, 18)]), rows_of(0))
        with Store(folder, lower=()) as store:
            assert store.lookup(a_run(1), ["h"]) == {}

    def test_a_forked_child(self, place: str, folder: Path) -> None:
        with Store(folder, lower=[place]) as store:
            assert store.lookup(a_run(0), ["h"])
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    assert same_bits(store.rows(a_run(1), "h", [(2, 18)]), rows_of(1))
                    status = 0
                finally:
                    os._exit(status)
            assert os.waitpid(child, 0)[1] == 0
            assert same_bits(store.rows(a_run(2), "h", [(2, 18)]), rows_of(2))


class TestFolder(Under):
    @pytest.fixture
    def place(self, tmp_path: Path) -> str:
        filled(tmp_path / "lab")
        return str(tmp_path / "lab")

    def test_it_is_not_changed(self, place: str, folder: Path) -> None:
        def files() -> dict[Path, int]:
            return {p: p.stat().st_mtime_ns for p in Path(place).rglob("*")}

        before = files()
        with Store(folder, lower=[place]) as store:
            store.rows(a_run(0), "h", [(2, 18)])
            store.put(a_run(7), {"h": [(0, rows_of(7))]})
        assert files() == before

    def test_damage_below_is_a_miss_and_is_stored_above(self, place: str, folder: Path) -> None:
        (path,) = [p for p in pack_files(Path(place)) if p.name.startswith("float32")]
        flip(path, path.read_bytes().index(rows_of(1).tobytes()) + 5)
        with Store(folder, lower=[place]) as store:
            with pytest.raises(CacheCorrupt):
                store.rows(a_run(1), "h", [(2, 18)])
            assert store.lookup(a_run(1), ["h"]) == {}
            store.put(a_run(1), {"h": [(2, rows_of(1))]})
            assert same_bits(store.rows(a_run(1), "h", [(2, 18)]), rows_of(1))

    def test_a_layer_that_is_not_there(self, tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        with pytest.raises(CacheError, match="is not a store"):
            Store(folder, lower=[tmp_path / "absent"])
        save_lower(folder, [tmp_path / "absent"])
        with Store(folder) as store:
            assert "goes without a lower layer" in caplog.text
            store.put(a_run(0), {"h": [(0, rows_of(0))]})
        (folder / "lower.json").write_text(json.dumps(["x"]))
        with pytest.raises(CacheError, match="names no lower layers"):
            Store(folder)


def uploaded(folder: Path, url: str) -> None:
    filled(folder)
    with Store(folder) as store:
        done = upload(store, Remote(url))
        assert (done.segments, done.packs, done.arrays, done.busy) == (3 + 3 + SEGMENTS, 2, 1, False)
        again = upload(store, Remote(url), done := set[str]())
        assert len(done) == 2
        assert (again.segments, again.packs, again.arrays) == (0, 0, 0), "what is there is not uploaded again"


def other_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))


class TestBucket(Under):
    @pytest.fixture
    def place(self, bucket: str, tmp_path: Path) -> str:
        uploaded(tmp_path / "source", bucket)
        return bucket

    def test_another_machine_finds_it_and_keeps_what_it_reads(
        self, place: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other_machine(monkeypatch, tmp_path)
        with Store(folder, lower=[place]) as store:
            assert same_bits(store.rows(a_run(1), "h", [(2, 18)]), rows_of(1))
            assert same_bits(store.rows(a_run(99), "wide", [(1500, 1510)]), rows_of(99, WIDE)[1500:1510])
            assert same_bits(store.read(store.lookup(a_run(1), ["g"])["g"][0]), rows_of(1, dtype="bfloat16"))
        with Store(folder, lower=()) as store:  # without the bucket
            assert same_bits(store.rows(a_run(1), "h", [(2, 18)]), rows_of(1))
            assert same_bits(store.rows(a_run(1), "g", [(0, 16)]), rows_of(1, dtype="bfloat16"))
            assert store.lookup(a_run(2), ["h"]) == {}
            assert len(store.lookup(a_run(99), ["wide"])["wide"]) == 1

    def test_rows_as_wide_as_their_run(
        self, place: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        patterns = {n: rows_of(n, n, 4 * n) for n in (3, 7, 5)}
        with Store(tmp_path / "third") as third:
            for n, rows in patterns.items():
                third.put(a_run(n), {PATTERN: [(0, rows)], f"x.{PATTERN}": [(0, rows[::-1])]})
        with Store(tmp_path / "third") as third:
            assert upload(third, Remote(place)).packs == 1
        other_machine(monkeypatch, tmp_path)
        with Store(folder, lower=[place]) as store:
            for n, rows in patterns.items():
                assert same_bits(store.rows(a_run(n), PATTERN, [(1, n)]), rows[1:])
                assert same_bits(store.rows(a_run(n), f"x.{PATTERN}", [(0, n)]), np.ascontiguousarray(rows[::-1]))
        with Store(folder, lower=()) as store:
            assert same_bits(store.rows(a_run(7), PATTERN, [(0, 7)]), patterns[7])

    def test_shards_appear_while_a_store_is_open(
        self, place: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other_machine(monkeypatch, tmp_path)
        with Store(folder, lower=[place]) as store:
            assert store.lookup(a_run(50), ["h"]) == {}
            filled(tmp_path / "third", range(50, 51))
            with Store(tmp_path / "third") as third:
                assert upload(third, Remote(place)).segments == 2
            store._layers[0].refresh()  # type: ignore[attr-defined]
            assert same_bits(store.rows(a_run(50), "h", [(2, 18)]), rows_of(50))

    def test_small_shards_are_joined(
        self, place: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("lenspool_cache.upload._SMALL_SHARDS", 2)
        filled(tmp_path / "third", range(50, 51))
        with Store(tmp_path / "third") as third:
            assert upload(third, Remote(place)).packs == 2
        assert len(Remote(place).bucket.objects("index")) == 1
        for machine in ("the same", "another"):
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ("machine" if machine == "the same" else machine)))
            with Store(folder / machine, lower=[place]) as store:
                for number in (0, 2, 50):
                    assert same_bits(store.rows(a_run(number), "h", [(2, 18)]), rows_of(number))

    @pytest.mark.parametrize("hurt", ["gone", "cut", "flipped"])
    def test_lost_and_damaged_objects_are_misses(self, place: str, folder: Path, hurt: str) -> None:
        remote = Remote(place)
        for name in remote.bucket.objects("packs"):
            data = bytearray(remote.bucket.read(f"packs/{name}"))
            if hurt == "gone":
                remote.bucket.delete(f"packs/{name}")
                continue
            for number in range(3):
                at = data.find(rows_of(number).tobytes())
                if at >= 0 and hurt == "flipped":
                    data[at + 9] ^= 1
            remote.bucket.write(f"packs/{name}", bytes(data[:4096] if hurt == "cut" else data))
        with Store(folder, lower=[place]) as store:
            with pytest.raises((CacheMiss, CacheCorrupt)):
                store.rows(a_run(1), "h", [(2, 18)])
            assert store.lookup(a_run(1), ["h"]) == {}
            store.put(a_run(1), {"h": [(2, rows_of(1))]})
            assert same_bits(store.rows(a_run(1), "h", [(2, 18)]), rows_of(1))

    def test_a_shard_is_read_by_h5py(self, place: str) -> None:
        remote = Remote(place)
        remote.refresh()
        shards = [p for p in (mirror_folder(place) / "shards").glob("*.h5") if not p.name.startswith(".")]
        packs = {name: layout for path in shards for name, layout in read_shard(path)}
        assert set(packs) == set(remote.bucket.objects("packs"))
        (layout,) = [layout for name, layout in packs.items() if name.startswith("float32")]
        assert layout.rows == 3 * 16 + WIDE, "an uploaded pack has no room for more"


def test_a_crash_in_mid_upload(
    bucket: str, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, script: Callable[..., object]
) -> None:
    """Packs are up, the shard is not: nobody sees them, the next upload makes it good, and a sweep clears up."""
    filled(tmp_path / "source")
    source = """
import os, sys
from lenspool_cache import Store
from lenspool_cache import upload as module
from lenspool_cache.remote import Remote
module.write_shard = lambda *a: os._exit(9)
module.upload(Store(sys.argv[1]), Remote(sys.argv[2]))
"""
    assert script(source, tmp_path / "source", bucket).wait(timeout=60) == 9  # type: ignore[attr-defined]
    remote = Remote(bucket)
    assert len(remote.bucket.objects("packs")) == 2
    with Store(folder, lower=[bucket]) as store:
        assert store.lookup(a_run(0), ["h"]) == {}
    uploaded_again = tmp_path / "source"
    with Store(uploaded_again) as store:
        assert upload(store, remote).packs == 2
    assert len(remote.bucket.objects("packs")) == 4
    assert sweep(remote) == 0, "young ones may be somebody's upload"
    monkeypatch.setattr("lenspool_cache.upload.GRACE_S", -1.0)
    assert sweep(remote) == 2
    with Store(folder, lower=[bucket]) as store:
        store._layers[0].refresh()  # type: ignore[attr-defined]
        for number in range(3):
            assert same_bits(store.rows(a_run(number), "h", [(2, 18)]), rows_of(number))


def test_a_bucket_is_pruned(
    bucket: str, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows that two machines uploaded stay once; limits take the oldest; who has read on elsewhere misses, no more."""

    def numbers(store: Store, wanted: range) -> set[int]:
        found = set()
        for n in wanted:
            with contextlib.suppress(CacheMiss):
                assert same_bits(store.rows(a_run(n), "h", [(2, 18)]), rows_of(n))
                found.add(n)
        return found

    remote = Remote(bucket)
    with monkeypatch.context() as blind:
        blind.setattr(Remote, "places", lambda self: [])  # as two that upload at once: they do not see each other's yet
        for name in ("one", "two"):
            filled(tmp_path / name)
            with Store(tmp_path / name) as store:
                upload(store, remote)
    filled(tmp_path / "three", range(50, 51))
    with Store(tmp_path / "three") as store:
        upload(store, remote)
    other_machine(monkeypatch, tmp_path)
    with Store(folder, lower=[bucket]) as reader:
        assert reader.lookup(a_run(0), ["h"])  # its machine knows all shards
        assert prune(remote, Policy()).packs == 0, "young ones may be somebody's upload"
        for module in ("upload", "prune"):
            monkeypatch.setattr(f"lenspool_cache.{module}.GRACE_S", -1.0)
        done = prune(remote, Policy())
        assert (done.packs, done.swept) == (2, 0)
        assert len(remote.bucket.objects("packs")) == 4
        assert prune(remote, Policy()) == Pruned()
        assert numbers(reader, range(51)) in ({0, 1, 2, 50}, {50}), "a miss where its index named the pack that went"
        reader._layers[0].refresh()  # type: ignore[attr-defined]
        assert numbers(reader, range(51)) == {0, 1, 2, 50}
        assert reader.stats()["corrupt"] == 0
        newest = [place.pack for place in remote.places() if place.key == a_run(50).entry("h")]
        done = prune(remote, Policy(max_bytes=1), pinned={a_run(50).key})
        assert done.packs == 2
        assert newest[0] in remote.bucket.objects("packs")
    with Store(tmp_path / "fresh", lower=[bucket]) as store:
        store._layers[0].refresh()  # type: ignore[attr-defined]
        assert numbers(store, range(51)) == {50}
        assert "damaged" not in caplog.text
    with Store(tmp_path / "one") as store:
        assert upload(store, remote).segments == 3 + 3 + SEGMENTS, "what went can come again"


def test_a_bucket_that_cannot_be_reached(
    bucket: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Lookups miss, at once after the first; puts work; an upload says so."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setattr("lenspool_cache.bucket._S3", {"config_kwargs": {"retries": {"max_attempts": 1}}})
    with Store(folder, lower=[bucket]) as store:
        store.put(a_run(0), {"h": [(0, rows_of(0))]})
        assert same_bits(store.rows(a_run(0), "h", [(0, 16)]), rows_of(0))
        assert store.lookup(a_run(1), ["h"]) == {}
        assert "stays unknown" in caplog.text
        with pytest.raises(CacheError, match="cannot be used"):
            upload(store, Remote(bucket))


def test_what_is_known_of_a_bucket_is_kept_on_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home folder on a network has no room for SQLite's log."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert mirror_folder("s3://b/x").is_relative_to(tmp_path / "home")
    monkeypatch.setenv("LENSPOOL_NETWORK_STORE", "1")
    assert mirror_folder("s3://b/x").is_relative_to(tmp_path / f"lenspool-{os.getuid()}")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    (tmp_path / "lenspool-12345").mkdir()
    with pytest.raises(CacheError, match="somebody else"):
        mirror_folder("s3://b/x")


def test_no_such_bucket(bucket: str, tmp_path: Path) -> None:
    filled(tmp_path / "source", range(1))
    with Store(tmp_path / "source") as store, pytest.raises(CacheError, match="is there such a bucket"):
        upload(store, Remote("s3://no-such-bucket/x"))


def test_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(CacheError, match=r"lenspool\[s3\]"):
        Remote("nosuchprotocol://x/y")
