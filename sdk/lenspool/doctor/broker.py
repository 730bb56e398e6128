"""Checks of Redis."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from typing import Any

import redis.asyncio
import redis.exceptions

from lenspool.doctor.finding import Finding
from lenspool.errors import PoolUnavailable
from lenspool.guard import refuse_open_redis
from lenspool.link import NO_ANSWER, connections, without_password

_ANSWER_S = 5.0
_SLOW_MS = 50.0
_CLOCKS_S = 60.0
_OLDEST = (6, 2)
"""LMOVE and ZMSCORE came with 6.2."""


async def check_broker(url: str) -> list[Finding]:
    """Is it reachable, of a version that can do what is needed, closed to strangers, and set to keep what it has?"""
    try:
        async with asyncio.timeout(_ANSWER_S), redis.asyncio.Redis(connection_pool=connections(url, 1)) as server:
            await server.ping()
            began = time.perf_counter()
            seconds, micros = await server.time()
            milliseconds = 1e3 * (time.perf_counter() - began)
            ahead = seconds + micros / 1e6 - time.time()
            try:
                told = await server.info()
            except redis.exceptions.NoPermissionError:
                told = {}
    except ValueError as error:
        return [Finding("redis", "error", f"{without_password(url)}: {error}", "write it as redis://HOST:6379")]
    except NO_ANSWER as error:
        reason = str(error) or type(error).__name__
        if any(word in reason.lower() for word in ("auth", "password")):  # redis-py counts it as a lost connection
            advice = "put user and password into the URL: redis://USER:PASSWORD@HOST:6379"
            return [Finding("redis", "error", f"{without_password(url)} refuses this client: {reason}", advice)]
        advice = "start it (`lenspool up --model DIR` brings one), or set LENSPOOL_REDIS to the URL of yours"
        return [Finding("redis", "error", f"{without_password(url)} cannot be reached: {reason}", advice)]
    except redis.exceptions.RedisError as error:
        return [Finding("redis", "error", f"{without_password(url)} refuses: {error}", "see the server's log")]
    slow = milliseconds > _SLOW_MS
    reached = f"{without_password(url)} answers in {milliseconds:.1f} ms"
    found = [Finding("redis", "note" if slow else "ok", reached, "each call waits for it some times" if slow else "")]
    if abs(ahead) > _CLOCKS_S:
        said = f"the server's clock is {ahead:+.0f} s from this machine's"
        found.append(Finding("redis clock", "warning", said, "set the clocks by NTP: above 600 s workers are not seen"))
    if not told:
        said = "this user may not ask for version and memory (INFO)"
        found.append(Finding("redis version", "note", said, "run doctor with the worker's URL to see them"))
    else:
        found += [_version(told), *_memory(told)]
    return [*found, await _strangers(url)]


def _version(told: Mapping[str, Any]) -> Finding:
    server = str(told.get("server_name", "redis"))
    version = str(told.get("valkey_version") or told.get("redis_version", ""))
    # a Valkey says of itself which Redis it can stand for
    numbers = tuple(int(part) for part in re.findall(r"\d+", str(told.get("redis_version", "")))[:2])
    if numbers < _OLDEST:
        return Finding("redis version", "error", f"{server} {version}", "use Valkey, or Redis 6.2 or later")
    return Finding("redis version", "ok", f"{server} {version}")


def _memory(told: Mapping[str, Any]) -> list[Finding]:
    policy, limit = str(told.get("maxmemory_policy", "")), int(told.get("maxmemory", 0))
    used = int(told.get("used_memory", 0))
    found = []
    if policy and policy != "noeviction":
        state = "error" if limit else "warning"
        advice = "CONFIG SET maxmemory-policy noeviction: a full server is to refuse jobs, not to lose some"
        found.append(Finding("redis memory", state, f"maxmemory-policy is {policy}", advice))  # type: ignore[arg-type]
    if limit and used > 0.8 * limit:
        said = f"{used / 2**20:.0f} of {limit / 2**20:.0f} MiB are used"
        found.append(Finding("redis memory", "warning", said, "raise maxmemory: a full server refuses jobs"))
    if not limit:
        advice = "set maxmemory (100,000 waiting jobs take about 135 MiB): else the machine's memory is the limit"
        found.append(Finding("redis memory", "note", f"{used / 2**20:.0f} MiB are used, without a limit", advice))
    if not found:
        found.append(Finding("redis memory", "ok", f"{used / 2**20:.0f} of {limit / 2**20:.0f} MiB, {policy}"))
    return found


async def _strangers(url: str) -> Finding:
    try:
        await asyncio.to_thread(refuse_open_redis, url)
    except PoolUnavailable:
        advice = "set a password (docs/deploy.md): whoever writes to it can forge results; workers refuse such a server"
        return Finding("redis access", "warning", "a server on the network that asks no password", advice)
    return Finding("redis access", "ok", "strangers on the network cannot write jobs")
