"""Whom a worker takes jobs from: nobody may write them who has not shown a password or a certificate."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
from urllib.parse import parse_qsl, urlencode, urlparse, urlunparse

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from lenspool.errors import PoolUnavailable

log = logging.getLogger(__name__)

_SECRETS = ("username", "password", "ssl_certfile", "ssl_keyfile", "ssl_password")
_PROBE_S = 5.0


def refuse_open_redis(url: str) -> None:
    """Refuse a Redis on the network that lets strangers in.

    The server is asked, as a stranger would: a password in the URL says nothing about who needs one.

    Raises
    ------
    PoolUnavailable
        The server is not on this machine, and answers without password and certificate; or it does not answer.
    """
    parts = urlparse(url)
    if parts.scheme == "unix" or _loopback(parts.hostname or "localhost"):
        return
    if parts.scheme != "rediss":
        log.warning("jobs and passwords travel to %s unencrypted: rediss:// would encrypt them", parts.hostname)
    try:
        with redis.Redis.from_url(
            _without_secrets(url),
            socket_timeout=_PROBE_S,
            socket_connect_timeout=_PROBE_S,
            retry=Retry(NoBackoff(), 0),
        ) as stranger:
            stranger.ping()
    except (redis.exceptions.AuthenticationError, redis.exceptions.NoPermissionError):
        return
    except redis.exceptions.ResponseError as error:  # NOAUTH, or protected mode
        log.debug("a stranger is refused: %s", error)
        return
    except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError) as error:
        if _wants_certificate(url, error):
            return
        raise PoolUnavailable(f"no Redis at {parts.hostname}: {error}") from error
    raise PoolUnavailable(f"{parts.hostname} is a Redis on another machine that asks no password (allow: --insecure)")


def _loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _without_secrets(url: str) -> str:
    """The URL as somebody has it who knows where the server is, and nothing else."""
    parts = urlparse(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    query = [(name, value) for name, value in parse_qsl(parts.query) if name not in _SECRETS]
    address = f"{host}:{parts.port}" if parts.port else str(host)
    return urlunparse(parts._replace(netloc=address, query=urlencode(query)))


def _wants_certificate(url: str, error: Exception) -> bool:
    """Whether the server hung up on a stranger because it asks clients for a certificate, which the URL has."""
    names = dict(parse_qsl(urlparse(url).query))
    return "ssl_certfile" in names and "refused" not in str(error).lower()
