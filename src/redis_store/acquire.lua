-- Decides calls one after the other: each takes tokens of several counters, of all or of none. What it is asked and
-- answers: script.rs. First everything is read, then all is decided, and only then anything is written.
local keys, argv, call = KEYS, ARGV, redis.call
local clock = call('TIME')
local time = clock[1] * 1000 + math.floor(clock[2] / 1000)
local most = 9007199254740991
local said = call('MGET', unpack(keys))
local reply = {time}
-- By key: tokens used or owed, the window that is about, and its end; what has to be written, and until when it is kept.
local known, marks, ends, kept, fields, changed = {}, {}, {}, {}, {}, {}
local first, a, r, total = 1, 1, 2, #argv

-- What lies under the key of an account by now: nothing if it is none, -1 if its windows are over.
local function account(key, a, now)
  local grid, used, mark, exists = argv[a] == 'g', known[key], marks[key], true
  if not used then
    local found = redis.pcall('HMGET', key, grid and 'window' or 'start', 'used')
    if found.err then
      -- What is no account is told of this counter alone; what may not be read at all, of the call.
      if string.find(found.err, 'WRONGTYPE', 1, true) then return nil end
      call('HMGET', key, 'used')
    end
    exists = found[1] or found[2]
    mark, used = tonumber(found[1] or 0), tonumber(found[2] or 0)
    if not mark or not used or mark % 1 ~= 0 or used % 1 ~= 0 then return nil end
  end
  if grid then
    local number, over = argv[a + 7] + 0, argv[a + 3] + 0
    local length = argv[a + 8] - over
    -- Somebody whose time is ahead may have counted in the next window already.
    if now >= over or (exists and mark == number + 1) then
      number, over = number + 1, over + length
      if now >= over then return -1 end
    end
    if exists then used = used - argv[a + 6] * (number - mark) end
    marks[key], ends[key] = number, over
  else
    local period = argv[a + 3] + 0
    if not exists or mark > now then mark = now end
    local elapsed = math.floor((now - mark) / period)
    used = used - argv[a + 6] * elapsed
    mark = mark + elapsed * period
    -- A window in which nothing is used is not open: this request opens its own.
    if used <= 0 then mark = now end
    marks[key], ends[key] = mark, mark + period
  end
  used = used < 0 and 0 or used
  known[key] = used
  return used
end

local gains = {}
while a <= total do
  local now, floor, last = time, argv[a] + 0, first + argv[a + 1] - 1
  -- A caller who is far ahead names windows to come: he is told the time.
  local astray = floor - now >= 1000
  if floor > now and not astray then now = floor end
  local status, begin, at = 1, a + 2, r
  a, r = begin, r + 1
  for i = first, last do
    local key, kind = keys[i], argv[a]
    local plain = kind == 'e' or kind == 'p'
    local used
    if plain then
      used = known[key]
      if not used then
        local value = said[i]
        if value then
          used = tonumber(value)
          if used and used % 1 ~= 0 then used = nil end
        elseif call('EXISTS', key) == 0 then
          used = 0
        end
        if used and used < 0 then used = 0 end
        known[key] = used
      end
      if astray or now >= argv[a + 3] + 0 then used = -1 end
    else
      used = account(key, a, now)
    end
    reply[r] = used and 0 or -1
    if not used then
      status, used = -2, 0
    elseif used < 0 then
      status, used = status < -1 and status or -1, 0
    elseif used > most then
      used = most
    end
    reply[r + 1], reply[r + 2] = used, marks[key] or 0
    r = r + 3
    local need = argv[a + 2] + 0
    local gain, spare = need, argv[a + 1] - used - need
    if kind == 'e' then
      a = a + 4
    else
      local want, least = argv[a + 4] + 0, argv[a + 5] + 0
      if used < least then spare = argv[a + 1] - least - need end
      if want > need then gain = need + math.min(want - need, math.floor(spare / 8)) end
      a = a + (kind == 'p' and 6 or kind == 'g' and 9 or 7)
    end
    if spare < 0 and status > 0 then status = 0 end
    gains[i] = gain
  end
  reply[at] = status
  if status == 1 then
    local b = begin
    at = at + 1
    for i = first, last do
      local key, kind, gain = keys[i], argv[b], gains[i]
      if gain > 0 then
        local used = known[key]
        if kind ~= 'e' and used < argv[b + 5] + 0 then used = argv[b + 5] + 0 end
        used = used + gain
        reply[at], reply[at + 1] = gain, used
        known[key] = used
        if not kept[key] then changed[#changed + 1] = key end
        if kind == 'e' or kind == 'p' then
          kept[key] = argv[b + 3]
        else
          -- Until all that is owed is paid. Windows of a calendar differ in length.
          local length = kind == 'g' and 2 * (argv[b + 8] - argv[b + 3]) or argv[b + 3] + 0
          local windows = math.ceil(used / argv[b + 6]) - 1
          kept[key] = math.min(ends[key] + windows * length, 4398046511103)
          fields[key] = kind == 'g' and 'window' or 'start'
        end
      end
      at = at + 3
      b = b + (kind == 'e' and 4 or kind == 'p' and 6 or kind == 'g' and 9 or 7)
    end
  end
  first = last + 1
end

local text = string.format
for i = 1, #changed do
  local key = changed[i]
  local field = fields[key]
  if field then
    call('HSET', key, field, text('%.0f', marks[key]), 'used', text('%.0f', known[key]))
    call('PEXPIREAT', key, text('%.0f', kept[key]))
  else
    call('SET', key, text('%.0f', known[key]), 'PXAT', kept[key])
  end
end
return reply
