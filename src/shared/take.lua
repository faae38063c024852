-- Takes tokens of several counters at once: of all, or of none. What it is asked and answers: script.rs.
local keys, argv, call = KEYS, ARGV, redis.call
local clock = call('TIME')
local time = clock[1] * 1000 + math.floor(clock[2] / 1000)
local now, floor = time, argv[1] + 0
if floor > now and floor - now < 1000 then now = floor end
local most = 9007199254740991

-- First everything is only read: whatever is wrong is found before anything is written.
local said = call('MGET', unpack(keys))
local reply, base, gains, ends = {1, time}, {}, {}, {}
local pass = true
local a, r = 2, 3
for i = 1, #keys do
  local kind, over = argv[a], argv[a + 3] + 0
  local used, mark = said[i], 0
  if kind == 'e' or kind == 'p' then
    if now >= over then return {-1, time} end
    if used then
      used = tonumber(used)
      if not used or used % 1 ~= 0 then mark = nil end
    else
      used = 0
      if call('EXISTS', keys[i]) == 1 then mark = nil end
    end
  else
    local grid = kind == 'g'
    local fields = redis.pcall('HMGET', keys[i], grid and 'window' or 'start', 'used')
    if fields.err and not string.find(fields.err, 'WRONGTYPE', 1, true) then return fields end
    local exists = fields[1] or fields[2]
    mark, used = tonumber(fields[1] or 0), tonumber(fields[2] or 0)
    if fields.err or not mark or not used or mark % 1 ~= 0 or used % 1 ~= 0 then
      mark = nil
    elseif grid then
      local number, length = argv[a + 7] + 0, argv[a + 8] - over
      -- Somebody whose time is ahead may have counted in the next window already.
      if now >= over or (exists and mark == number + 1) then
        number, over = number + 1, over + length
        if now >= over then return {-1, time} end
      end
      if exists then used = used - argv[a + 6] * (number - mark) end
      mark, ends[i] = number, over
    else
      local period = over
      if not exists or mark > now then mark = now end
      local elapsed = math.floor((now - mark) / period)
      used = used - argv[a + 6] * elapsed
      mark = mark + elapsed * period
      -- A window in which nothing is used is not open: this request opens its own.
      if used <= 0 then mark = now end
      ends[i] = mark + period
    end
  end
  if not mark then
    return redis.error_reply('BADVALUE ' .. keys[i] .. ' holds something else than a counter')
  end
  if used < 0 then used = 0 elseif used > most then used = most end
  reply[r], reply[r + 1], reply[r + 2] = 0, used, mark
  r = r + 3
  local need = argv[a + 2] + 0
  local gain = need
  if kind == 'e' then
    if argv[a + 1] - used < need then pass = false end
    a = a + 4
  else
    local want, least = argv[a + 4] + 0, argv[a + 5] + 0
    if used < least then used = least end
    local spare = argv[a + 1] - used - need
    if spare < 0 then pass = false end
    if want > need then gain = need + math.min(want - need, math.floor(spare / 8)) end
    a = a + (kind == 'p' and 6 or kind == 'g' and 9 or 7)
  end
  base[i], gains[i] = used, gain
end
if not pass then
  reply[1] = 0
  return reply
end

local text = string.format
a, r = 2, 3
for i = 1, #keys do
  local kind, gain = argv[a], gains[i]
  local plain = kind == 'e' or kind == 'p'
  if gain > 0 then
    local used = base[i] + gain
    reply[r], reply[r + 1] = gain, used
    if plain then
      call('SET', keys[i], text('%.0f', used), 'PXAT', argv[a + 3])
    else
      local grid = kind == 'g'
      local mark = text('%.0f', reply[r + 2])
      call('HSET', keys[i], grid and 'window' or 'start', mark, 'used', text('%.0f', used))
      -- Until all that is owed is paid. Windows of a calendar differ in length.
      local length = grid and 2 * (argv[a + 8] - argv[a + 3]) or argv[a + 3] + 0
      local windows = math.ceil(used / argv[a + 6]) - 1
      call('PEXPIREAT', keys[i], text('%.0f', math.min(ends[i] + windows * length, 4398046511103)))
    end
  end
  a = a + (kind == 'e' and 4 or kind == 'p' and 6 or kind == 'g' and 9 or 7)
  r = r + 3
end
return reply
