"""What must happen at once in Redis, as Lua. Every script may be repeated after a lost reply."""

from __future__ import annotations

SUBMIT = """
-- One job per id: join it, take its result, or (re)place it.
-- KEYS = job, queue, rq:queues, waiters, results, failed, canceled, finished
-- ARGV = job id, client id, fresh, waiters' ttl, field, value, ...
local state = redis.pcall('HGET', KEYS[1], 'status')
if type(state) == 'table' then redis.call('DEL', KEYS[1]); state = false end
if (state == 'queued' or state == 'started') and redis.call('HEXISTS', KEYS[1], 'data') == 1 then
  redis.call('SADD', KEYS[4], ARGV[2])
  redis.call('EXPIRE', KEYS[4], ARGV[4])
  redis.call('HDEL', KEYS[1], 'abandoned')
  return {'joined'}
end
if state == 'finished' and ARGV[3] == '0' then
  local last = redis.call('XREVRANGE', KEYS[5], '+', '-', 'COUNT', 1)
  if #last > 0 then return {'hit', last[1][2]} end
end
if redis.call('EXISTS', KEYS[1], KEYS[5]) > 0 then
  redis.call('DEL', KEYS[1], KEYS[5])
  for i = 6, 8 do redis.call('ZREM', KEYS[i], ARGV[1]) end
end
-- the first write of a new job: a full Redis refuses a script only here
redis.call('HSET', KEYS[1], unpack(ARGV, 5))
redis.call('SADD', KEYS[3], KEYS[2])
redis.call('SADD', KEYS[4], ARGV[2])
redis.call('EXPIRE', KEYS[4], ARGV[4])
redis.call('RPUSH', KEYS[2], ARGV[1])
return {'new'}
"""

CANCEL = """
-- A client waits no more; the last one out cancels the job.
-- KEYS = job, waiters, canceled, queues...
-- ARGV = job id, client id, ttl, prefix of the workers' command channels
redis.call('SREM', KEYS[2], ARGV[2])
if redis.call('SCARD', KEYS[2]) > 0 then return 'left' end
local state = redis.call('HGET', KEYS[1], 'status')
if state == 'queued' then
  for i = 4, #KEYS do redis.call('LREM', KEYS[i], 1, ARGV[1]) end
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

NOTIFY = """
-- Tell every waiter how a job ended. Runs in the transaction that ends it.
-- KEYS = waiters; ARGV = prefix of the done streams, their ttl, job id, state, payload
local clients = redis.call('SMEMBERS', KEYS[1])
for _, client in ipairs(clients) do
  local stream = ARGV[1] .. client
  redis.call('XADD', stream, 'MAXLEN', '~', 50000, '*', 'id', ARGV[3], 'state', ARGV[4], 'payload', ARGV[5])
  redis.call('EXPIRE', stream, ARGV[2])
end
redis.call('DEL', KEYS[1])
return #clients
"""

CLAIM = """
-- Take jobs: each id goes to rq's intermediate list and its status from queued to started at once, so that neither a
-- crash nor a cancellation can fall between. Jobs that lost a worker move to queues of their own first.
-- KEYS = queue, suspects, alone, intermediate, rq:queues
-- ARGV = how many, how many suspects, worker is idle, job key prefix, worker name, bytes per job, bytes in all
local jobs, bytes = {}, 0
local function set_aside(queue, id)
  redis.call('RPUSH', queue, id)
  redis.call('SADD', KEYS[5], queue)
end
local function size_of(key)
  if redis.call('HLEN', key) > 64 then return 1 / 0 end
  local size = 0
  for _, field in ipairs(redis.call('HKEYS', key)) do size = size + redis.call('HSTRLEN', key, field) end
  return size
end
local function take(queue, count)
  local taken = 0
  while taken < count and bytes < tonumber(ARGV[7]) do
    local id = redis.call('LMOVE', queue, KEYS[4], 'LEFT', 'LEFT')
    if not id then break end
    local key = ARGV[4] .. id
    local job = redis.pcall('HMGET', key, 'status', 'retries_left')
    local fit = string.match(id, '^[%w_-]+$') and not job.err and job[1] == 'queued'
    if fit and queue == KEYS[1] and job[2] == '0' then
      set_aside(KEYS[3], id); fit = false
    elseif fit and queue == KEYS[1] and job[2] == '1' then
      set_aside(KEYS[2], id); fit = false
    end
    if fit then
      redis.call('HSET', key, 'status', 'started', 'worker_name', ARGV[5])
      local size = size_of(key)
      local fields = {}
      if size <= tonumber(ARGV[6]) then fields = redis.call('HGETALL', key); bytes = bytes + size end
      jobs[#jobs + 1] = {id, fields}
      taken = taken + 1
    else
      redis.call('LREM', KEYS[4], 1, id)  -- set aside, cancelled, pushed twice, or no job at all
    end
  end
  return taken
end
local free, suspects = tonumber(ARGV[1]), tonumber(ARGV[2])
if ARGV[3] == '1' and take(KEYS[3], 1) == 1 then return {'alone', 0, jobs} end
if redis.call('LLEN', KEYS[3]) == 0 then  -- else the worker is to run empty for the next of them
  local old = take(KEYS[2], math.min(free, suspects))
  free, suspects = free - old, suspects - old
  free = free - take(KEYS[1], free)
  take(KEYS[2], math.min(free, suspects))  -- what was set aside just now
end
return {'crowd', redis.call('LLEN', KEYS[3]), jobs}
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
