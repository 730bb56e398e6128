"""What must happen at once in Redis, as Lua. Every script may be repeated after a lost reply."""

from __future__ import annotations

SUBMIT = """
-- Jobs of one client that wait on the same terms. One job per id: join it, take its result, or (re)place it.
-- KEYS = rq:queues, failed, canceled, finished, client's queue, ring, turn, queued
-- ARGV = waiter, waiters' ttl, lane, client, seconds in the queue (0: any, -1: as it is), channel, limits (a key that
--        clients may only read, and so none of KEYS), prefixes of jobs, of waiters and of results, number of fields,
--        field, value, ..., then of each job: id, fresh, data, trace
local waiter, ttl, lane, client, patience = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local mine, ring, queued = KEYS[5], KEYS[6], KEYS[8]
local clock = redis.call('TIME')
local until_then = clock[1] + patience
local limits = redis.call('HMGET', ARGV[7], 'client', 'model')
local most_of_client, most = tonumber(limits[1]) or 1 / 0, tonumber(limits[2]) or 1 / 0
local first = 12 + 2 * tonumber(ARGV[11])
local fields = {'lane', lane, 'client', client, 'place', mine}
for i = 12, first - 1 do fields[#fields + 1] = ARGV[i] end
if patience > 0 then
  for _, value in ipairs({'expires', until_then, 'queue_timeout', ARGV[5]}) do fields[#fields + 1] = value end
end
local listed = false
local function wait_here(id)
  if not listed then
    redis.call('SADD', KEYS[1], mine)
    redis.call('ZADD', ring, 'NX', redis.call('GET', KEYS[7]) or 0, mine)
    listed = true
  end
  if redis.call('RPUSH', mine, id) == 1 then redis.call('PUBLISH', ARGV[6], 1) end
end
local function sooner(id, place, other)
  -- whether the job would run sooner in this client's queue; a long queue is not worth the search
  if place == mine or not place then return false end
  if lane ~= other then return lane == 'interactive' end
  local length = redis.call('LLEN', mine)
  local position = length < 64 and redis.call('LPOS', place, id)
  return position and position > length
end
local function full()
  if redis.call('LLEN', mine) >= most_of_client then return {'full', most_of_client, 'client'} end
  if tonumber(redis.call('GET', queued) or 0) < most then return false end
  local count = 0
  for _, queue in ipairs(redis.call('ZRANGE', ring, 0, -1)) do count = count + redis.call('LLEN', queue) end
  redis.call('SET', queued, count, 'EX', ttl)
  return count >= most and {'full', most, 'model'}
end
local function submit(id, fresh, data, trace)
  local key, waiters, results = ARGV[8] .. id, ARGV[9] .. id, ARGV[10] .. id
  local state = redis.pcall('HGET', key, 'status')
  if type(state) == 'table' then redis.call('DEL', key); state = false end
  if (state == 'queued' or state == 'started') and redis.call('HEXISTS', key, 'data') == 1 then
    redis.call('SADD', waiters, waiter)
    redis.call('EXPIRE', waiters, ttl)
    redis.call('HDEL', key, 'abandoned')
    if state == 'queued' then
      local job = redis.call('HMGET', key, 'place', 'lane', 'expires')
      if patience == 0 then
        redis.call('HDEL', key, 'expires')
      elseif patience > 0 and job[3] and until_then > tonumber(job[3]) then
        redis.call('HSET', key, 'expires', until_then, 'queue_timeout', ARGV[5])
      end
      if sooner(id, job[1], job[2]) and redis.call('LREM', job[1], 1, id) == 1 then
        redis.call('HSET', key, 'lane', lane, 'client', client, 'place', mine)
        wait_here(id)
      end
    end
    return {'joined'}
  end
  if state == 'finished' and fresh == '0' then
    local last = redis.call('XREVRANGE', results, '+', '-', 'COUNT', 1)
    if #last > 0 then return {'hit', last[1][2]} end
  end
  local refusal = full()
  if refusal then return refusal end
  if redis.call('EXISTS', key, results) > 0 then
    redis.call('DEL', key, results)
    for i = 2, 4 do redis.call('ZREM', KEYS[i], id) end
  end
  -- the first write of a new job: a full Redis refuses a script only at its first
  redis.call('HSET', key, 'data', data, unpack(fields))
  if trace ~= '' then redis.call('HSET', key, 'traceparent', trace) end
  redis.call('SADD', waiters, waiter)
  redis.call('EXPIRE', waiters, ttl)
  redis.call('INCR', queued)
  redis.call('EXPIRE', queued, ttl)
  wait_here(id)
  return {'new'}
end
local replies = {}
for i = first, #ARGV, 4 do
  local fine, reply = pcall(submit, ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3])
  replies[#replies + 1] = fine and reply or {'error', type(reply) == 'table' and reply.err or tostring(reply)}
end
return replies
"""

CANCEL = """
-- A client waits no more; the last one out cancels the job.
-- KEYS = job, waiters, canceled, ring, rq:queues, queues of returned jobs...
-- ARGV = job id, client id, ttl, prefix of the workers' command channels
redis.call('SREM', KEYS[2], ARGV[2])
if redis.call('SCARD', KEYS[2]) > 0 then return 'left' end
local state = redis.call('HGET', KEYS[1], 'status')
if state == 'queued' then
  local place = redis.call('HGET', KEYS[1], 'place')
  if place and redis.call('LREM', place, 1, ARGV[1]) == 1 and redis.call('EXISTS', place) == 0 then
    redis.call('ZREM', KEYS[4], place)
    redis.call('SREM', KEYS[5], place)
  end
  for i = 6, #KEYS do redis.call('LREM', KEYS[i], 1, ARGV[1]) end
  redis.call('HSET', KEYS[1], 'status', 'canceled')
  redis.call('EXPIRE', KEYS[1], ARGV[3])
  local now = redis.call('TIME')[1]
  redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now - ARGV[3])
  redis.call('ZADD', KEYS[3], now, ARGV[1])
  return 'canceled'
elseif state == 'started' then
  -- the mark is for a worker that misses the message
  redis.call('HSET', KEYS[1], 'abandoned', 1)
  local worker = redis.call('HGET', KEYS[1], 'worker_name') or ''
  redis.call('PUBLISH', ARGV[4] .. worker, cjson.encode({command='stop-job', job_id=ARGV[1], abandoned=true}))
  return 'stopping'
end
return 'over'
"""

TELL = """
local function tell(waiters, prefix, ttl, id, state, payload)
  local clients = redis.call('SMEMBERS', waiters)
  for _, client in ipairs(clients) do
    if client ~= 'kept' then
      local stream = prefix .. client
      redis.call('XADD', stream, 'MAXLEN', '~', 50000, '*', 'id', id, 'state', state, 'payload', payload)
      redis.call('EXPIRE', stream, ttl)
    end
  end
  redis.call('DEL', waiters)
end
"""

NOTIFY = f"""
-- Tell every waiter how a job ended. Runs in the transaction that ends it.
-- KEYS = waiters; ARGV = prefix of the done streams, their ttl, job id, state, payload
{TELL}
tell(KEYS[1], unpack(ARGV))
"""

SWEEP = """
-- Which of these jobs are neither queued nor running? ARGV = job key prefix, result key prefix, id, ...
local ended = {}
for i = 3, #ARGV do
  local job = redis.pcall('HMGET', ARGV[1] .. ARGV[i], 'status', 'abandoned')
  local state = not job.err and job[1] or ''
  if state ~= 'queued' and state ~= 'started' then
    local last = redis.call('XREVRANGE', ARGV[2] .. ARGV[i], '+', '-', 'COUNT', 1)
    ended[#ended + 1] = {ARGV[i], state, job[2] or '', last[1] and last[1][2] or {}}
  end
end
return ended
"""
