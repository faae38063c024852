-- Gives tokens back to counters, as far as nobody else was let through because of them. See script.rs.
local given = 0
local a = 1
for i = 1, #KEYS do
  local key, kind, mark, limit = KEYS[i], ARGV[a], tonumber(ARGV[a + 1]), tonumber(ARGV[a + 2])
  local tokens, only = tonumber(ARGV[a + 3]), ARGV[a + 4]
  a = a + 5
  local back = 0
  if only == 'all' then
    redis.call('DEL', key)
  elseif kind == 'p' then
    local said = redis.pcall('GET', key)
    local used = type(said) == 'string' and string.find(said, '^[1-9]%d*$') and tonumber(said)
    if used and used <= 9007199254740991 and (only == '' or tonumber(only) == used) then
      back = math.min(tokens, used)
      if back > 0 then redis.call('DECRBY', key, string.format('%.0f', back)) end
    end
  else
    local said = redis.pcall('HMGET', key, kind == 'g' and 'window' or 'start', 'used')
    local at, used = tonumber(said[1] or nil), tonumber(said[2] or nil)
    if at and used then
      if only == '' then
        if at == mark then
          back = tokens
        elseif kind == 'g' and at > mark then
          back = tokens - limit * (at - mark)
        end
      elseif at == mark and used == tonumber(only) then
        back = tokens
      end
      back = math.min(back, used)
      if back > 0 then redis.call('HSET', key, 'used', string.format('%.0f', used - back)) end
    end
  end
  given = given + math.max(back, 0)
end
return given
