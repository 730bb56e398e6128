"""Connections of a worker: the same server as the connection it was given, with timeouts of the worker's own."""

from __future__ import annotations

from typing import Any

import redis
import redis.asyncio
from redis.backoff import NoBackoff
from redis.retry import Retry
from rq.connections import get_connection_kwargs

_ADDRESS = ("host", "port", "path", "db", "username", "password", "credential_provider")
_ASYNC = {
    redis.Connection: redis.asyncio.Connection,
    redis.SSLConnection: redis.asyncio.SSLConnection,
    redis.UnixDomainSocketConnection: redis.asyncio.UnixDomainSocketConnection,
}


def _address(connection: redis.Redis) -> dict[str, Any]:
    options = get_connection_kwargs(connection)
    kept = {name: value for name, value in options.items() if name in _ADDRESS or name.startswith("ssl_")}
    if "path" not in kept:
        kept["socket_keepalive"] = True
    return kept


def blocking(connection: redis.Redis, timeout: float) -> redis.Redis:
    """A sync client whose commands fail after `timeout` seconds, and are never repeated behind the caller's back."""
    pool = redis.ConnectionPool(
        connection_class=connection.connection_pool.connection_class,
        socket_timeout=timeout,
        socket_connect_timeout=timeout,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
        **_address(connection),
    )
    return redis.Redis(connection_pool=pool)


def asynchronous(connection: redis.Redis, timeout: float) -> redis.asyncio.Redis:
    """An asyncio client for commands that block on the server; its caller bounds them with `asyncio.timeout`.

    With a socket timeout redis-py sends through `asyncio.wait_for`, which on Python 3.11 can swallow a cancellation.
    """
    pool = redis.asyncio.ConnectionPool(
        connection_class=_ASYNC[connection.connection_pool.connection_class],
        socket_timeout=None,
        socket_connect_timeout=timeout,
        protocol=2,
        **_address(connection),
    )
    return redis.asyncio.Redis(connection_pool=pool)
