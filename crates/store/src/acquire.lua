-- Acquires tokens for several calls in order; each call takes tokens of all its counters or of none. The format of
-- arguments and reply is defined in scripts.rs. The script first reads all keys, then decides, then writes.
local keys, argv, call = KEYS, ARGV, redis.call
local clock = call('TIME')
local time = clock[1] * 1000 + math.floor(clock[2] / 1000)
local max_integer = 9007199254740991
local values = call('MGET', unpack(keys))
local reply = {time}
-- By key: tokens used or owed, the current window, its end, the expiry to write, and the name of the window field.
local usage, marks, ends, expiry, fields, changed = {}, {}, {}, {}, {}, {}
-- By key of a sliding counter: tokens by segment.
local segments = {}
-- By kind: the number of arguments of a request to a counter.
local lengths = {e = 4, p = 6, s = 7, f = 8, g = 10}
local first, a, r, total = 1, 1, 2, #argv

-- Usage of an account at time `now`: nil if the key holds another type, -1 if both windows have ended.
local function account(key, a, now)
  local grid, used, mark, exists = argv[a] == 'g', usage[key], marks[key], true
  if not used then
    local found = redis.pcall('HMGET', key, grid and 'window' or 'start', 'used')
    if found.err then
      -- A wrong type is an error of this counter only; a missing right is an error of the call.
      if string.find(found.err, 'WRONGTYPE', 1, true) then return nil end
      call('HMGET', key, 'used')
    end
    exists = found[1] or found[2]
    mark, used = tonumber(found[1] or 0), tonumber(found[2] or 0)
    if not mark or not used or mark % 1 ~= 0 or used % 1 ~= 0 then return nil end
  end
  if grid then
    local number, end_ms = argv[a + 8] + 0, argv[a + 3] + 0
    local length = argv[a + 9] - end_ms
    -- A number far ahead counts shorter windows, which the rule had before.
    if exists and (mark - number) * length > 2 * length + 2000 then exists, used = false, 0 end
    -- A gateway whose clock is ahead may have counted in the next window already.
    if now >= end_ms or (exists and mark == number + 1) then
      number, end_ms = number + 1, end_ms + length
      if now >= end_ms then return -1 end
    end
    if exists then used = used - argv[a + 6] * (number - mark) end
    marks[key], ends[key] = number, end_ms
  else
    local period, reserved_after = argv[a + 3] + 0, argv[a + 7] + 0
    -- A gateway whose clock is ahead may have opened the window.
    if not exists or mark > now + 2000 then mark = now end
    local elapsed = math.max(math.floor((now - mark) / period), 0)
    used = used - argv[a + 6] * elapsed
    mark = mark + elapsed * period
    -- A window without usage is not open: this request opens a new one, or the one after which it reserves.
    if used <= 0 then mark = reserved_after > now and reserved_after - period or now end
    marks[key], ends[key] = mark, mark + period
  end
  used = used < 0 and 0 or used
  usage[key] = used
  return used
end

-- Usage of a sliding counter at time `now`; nil if the key holds another type. A request counts in the latest segment in
-- use: that of `now`, or a later one, in which a gateway has counted whose clock is ahead. A segment far ahead belongs to a
-- shorter period, which the rule had before.
local function sliding(key, a, now)
  local tokens, latest, used = segments[key], math.floor(now * 8 / argv[a + 3]), 0
  local newest = math.floor((now + 2000) * 8 / argv[a + 3]) + 8
  if not tokens then
    local found = redis.pcall('HGETALL', key)
    if found.err then
      if string.find(found.err, 'WRONGTYPE', 1, true) then return nil end
      call('HGETALL', key)
    end
    tokens = {}
    for i = 1, #found, 2 do
      local number, count = tonumber(found[i]), tonumber(found[i + 1])
      if not number or not count or number % 1 ~= 0 or count % 1 ~= 0 then return nil end
      tokens[number] = count < 0 and 0 or count
    end
    segments[key] = tokens
  end
  for number in pairs(tokens) do
    if number <= newest then latest = math.max(latest, number) end
  end
  for number, count in pairs(tokens) do
    if number >= latest - 8 and number <= latest then used = used + count end
  end
  usage[key], marks[key] = used, latest
  return used
end

-- The segment of a sliding counter after which `excess` tokens have come back.
local function returned_after(key, excess)
  local latest = marks[key]
  for number = latest - 8, latest - 1 do
    excess = excess - (segments[key][number] or 0)
    if excess <= 0 then return number end
  end
  return latest
end

local grants = {}
while a <= total do
  local now, gateway_ms, last = time, argv[a] + 0, first + argv[a + 1] - 1
  -- A caller whose clock is far ahead names later windows: it gets the time only.
  local is_far_ahead = gateway_ms - now >= 1000
  if gateway_ms > now and not is_far_ahead then now = gateway_ms end
  local status, begin, at = 1, a + 2, r
  a, r = begin, r + 1
  for i = first, last do
    local key, kind = keys[i], argv[a]
    local plain = kind == 'e' or kind == 'p'
    local used
    if plain then
      used = usage[key]
      if not used then
        local value = values[i]
        if value then
          used = tonumber(value)
          if used and used % 1 ~= 0 then used = nil end
        elseif call('EXISTS', key) == 0 then
          used = 0
        end
        if used and used < 0 then used = 0 end
        usage[key] = used
      end
      if is_far_ahead or now >= argv[a + 3] + 0 then used = -1 end
    elseif kind == 's' then
      used = sliding(key, a, now)
    else
      used = account(key, a, now)
    end
    reply[r] = used and 0 or -1
    if not used then
      status, used = -2, 0
    elseif used < 0 then
      status, used = status < -1 and status or -1, 0
    elseif used > max_integer then
      used = max_integer
    end
    local need = argv[a + 2] + 0
    local grant, spare = need, argv[a + 1] - used - need
    if kind ~= 'e' then
      local want, least = argv[a + 4] + 0, argv[a + 5] + 0
      if used < least then spare = argv[a + 1] - least - need end
      if want > need then grant = need + math.min(want - need, math.floor(spare / 8)) end
    end
    -- The tokens that the caller reserves would be of a later window than it waits for.
    if ends[key] and argv[a + 7] ~= '0' and ends[key] > argv[a + 7] + 0 then spare = -1 end
    if spare < 0 and status > 0 then status = 0 end
    grants[i] = grant
    reply[r + 1], reply[r + 2], reply[r + 3] = used, marks[key] or 0, 0
    if segments[key] then
      local excess = -spare
      local need_once_refused = argv[a + 6] + 0
      if need_once_refused > 0 then excess = math.min(excess, math.max(excess - need, 0)) + need_once_refused end
      reply[r + 3] = returned_after(key, math.max(excess, 1))
    end
    a = a + lengths[kind]
    r = r + 4
  end
  reply[at] = status
  if status == 1 then
    local b = begin
    at = at + 1
    for i = first, last do
      local key, kind, grant = keys[i], argv[b], grants[i]
      if grant > 0 then
        local used = usage[key]
        if kind ~= 'e' and used < argv[b + 5] + 0 then used = argv[b + 5] + 0 end
        used = used + grant
        reply[at], reply[at + 1] = grant, used
        if kind == 's' then
          local tokens, latest = segments[key], marks[key]
          -- Otherwise the reply has it already.
          if argv[b + 6] ~= '0' then reply[at + 3] = returned_after(key, 1) end
          tokens[latest] = (tokens[latest] or 0) + used - usage[key]
        end
        usage[key] = used
        if not expiry[key] then changed[#changed + 1] = key end
        if kind == 'e' or kind == 'p' then
          expiry[key] = argv[b + 3]
        elseif kind == 's' then
          expiry[key] = math.min(math.ceil((marks[key] + 9) * argv[b + 3] / 8), 4398046511103)
        else
          -- Kept until all reserved tokens have been used. Calendar windows differ in length.
          local length = kind == 'g' and (argv[b + 9] - argv[b + 3]) * 2 or argv[b + 3]
          local windows = math.ceil(used / argv[b + 6]) - 1
          expiry[key] = math.min(ends[key] + windows * length, 4398046511103)
          fields[key] = kind == 'g' and 'window' or 'start'
        end
      end
      at = at + 4
      b = b + lengths[kind]
    end
  end
  first = last + 1
end

local text = string.format
for i = 1, #changed do
  local key = changed[i]
  local field, tokens = fields[key], segments[key]
  if tokens then
    local all = {}
    for number, count in pairs(tokens) do
      if number < marks[key] - 8 then
        call('HDEL', key, text('%.0f', number))
      elseif number <= marks[key] then
        all[#all + 1], all[#all + 2] = text('%.0f', number), text('%.0f', count)
      end
    end
    call('HSET', key, unpack(all))
    call('PEXPIREAT', key, text('%.0f', expiry[key]))
  elseif field then
    call('HSET', key, field, text('%.0f', marks[key]), 'used', text('%.0f', usage[key]))
    call('PEXPIREAT', key, text('%.0f', expiry[key]))
  else
    call('SET', key, text('%.0f', usage[key]), 'PXAT', expiry[key])
  end
end
return reply
