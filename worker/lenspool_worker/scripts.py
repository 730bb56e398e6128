"""What a worker must do at once in Redis, as Lua: take jobs, and end them. Both may be repeated after a lost reply.

They write what rq's own worker writes when it starts a job and when one has succeeded, many jobs in one call;
`tests/queue/test_rq_keys.py` compares the two. All other ends of jobs are written by rq's code.
"""

from __future__ import annotations

from lenspool.scripts import TELL

CLAIM = """
-- Take jobs: out of a queue and into rq's registry of started jobs at once, so that neither a crash nor a cancellation
-- can fall between. Jobs that come back are first; those that lost a worker move to queues of their own before. Then
-- the clients' queues take turns (start-time fair queueing): each job moves its queue back by the cost of its lane, and
-- a queue that comes up is never behind the turn, so that nobody saves up turns. A limit per client holds for the pool:
-- each worker says how many jobs of which clients it has.
-- KEYS = queue, suspects, alone, rq:queues, ring, turn, rq:suspended, who has how many jobs of whom, started jobs,
--        worker, its executions
-- ARGV = how many, how many suspects, worker is idle, bytes per job, bytes in all, how many in the batch lane,
--        most per client (0: any), cost of an interactive and of a batch job, worker name, lease, unix time, its
--        second, time as rq writes it, first part of the executions' ids, whether these ids were used before and nobody
--        heard, prefixes of jobs, of executions, of jobs' executions and of cards, ttl of what is said of clients,
--        client, its jobs in this worker, ...
local free, suspects, name, lease = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[10], tonumber(ARGV[11])
local moment, second, stamp, ids = ARGV[12], tonumber(ARGV[13]), ARGV[14], ARGV[15]
local jobs, bytes, most_bytes = {}, 0, tonumber(ARGV[5])
local server_time = tonumber(redis.call('TIME')[1])
local function fields_of(key)
  -- nothing of a hash that is too large
  if redis.call('HLEN', key) > 64 then return {} end
  local fields, size = redis.call('HGETALL', key), 0
  for _, part in ipairs(fields) do size = size + #part end
  if size > tonumber(ARGV[4]) then return {} end
  bytes = bytes + size
  return fields
end
local function start(id, key)
  local execution = ids .. string.format('%08x', #jobs)
  local member = id .. ':' .. execution
  redis.call('HSET', key, 'status', 'started', 'worker_name', name, 'started_at', stamp, 'last_heartbeat', stamp)
  redis.call('HDEL', key, 'expires')  -- a job that comes back has been started in time
  redis.call('PERSIST', key)
  redis.call('HSET', ARGV[18] .. member, 'id', execution, 'job_id', id, 'created_at', moment,
    'last_heartbeat', moment, 'worker_name', name)
  redis.call('EXPIRE', ARGV[18] .. member, lease)
  redis.call('ZADD', ARGV[19] .. id, second + lease + 60, execution)
  redis.call('EXPIRE', ARGV[19] .. id, lease + 60)
  redis.call('ZADD', KEYS[9], second + lease, member)
  redis.call('SADD', KEYS[11], member)
  return execution
end
local function set_aside(queue, id)
  redis.call('RPUSH', queue, id)
  redis.call('SADD', KEYS[4], queue)
end
local function take(queue, count)
  local taken = 0
  while taken < count and bytes < most_bytes do
    local id = redis.pcall('LPOP', queue)
    if type(id) ~= 'string' then break end
    local key = ARGV[17] .. id
    local job = redis.pcall('HMGET', key, 'status', 'retries_left', 'expires')
    -- any other is cancelled, was pushed twice, or is no job at all
    if string.match(id, '^[%w_-]+$') and not job.err and job[1] == 'queued' then
      if queue == KEYS[1] and job[2] == '0' then
        set_aside(KEYS[3], id)
      elseif queue == KEYS[1] and job[2] == '1' then
        set_aside(KEYS[2], id)
      else
        local fields = fields_of(key)
        jobs[#jobs + 1] = {id, start(id, key), fields, server_time > (tonumber(job[3]) or 1 / 0) and 1 or 0}
        taken = taken + 1
      end
    end
  end
  return taken
end
local function jobs_elsewhere()
  local counts, said = {}, redis.call('HGETALL', KEYS[8])
  for i = 1, #said, 2 do
    local _, theirs = pcall(cjson.decode, said[i + 1])
    if redis.call('EXISTS', ARGV[20] .. said[i]) == 0 or type(theirs) ~= 'table' then
      redis.call('HDEL', KEYS[8], said[i])
    elseif said[i] ~= name then
      for client, count in pairs(theirs) do counts[client] = (counts[client] or 0) + (tonumber(count) or 0) end
    end
  end
  return counts
end
local function take_in_turns(count)
  local batch, most = tonumber(ARGV[6]), tonumber(ARGV[7])
  local cost, mine, theirs = {interactive = tonumber(ARGV[8]), batch = tonumber(ARGV[9])}, {}, {}
  for i = 22, #ARGV, 2 do mine[ARGV[i]] = tonumber(ARGV[i + 1]) end
  local limited = most > 0
  if limited then theirs = jobs_elsewhere() end
  local turn = tonumber(redis.call('GET', KEYS[6]) or 0)
  local passed, taken = 0, 0
  while taken < count and bytes < most_bytes do
    local head = redis.call('ZRANGE', KEYS[5], passed, passed, 'WITHSCORES')
    if #head == 0 then break end
    local queue, at = head[1], math.max(tonumber(head[2]), turn)
    local lane, client = string.match(queue, ':(%a+):([%w_-]+)$')
    local busy = limited and cost[lane] and (mine[client] or 0) + (theirs[client] or 0) >= most
    if busy or (lane == 'batch' and batch <= 0) then
      passed = passed + 1
    elseif not cost[lane] or take(queue, 1) == 0 then  -- empty: its turn is over
      redis.call('ZREM', KEYS[5], queue)
      redis.call('SREM', KEYS[4], queue)
    else
      taken, turn, mine[client] = taken + 1, at, (mine[client] or 0) + 1
      if lane == 'batch' then batch = batch - 1 end
      redis.call('ZADD', KEYS[5], at + cost[lane], queue)
    end
  end
  if redis.call('EXISTS', KEYS[5]) == 1 then redis.call('SET', KEYS[6], turn) else redis.call('DEL', KEYS[6]) end
  if limited then
    redis.call('HSET', KEYS[8], name, cjson.encode(mine))
    redis.call('EXPIRE', KEYS[8], ARGV[21])
  end
end
local function taken_unheard()
  local alone = false
  for _, member in ipairs(redis.call('SMEMBERS', KEYS[11])) do
    local id, execution = string.match(member, '^(.-):(.+)$')
    if execution and string.sub(execution, 1, #ids) == ids and redis.call('ZSCORE', KEYS[9], member) then
      jobs[#jobs + 1] = {id, execution, fields_of(ARGV[17] .. id), 0}
      alone = alone or redis.call('HGET', ARGV[17] .. id, 'retries_left') == '0'
    end
  end
  return alone
end
local function all()
  if ARGV[16] == '1' then
    local alone = taken_unheard()
    if #jobs > 0 then return alone and 'alone' or 'crowd' end
  end
  if redis.call('EXISTS', KEYS[7]) == 1 then return 'suspended' end
  if ARGV[3] == '1' and take(KEYS[3], 1) == 1 then return 'alone' end
  if redis.call('LLEN', KEYS[3]) == 0 then  -- else the worker is to run empty for the next of them
    local old = take(KEYS[2], math.min(free, suspects))
    free, suspects = free - old, suspects - old
    free = free - take(KEYS[1], free)
    free = free - take(KEYS[2], math.min(free, suspects))
    take_in_turns(free)
  end
  return 'crowd'
end
local kind = all()
if #jobs > 0 then
  redis.call('EXPIRE', KEYS[11], lease + 60)
  redis.call('HSET', KEYS[10], 'state', 'busy')
end
return {kind, redis.call('LLEN', KEYS[3]), jobs}
"""

COMMIT = f"""
-- End runs that succeeded, unless a job is not this worker's any more (it stalled beyond its lease), or unknown: Redis
-- came back empty.
-- KEYS = started jobs, finished jobs, worker, its executions
-- ARGV = worker name, ttl of results and of the done streams, unix time in seconds, whether the worker has no other
--        jobs, prefixes of jobs, of executions, of jobs' executions, of results, of waiters and of done streams,
--        then of each job: id, execution, end as rq writes it, unix times of start and end, value in base64, value
{TELL}
local name, ttl = ARGV[1], tonumber(ARGV[2])
local worked, succeeded = 0, 0
local function drop(id, execution, member)
  redis.call('DEL', ARGV[7] .. member)
  redis.call('ZREM', ARGV[8] .. id, execution)
  redis.call('SREM', KEYS[4], member)
end
local function commit(id, execution, ended, from, till, coded, value)
  local key, member, results = ARGV[6] .. id, id .. ':' .. execution, ARGV[9] .. id
  local job = redis.call('HMGET', key, 'status', 'worker_name', 'origin')
  if not job[3] then return 'unknown' end
  drop(id, execution, member)
  if redis.call('ZREM', KEYS[1], member) == 0 then
    -- this very commit may have been made, and its reply lost
    return job[1] == 'finished' and job[2] == name and 'committed' or 'lost'
  end
  redis.call('HSET', key, 'status', 'finished', 'ended_at', ended)
  redis.call('HDEL', key, 'abandoned')
  redis.call('EXPIRE', key, ttl)
  redis.call('XADD', results, 'MAXLEN', '~', 10, '*', 'type', 1, 'worker_name', name, 'return_value', coded,
    'execution_id', execution, 'execution_started_at', from, 'execution_ended_at', till)
  redis.call('EXPIRE', results, ttl)
  redis.call('ZADD', KEYS[2], tonumber(ARGV[4]) + ttl, id)
  tell(ARGV[10] .. id, ARGV[11], ARGV[3], id, 'finished', value)
  worked, succeeded = worked + (till - from), succeeded + 1
  return 'committed'
end
local ends = {{}}
for i = 12, #ARGV, 7 do ends[#ends + 1] = commit(unpack(ARGV, i, i + 6)) end
redis.call('HINCRBY', KEYS[3], 'successful_job_count', succeeded)
redis.call('HINCRBYFLOAT', KEYS[3], 'total_working_time', worked)
if ARGV[5] == '1' then redis.call('HSET', KEYS[3], 'state', 'idle') end
return ends
"""
