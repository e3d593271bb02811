"""What Redis does in one step each: admit a request to all its accounts or none, settle it, give back lost keys.

An account is a hash: buckets (`req`, `tok`, `at`), the budget's period (`period`, `spent`), and for every gateway how
many requests it has there (`a:GATEWAY`) and how many tokens are reserved for them (`r:GATEWAY`). Gateways stand in a
sorted set with the time until which they count as alive; what a dead one held is dropped by whoever looks next. Time is
Redis' own. The rules are those of limits.Account; what one has to say about the other is in their tests.

ARGV, both: gateway, its time to live, ..., then for each account
    requests a minute, tokens a minute, concurrency, budget, its period's length, ...
"""

from __future__ import annotations

_HEAD = """
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
redis.call('ZADD', KEYS[1], now + tonumber(ARGV[2]), ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
local live, num_live = {}, 0
for _, name in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do live[name] = true; num_live = num_live + 1 end

local function read(key, rpm, tpm, budget, period_s)
  local flat, hash = redis.call('HGETALL', key), {}
  for j = 1, #flat, 2 do hash[flat[j]] = flat[j + 1] end
  local passed = math.max(0, now - tonumber(hash.at or now))
  local account = {active = 0, reserved = 0, spent = 0, period = 0}
  account.req = math.min(rpm, tonumber(hash.req or rpm) + passed * rpm / 60)
  account.tok = math.min(tpm, tonumber(hash.tok or tpm) + passed * tpm / 60)
  for field, value in pairs(hash) do
    local kind, name = string.match(field, '^([ar]):(.+)$')
    if kind and not live[name] then redis.call('HDEL', key, field)
    elseif kind == 'a' then account.active = account.active + tonumber(value)
    elseif kind == 'r' then account.reserved = account.reserved + tonumber(value) end
  end
  if period_s > 0 then account.period = math.floor(now / period_s) end
  if budget > 0 and tonumber(hash.period or -1) == account.period then account.spent = tonumber(hash.spent or 0) end
  return account
end

local function write(key, account, rpm, tpm, budget, period_s)
  redis.call('HSET', key, 'at', string.format('%.6f', now))
  for field, level in pairs({req = rpm > 0 and account.req, tok = tpm > 0 and account.tok}) do
    if level then redis.call('HSET', key, field, string.format('%.6f', level)) else redis.call('HDEL', key, field) end
  end
  if budget > 0 then redis.call('HSET', key, 'period', account.period, 'spent', account.spent) end
  if budget > 0 and period_s == 0 then redis.call('PERSIST', key)
  else redis.call('EXPIRE', key, math.max(3600, budget > 0 and period_s + 3600 or 0)) end
end
"""

# ARGV[3]: tokens wanted; for each account also its period and what this gateway knows to be spent in it, should Redis
# have lost its data. Returns the number of live gateways, the refusing account (0: none), the limit, what is used, the
# wait in ms, and for each account req, tok, active, period, spent (as text: Lua's numbers come back as integers).
ADMIT = (
    _HEAD
    + """
local wanted, accounts = tonumber(ARGV[3]), {}
local refused, limit, used, wait = 0, '', 0, 0
for i = 2, #KEYS do
  local o = 3 + (i - 2) * 7
  local rpm, tpm, most, budget = tonumber(ARGV[o+1]), tonumber(ARGV[o+2]), tonumber(ARGV[o+3]), tonumber(ARGV[o+4])
  local period_s = tonumber(ARGV[o+5])
  local a = read(KEYS[i], rpm, tpm, budget, period_s)
  if budget > 0 and tonumber(ARGV[o+6]) == a.period then a.spent = math.max(a.spent, tonumber(ARGV[o+7])) end
  accounts[i] = a
  if refused == 0 then
    if budget > 0 and a.spent + a.reserved + wanted > budget then
      refused, limit, used = i - 1, 'budget', a.spent + a.reserved
      wait = period_s > 0 and (period_s - now % period_s) * 1000 or -1
    elseif most > 0 and a.active >= most then
      refused, limit, used, wait = i - 1, 'concurrency', a.active, 1000
    elseif rpm > 0 and a.req < 1 then
      refused, limit, used, wait = i - 1, 'requests', rpm - math.floor(a.req), (1 - a.req) * 60000 / rpm
    elseif tpm > 0 and (wanted > tpm or a.tok < wanted) then
      refused, limit, used = i - 1, 'tokens', tpm - a.tok
      wait = wanted > tpm and -1 or (wanted - a.tok) * 60000 / tpm
    end
  end
end
local out = {num_live, refused, limit, math.floor(used), math.ceil(wait)}
for i = 2, #KEYS do
  local o, a = 3 + (i - 2) * 7, accounts[i]
  if refused == 0 then
    a.req, a.tok, a.active = a.req - 1, a.tok - wanted, a.active + 1
    write(KEYS[i], a, tonumber(ARGV[o+1]), tonumber(ARGV[o+2]), tonumber(ARGV[o+4]), tonumber(ARGV[o+5]))
    redis.call('HINCRBY', KEYS[i], 'a:' .. ARGV[1], 1)
    redis.call('HINCRBY', KEYS[i], 'r:' .. ARGV[1], wanted)
  end
  for _, value in ipairs({a.req, a.tok, a.active, a.period, a.spent}) do out[#out+1] = string.format('%.3f', value) end
end
return out
"""
)

# KEYS[2]: a mark that this request is settled. ARGV[3] tokens reserved, ARGV[4] used, ARGV[5] 1 if Redis admitted it.
# Returns 1 and each account's period and what is spent in it, or 0 when it was settled before.
SETTLE = (
    _HEAD
    + """
if not redis.call('SET', KEYS[2], 1, 'NX', 'EX', 120) then return {0} end
local out = {1}
local reserved, used, counted = tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5] == '1'
for i = 3, #KEYS do
  local o = 5 + (i - 3) * 5
  local rpm, tpm, budget, period_s = tonumber(ARGV[o+1]), tonumber(ARGV[o+2]), tonumber(ARGV[o+4]), tonumber(ARGV[o+5])
  local a = read(KEYS[i], rpm, tpm, budget, period_s)
  a.tok = a.tok + (counted and reserved or 0) - used
  if budget > 0 then a.spent = a.spent + used end
  write(KEYS[i], a, rpm, tpm, budget, period_s)
  if counted then
    for field, less in pairs({['a:' .. ARGV[1]] = 1, ['r:' .. ARGV[1]] = reserved}) do
      if redis.call('HINCRBY', KEYS[i], field, 0 - less) <= 0 then redis.call('HDEL', KEYS[i], field) end
    end
  end
  out[#out+1] = a.period
  out[#out+1] = math.floor(a.spent)
end
return out
"""
)

# Alone with Redis for a moment, a gateway says what it has: for each account the requests under way and the tokens
# reserved, and what is spent in which period, which makes good for whatever Redis or a lost answer got wrong.
BEAT = (
    _HEAD
    + """
for i = 2, #KEYS do
  local o = 2 + (i - 2) * 5
  local active, reserved, period, spent = ARGV[o+1], ARGV[o+2], tonumber(ARGV[o+3]), tonumber(ARGV[o+4])
  if tonumber(active) > 0 then redis.call('HSET', KEYS[i], 'a:' .. ARGV[1], active, 'r:' .. ARGV[1], reserved)
  else redis.call('HDEL', KEYS[i], 'a:' .. ARGV[1], 'r:' .. ARGV[1]) end
  if spent > 0 then
    local known = tonumber(redis.call('HGET', KEYS[i], 'period') or -1)
    if known < period then redis.call('HSET', KEYS[i], 'period', period, 'spent', spent)
    elseif known == period and tonumber(redis.call('HGET', KEYS[i], 'spent') or 0) < spent then
      redis.call('HSET', KEYS[i], 'spent', spent)
    end
  end
  if redis.call('TTL', KEYS[i]) == -1 and ARGV[o+5] == '1' then redis.call('EXPIRE', KEYS[i], 3600) end
end
return num_live
"""
)

# The book of keys in one step, so that whatever else changes it comes before or after. KEYS[1]: the hash of store.py.
# ARGV: the secret that a gateway knows the book by, the version that it knows, then the fields that it knows. They go
# back where the book there is none or another one, begun after a loss by somebody who makes a key; of a field that both
# have, the younger book's stands. The mark `was:SECRET` tells those who know the younger book alone that it is in this
# one, so that each is taken up once, and what is revoked later stays revoked. Returns 1, or 0 for nothing to give back.
GIVE_BACK = """
local salt = redis.call('HGET', KEYS[1], 'salt')
local version = tonumber(redis.call('HGET', KEYS[1], 'version') or 0)
if version > 0 and (salt == ARGV[1] or redis.call('HEXISTS', KEYS[1], 'was:' .. ARGV[1]) == 1) then return 0 end
for i = 3, #ARGV, 2 do redis.call('HSETNX', KEYS[1], ARGV[i], ARGV[i + 1]) end
if salt and salt ~= ARGV[1] then redis.call('HSET', KEYS[1], 'was:' .. salt, 1) end
if ARGV[1] ~= '' then redis.call('HSET', KEYS[1], 'salt', ARGV[1]) end
redis.call('HSET', KEYS[1], 'version', math.max(version, tonumber(ARGV[2])) + 1)
return 1
"""
