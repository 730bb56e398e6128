"""What must happen at once in Redis, as Lua. Every script may be repeated after a lost reply."""

from __future__ import annotations

SUBMIT = """
-- One job per id: join it, take its result, or (re)place it.
-- KEYS = job, rq:queues, waiters, results, failed, canceled, finished, client's queue, ring, turn, queued
-- ARGV = job id, waiter, fresh, waiters' ttl, lane, client, seconds in the queue (0: any, -1: as it is), channel,
--        limits (a key that clients may only read, and so none of KEYS), field, value, ...
local id, lane, client, patience, mine = ARGV[1], ARGV[5], ARGV[6], tonumber(ARGV[7]), KEYS[8]
local function wait_here()
  redis.call('HSET', KEYS[1], 'lane', lane, 'client', client, 'place', mine)
  redis.call('SADD', KEYS[2], mine)
  redis.call('ZADD', KEYS[9], 'NX', redis.call('GET', KEYS[10]) or 0, mine)
  if redis.call('RPUSH', mine, id) == 1 then redis.call('PUBLISH', ARGV[8], 1) end
end
local function wait_until()
  local now = redis.call('TIME')
  return now[1] + patience
end
local function sooner(place, other)
  -- whether the job would run sooner in this client's queue; a long queue is not worth the search
  if place == mine or not place then return false end
  if lane ~= other then return lane == 'interactive' end
  local length = redis.call('LLEN', mine)
  local position = length < 64 and redis.call('LPOS', place, id)
  return position and position > length
end
local function full()
  local limits = redis.call('HMGET', ARGV[9], 'client', 'model')
  local most = tonumber(limits[1]) or 1 / 0
  if redis.call('LLEN', mine) >= most then return {'full', most, 'client'} end
  most = tonumber(limits[2]) or 1 / 0
  if tonumber(redis.call('GET', KEYS[11]) or 0) < most then return false end
  local queued = 0
  for _, queue in ipairs(redis.call('ZRANGE', KEYS[9], 0, -1)) do queued = queued + redis.call('LLEN', queue) end
  redis.call('SET', KEYS[11], queued, 'EX', ARGV[4])
  return queued >= most and {'full', most, 'model'}
end
local state = redis.pcall('HGET', KEYS[1], 'status')
if type(state) == 'table' then redis.call('DEL', KEYS[1]); state = false end
if (state == 'queued' or state == 'started') and redis.call('HEXISTS', KEYS[1], 'data') == 1 then
  redis.call('SADD', KEYS[3], ARGV[2])
  redis.call('EXPIRE', KEYS[3], ARGV[4])
  redis.call('HDEL', KEYS[1], 'abandoned')
  if state == 'queued' then
    local job = redis.call('HMGET', KEYS[1], 'place', 'lane', 'expires')
    if patience == 0 then
      redis.call('HDEL', KEYS[1], 'expires')
    elseif patience > 0 and job[3] and wait_until() > tonumber(job[3]) then
      redis.call('HSET', KEYS[1], 'expires', wait_until(), 'queue_timeout', ARGV[7])
    end
    if sooner(job[1], job[2]) and redis.call('LREM', job[1], 1, id) == 1 then wait_here() end
  end
  return {'joined'}
end
if state == 'finished' and ARGV[3] == '0' then
  local last = redis.call('XREVRANGE', KEYS[4], '+', '-', 'COUNT', 1)
  if #last > 0 then return {'hit', last[1][2]} end
end
local refusal = full()
if refusal then return refusal end
if redis.call('EXISTS', KEYS[1], KEYS[4]) > 0 then
  redis.call('DEL', KEYS[1], KEYS[4])
  for i = 5, 7 do redis.call('ZREM', KEYS[i], id) end
end
-- the first write of a new job: a full Redis refuses a script only here
redis.call('HSET', KEYS[1], unpack(ARGV, 10))
if patience > 0 then redis.call('HSET', KEYS[1], 'expires', wait_until(), 'queue_timeout', ARGV[7]) end
redis.call('SADD', KEYS[3], ARGV[2])
redis.call('EXPIRE', KEYS[3], ARGV[4])
redis.call('INCR', KEYS[11])
redis.call('EXPIRE', KEYS[11], ARGV[4])
wait_here()
return {'new'}
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

NOTIFY = """
-- Tell every waiter how a job ended. Runs in the transaction that ends it.
-- KEYS = waiters; ARGV = prefix of the done streams, their ttl, job id, state, payload
local clients = redis.call('SMEMBERS', KEYS[1])
for _, client in ipairs(clients) do
  if client ~= 'kept' then
    local stream = ARGV[1] .. client
    redis.call('XADD', stream, 'MAXLEN', '~', 50000, '*', 'id', ARGV[3], 'state', ARGV[4], 'payload', ARGV[5])
    redis.call('EXPIRE', stream, ARGV[2])
  end
end
redis.call('DEL', KEYS[1])
return #clients
"""

CLAIM = """
-- Take jobs: each id goes to rq's intermediate list and its status from queued to started at once, so that neither a
-- crash nor a cancellation can fall between. Jobs that come back are first; those that lost a worker move to queues of
-- their own before. Then the clients' queues take turns (start-time fair queueing): each job moves its queue back by
-- the cost of its lane, and a queue that comes up is never behind the turn, so that nobody saves up turns.
-- A limit per client holds for the pool: each worker says how many jobs of which clients it has.
-- KEYS = queue, suspects, alone, intermediate, rq:queues, ring, turn, rq:suspended, who has how many jobs of whom
-- ARGV = how many, how many suspects, worker is idle, job key prefix, worker name, bytes per job, bytes in all,
--        how many in the batch lane, most per client (0: any), cost of an interactive and of a batch job,
--        prefix of cards, ttl of what is said of clients, client, its jobs in this worker, ...
if redis.call('EXISTS', KEYS[8]) == 1 then return {'suspended', 0, {}} end
local jobs, bytes = {}, 0
local now = tonumber(redis.call('TIME')[1])
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
    local id = redis.pcall('LMOVE', queue, KEYS[4], 'LEFT', 'LEFT')
    if type(id) ~= 'string' then break end
    local key = ARGV[4] .. id
    local job = redis.pcall('HMGET', key, 'status', 'retries_left', 'expires')
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
      local late = now > (tonumber(job[3]) or 1 / 0)
      redis.call('HDEL', key, 'expires')  -- a job that comes back has been started in time
      jobs[#jobs + 1] = {id, fields, late and 1 or 0}
      taken = taken + 1
    else
      redis.call('LREM', KEYS[4], 1, id)  -- set aside, cancelled, pushed twice, or no job at all
    end
  end
  return taken
end
local function jobs_elsewhere()
  local counts, said = {}, redis.call('HGETALL', KEYS[9])
  for i = 1, #said, 2 do
    local _, theirs = pcall(cjson.decode, said[i + 1])
    if redis.call('EXISTS', ARGV[12] .. said[i]) == 0 or type(theirs) ~= 'table' then
      redis.call('HDEL', KEYS[9], said[i])
    elseif said[i] ~= ARGV[5] then
      for client, count in pairs(theirs) do counts[client] = (counts[client] or 0) + (tonumber(count) or 0) end
    end
  end
  return counts
end
local function take_in_turns(count)
  local batch, most = tonumber(ARGV[8]), tonumber(ARGV[9])
  local cost, mine, theirs = {interactive = tonumber(ARGV[10]), batch = tonumber(ARGV[11])}, {}, {}
  for i = 14, #ARGV, 2 do mine[ARGV[i]] = tonumber(ARGV[i + 1]) end
  local limited = most > 0
  if limited then theirs = jobs_elsewhere() end
  local turn = tonumber(redis.call('GET', KEYS[7]) or 0)
  local passed, taken = 0, 0
  while taken < count and bytes < tonumber(ARGV[7]) do
    local head = redis.call('ZRANGE', KEYS[6], passed, passed, 'WITHSCORES')
    if #head == 0 then break end
    local queue, at = head[1], math.max(tonumber(head[2]), turn)
    local lane, client = string.match(queue, ':(%a+):([%w_-]+)$')
    local busy = limited and cost[lane] and (mine[client] or 0) + (theirs[client] or 0) >= most
    if busy or (lane == 'batch' and batch <= 0) then
      passed = passed + 1
    elseif not cost[lane] or take(queue, 1) == 0 then  -- empty: its turn is over
      redis.call('ZREM', KEYS[6], queue)
      redis.call('SREM', KEYS[5], queue)
    else
      taken, turn, mine[client] = taken + 1, at, (mine[client] or 0) + 1
      if lane == 'batch' then batch = batch - 1 end
      redis.call('ZADD', KEYS[6], at + cost[lane], queue)
    end
  end
  if redis.call('EXISTS', KEYS[6]) == 1 then redis.call('SET', KEYS[7], turn) else redis.call('DEL', KEYS[7]) end
  if limited then
    redis.call('HSET', KEYS[9], ARGV[5], cjson.encode(mine))
    redis.call('EXPIRE', KEYS[9], ARGV[13])
  end
end
local free, suspects = tonumber(ARGV[1]), tonumber(ARGV[2])
if ARGV[3] == '1' and take(KEYS[3], 1) == 1 then return {'alone', 0, jobs} end
if redis.call('LLEN', KEYS[3]) == 0 then  -- else the worker is to run empty for the next of them
  local old = take(KEYS[2], math.min(free, suspects))
  free, suspects = free - old, suspects - old
  free = free - take(KEYS[1], free)
  local set_aside_now = take(KEYS[2], math.min(free, suspects))
  take_in_turns(free - set_aside_now)
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
