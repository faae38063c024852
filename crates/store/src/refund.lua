-- Refunds tokens to counters, as far as no later request depends on them. The format is defined in scripts.rs.
local refunded = 0
local a = 1
for i = 1, #KEYS do
  local key, kind, mark, limit = KEYS[i], ARGV[a], tonumber(ARGV[a + 1]), tonumber(ARGV[a + 2])
  local tokens, only = tonumber(ARGV[a + 3]), ARGV[a + 4]
  a = a + 5
  local amount = 0
  if only == 'all' then
    redis.call('DEL', key)
  elseif kind == 's' then
    local field = string.format('%.0f', mark)
    local reply = redis.pcall('HMGET', key, field)
    local used = tonumber(reply[1] or nil)
    amount = used and math.min(tokens, used) or 0
    if amount > 0 then redis.call('HSET', key, field, string.format('%.0f', used - amount)) end
  elseif kind == 'p' then
    local reply = redis.pcall('GET', key)
    local used = type(reply) == 'string' and string.find(reply, '^[1-9]%d*$') and tonumber(reply)
    if used and used <= 9007199254740991 and (only == '' or used <= tonumber(only)) then
      amount = math.min(tokens, used)
      if amount > 0 then redis.call('DECRBY', key, string.format('%.0f', amount)) end
    end
  else
    local reply = redis.pcall('HMGET', key, kind == 'g' and 'window' or 'start', 'used')
    local current, used = tonumber(reply[1] or nil), tonumber(reply[2] or nil)
    if current and used then
      if only == '' then
        if current == mark then
          amount = tokens
        elseif kind == 'g' and current > mark then
          amount = tokens - limit * (current - mark)
        end
      elseif current == mark and used <= tonumber(only) then
        amount = tokens
      end
      amount = math.min(amount, used)
      if amount > 0 then redis.call('HSET', key, 'used', string.format('%.0f', used - amount)) end
    end
  end
  refunded = refunded + math.max(amount, 0)
end
return refunded
