"""What a worker may be told when it is started, by `lenspool worker`, `lenspool up` and `connect_local` alike."""

from __future__ import annotations

from typing import Annotated, NamedTuple, TypedDict


class Says(NamedTuple):
    """What a command line says of an option, and its smallest value."""

    help: str
    least: int | None = None


class WorkerOptions(TypedDict, total=False):
    """Options that have a default; `name_of_option=` in Python, `--name-of-option` on a command line."""

    name: Annotated[str, Says("Name under which clients ask for the model; default: the folder's.")]
    max_in_flight: Annotated[int, Says("Jobs in the engine at a time; default 256.", 1)]
    held_bytes: Annotated[int, Says("Bytes of rows of jobs in flight; default a quarter of the memory.", 1)]
    per_client: Annotated[int, Says("Jobs of one client at a time, in all workers that limit them; default any.", 1)]
    client_queue: Annotated[int, Says("Jobs of one client that may wait in a lane; default 200000.", 1)]
    model_queue: Annotated[int, Says("Jobs of the model that may wait; default 1000000.", 1)]
    metrics_port: Annotated[int, Says("Serve Prometheus metrics on this local port (0: any); default none.", 0)]
    cache_bytes: Annotated[int, Says("Limit of the store on the disk, 0: none; default: the one that it has.", 0)]
    cache_days: Annotated[float, Says("Days after last use that rows are kept, 0: ever; default: as it is set.", 0)]
    lower: Annotated[str, Says("Stores under this one, only read: folders or s3:// URLs, with commas; '': none.")]
    upload: Annotated[str, Says("Upload what the store gets to this s3:// URL; default nowhere.")]
