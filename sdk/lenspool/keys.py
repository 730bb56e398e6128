"""Every Redis key of lenspool. Keys of rq itself begin with `rq:` and are built by rq.

Keys that hold a job's or a client's state have a time to live, so that nothing grows without bound when its owner dies.
"""

from __future__ import annotations

CARDS = "lenspool:cards"
"""Sorted set: worker name, scored by the unix time at which its card expires."""

DONE_PREFIX = "lenspool:done:"
"""Stream per client: one message for each job that ended and that the client waits for."""

DONE_TTL = 3600
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
    """Name of the rq queue of a model."""
    return f"lenspool:{card_id}"


def suspects_name(card_id: str) -> str:
    """Name of the rq queue of jobs whose worker was lost once; few of them run at a time."""
    return f"lenspool:{card_id}:suspects"


def alone_name(card_id: str) -> str:
    """Name of the rq queue of jobs at their last attempt; each runs with nothing beside it."""
    return f"lenspool:{card_id}:alone"
