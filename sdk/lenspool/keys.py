"""Every Redis key of lenspool. Keys of rq itself begin with `rq:` and are built by rq.

Keys that hold a job's or a client's state have a time to live, so that nothing grows without bound when its owner dies.
"""

from __future__ import annotations

CARDS = "lenspool:cards"
"""Sorted set: worker name, scored by the unix time at which its card expires."""

DONE_PREFIX = "lenspool:done:"
"""Stream per client: one message for each job that ended and that the client waits for."""

KEPT = "kept"
"""Who waits for a job that is to run whether a client is there or not."""

DONE_TTL = 3600
REQUEST_TTL = 7 * 24 * 3600
WAITERS_TTL = 24 * 3600
TOKENS_TTL = 600
STREAMED_TTL = 3600


def card(worker: str) -> str:
    """JSON card of a live worker; expires when the worker stops beating."""
    return f"lenspool:card:{worker}"


def tokenizer(digest: str) -> str:
    """Tokenizer file of a model, by content hash."""
    return f"lenspool:tokenizer:{digest}"


def array(digest: str) -> str:
    """An array that a client without access to the store sent, by content hash."""
    return f"lenspool:array:{digest}"


def blob(job_id: str) -> str:
    """Rows on their way to a client without access to the store."""
    return f"lenspool:blob:{job_id}"


def request(job_id: str) -> str:
    """The whole request of a submitted job, from which another process makes its handle."""
    return f"lenspool:request:{job_id}"


def done(client_id: str) -> str:
    """Completion stream of one client."""
    return DONE_PREFIX + client_id


def waiters(job_id: str) -> str:
    """Set of the clients that wait for a job."""
    return f"lenspool:waiters:{job_id}"


def tokens(job_id: str) -> str:
    """Stream of the tokens of a generation that somebody streams; the same tokens again when it runs again."""
    return f"lenspool:tokens:{job_id}"


def streamed(card_id: str) -> str:
    """Sorted set of the generations of a model that somebody streams, scored by the unix time at which it forgets them.

    Also the channel on which their ids are announced.
    """
    return f"lenspool:streamed:{card_id}"


def wake(client_id: str) -> str:
    """Stream that ends a client's wait for tokens, when it is to wait for those of one more job."""
    return f"lenspool:wake:{client_id}"


def reaper(queue_name: str) -> str:
    """Lock: who reaps the queue's lost jobs at the moment."""
    return f"lenspool:reap:{queue_name}"


def queue_name(card_id: str) -> str:
    """Name of the rq queue of a model: its registries, and jobs that come back to be run again."""
    return f"lenspool:{card_id}"


def lane_name(card_id: str, lane: str, client_id: str) -> str:
    """Name of the rq queue in which jobs of one client wait in one lane."""
    return f"lenspool:{card_id}:{lane}:{client_id}"


def ring(card_id: str) -> str:
    """Sorted set: keys of the clients' rq queues, scored by the turn at which each is served next."""
    return f"lenspool:ring:{card_id}"


def turn(card_id: str) -> str:
    """The turn of the queue that was served last."""
    return f"lenspool:turn:{card_id}"


def held(card_id: str) -> str:
    """Hash: worker -> JSON of how many jobs of which clients it has; kept by workers that limit those."""
    return f"lenspool:held:{card_id}"


def limits(card_id: str) -> str:
    """Hash of the most jobs that may wait: `model` in all, `client` of one client in one lane; set by workers."""
    return f"lenspool:limits:{card_id}"


def queued(card_id: str) -> str:
    """Upper bound on the number of jobs that wait, made exact when it reaches the limit."""
    return f"lenspool:queued:{card_id}"


def work(card_id: str) -> str:
    """Pubsub channel: a queue that was empty has a job."""
    return f"lenspool:work:{card_id}"


def suspects_name(card_id: str) -> str:
    """Name of the rq queue of jobs whose worker was lost once; few of them run at a time."""
    return f"lenspool:{card_id}:suspects"


def alone_name(card_id: str) -> str:
    """Name of the rq queue of jobs at their last attempt; each runs with nothing beside it."""
    return f"lenspool:{card_id}:alone"
