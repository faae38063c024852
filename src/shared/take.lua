-- Takes tokens of several counters at once: of all, or of none. See script.rs.
local clock = redis.call('TIME')
local time = clock[1] * 1000 + math.floor(clock[2] / 1000)
local now = time
local floor = tonumber(ARGV[1])
if floor > now and floor - now < 1000 then now = floor end
local most = 9007199254740991
local text = string.format

local function whole(said)
  if not said then return 0 end
  if said == '0' or string.find(said, '^%-?[1-9]%d*$') then return tonumber(said) end
end
local function bad(key)
  return redis.error_reply('BADVALUE ' .. key .. ' holds something else than a counter')
end
local function failed(reply, key)
  if string.find(reply.err, 'WRONGTYPE', 1, true) then return bad(key) end
  return reply
end

local used, base, ends, marks, gains = {}, {}, {}, {}, {}
local pass = true
local a = 2
for i = 1, #KEYS do
  local key, kind = KEYS[i], ARGV[a]
  local u
  if kind == 'p' then
    if now >= tonumber(ARGV[a + 5]) then return {-1, time} end
    local said = redis.pcall('GET', key)
    if type(said) == 'table' then return failed(said, key) end
    u = whole(said)
    if not u then return bad(key) end
    marks[i] = 0
  else
    local said = redis.pcall('HMGET', key, kind == 'g' and 'window' or 'start', 'used')
    if said.err then return failed(said, key) end
    local mark, limit = whole(said[1]), tonumber(ARGV[a + 5])
    u = whole(said[2])
    if not u or not mark then return bad(key) end
    if kind == 'g' then
      local number, over = tonumber(ARGV[a + 6]), tonumber(ARGV[a + 7])
      local length = tonumber(ARGV[a + 8]) - over
      if now >= over or (said[1] and mark == number + 1) then
        number, over = number + 1, over + length
        if now >= over then return {-1, time} end
      end
      if said[1] then u = u - limit * (number - mark) end
      marks[i], ends[i] = number, over
    else
      local period = tonumber(ARGV[a + 6])
      if not said[1] or mark > now then mark = now end
      local elapsed = math.floor((now - mark) / period)
      u = u - limit * elapsed
      mark = mark + elapsed * period
      if u <= 0 then mark = now end
      marks[i], ends[i] = mark, mark + period
    end
  end
  if u < 0 then u = 0 elseif u > most then u = most end
  used[i] = u
  local need, want, least = tonumber(ARGV[a + 2]), tonumber(ARGV[a + 3]), tonumber(ARGV[a + 4])
  if u < least then u = least end
  base[i] = u
  local spare = tonumber(ARGV[a + 1]) - u - need
  if spare < 0 then pass = false end
  gains[i] = need + math.min(want - need, math.floor(spare / 8))
  a = a + (kind == 'p' and 6 or (kind == 'g' and 9 or 7))
end

local reply = {pass and 1 or 0, time}
a = 2
for i = 1, #KEYS do
  local kind, gain = ARGV[a], pass and gains[i] or 0
  if gain > 0 then
    local u = base[i] + gain
    used[i] = u
    if kind == 'p' then
      redis.call('SET', KEYS[i], text('%.0f', u), 'PXAT', ARGV[a + 5])
    else
      local field = kind == 'g' and 'window' or 'start'
      redis.call('HSET', KEYS[i], field, text('%.0f', marks[i]), 'used', text('%.0f', u))
      local windows = math.ceil(u / tonumber(ARGV[a + 5])) - 1
      local length
      if kind == 'g' then
        length = 2 * (tonumber(ARGV[a + 8]) - tonumber(ARGV[a + 7]))
      else
        length = tonumber(ARGV[a + 6])
      end
      redis.call('PEXPIREAT', KEYS[i], text('%.0f', math.min(ends[i] + windows * length, 4398046511103)))
    end
  end
  local r = 3 * i
  reply[r], reply[r + 1], reply[r + 2] = gain, used[i], marks[i]
  a = a + (kind == 'p' and 6 or (kind == 'g' and 9 or 7))
end
return reply
