-- Reads, changes or refills a map. The keys, the arguments and the replies are defined in shared_map.rs.
local state_key, entries_key, changes_key, versions_key, removed_key = unpack(KEYS)
local call, what = redis.call, ARGV[1]
local epoch, version, floor, filler, filled_until = unpack(call('HMGET', state_key, 'epoch', 'version', 'floor', 'filler', 'until'))
local clock = call('TIME')
local now_ms = clock[1] * 1000 + math.floor(clock[2] / 1000)
local function text(number) return string.format('%.0f', number) end
-- Whether the map is a refill that nothing has changed since, and lacks changes that a gateway knows. A refill from another history
-- is completed first.
local function is_behind(own_epoch, known)
  return epoch and version == floor and version + 0 < known + 0 and (epoch == own_epoch or not filler)
end

if what == 'read' then
  local after, since, count, bytes_left, own_epoch = ARGV[2], ARGV[3], ARGV[4], ARGV[5] + 0, ARGV[6]
  if not epoch then return {'empty'} end
  if is_behind(own_epoch, after) then return {'behind', epoch} end
  if filler then return {now_ms < filled_until + 0 and 'filling' or 'abandoned'} end
  local reply = {'gone', epoch, version, 1, floor}
  if after ~= '0' and since ~= version and not call('ZSCORE', versions_key, since) then return reply end
  reply[1] = 'changes'
  if version == after then return reply end
  local changes = call('ZRANGEBYSCORE', changes_key, '(' .. after, '+inf', 'WITHSCORES', 'LIMIT', 0, count)
  for i = 1, #changes, 2 do
    local entry = call('HGET', entries_key, changes[i])
    bytes_left = bytes_left - #changes[i] - #(entry or '')
    if bytes_left < 0 and i > 1 then
      reply[4] = 0
      break
    end
    local r = #reply
    reply[r + 1], reply[r + 2], reply[r + 3] = changes[i], text(changes[i + 1]), entry
  end
  if #changes >= 2 * count then reply[4] = 0 end
  return reply
end

if what == 'change' then
  local new_epoch, name, expected, kept_max, entry = ARGV[2], ARGV[3], ARGV[4], ARGV[5] + 0, ARGV[6]
  if filler or (not epoch and new_epoch == '') then return {'away'} end
  local score = call('HEXISTS', entries_key, name) == 1 and call('ZSCORE', changes_key, name)
  local current = score and text(score) or ''
  local holds = expected == 'any' or expected == current or (expected == 'exists' and score)
    or expected == 'map' .. (version or '0')
  if not holds or (not entry and not score) then return {'refused', current} end
  version = text(math.max((version or 0) + 1, clock[1] * 1000000 + clock[2]))
  call('HSET', state_key, 'epoch', epoch or new_epoch, 'version', version, 'floor', floor or '0')
  call('ZADD', changes_key, version, name)
  call('ZADD', versions_key, version, version)
  if call('ZCARD', versions_key) > kept_max then call('ZPOPMIN', versions_key) end
  if entry then
    call('HSET', entries_key, name, entry)
    return {'changed', version}
  end
  call('HDEL', entries_key, name)
  call('ZADD', removed_key, version, name)
  while call('ZCARD', removed_key) > kept_max do
    local oldest, removed_at = unpack(call('ZPOPMIN', removed_key))
    -- The name may have a text again.
    if text(call('ZSCORE', changes_key, oldest)) == text(removed_at) then
      call('ZREM', changes_key, oldest)
      call('HSET', state_key, 'floor', text(removed_at))
    end
  end
  return {'changed', version}
end

local by, hold_ms, step = ARGV[2], ARGV[3] + 0, ARGV[4]
local is_mine = filler == by
if step == 'begin' then
  local is_taken = epoch and not (filler and (is_mine or now_ms >= filled_until + 0))
  if is_taken and not is_behind(ARGV[5], ARGV[6]) then return {'away'} end
  call('DEL', unpack(KEYS))
  call('HSET', state_key, 'epoch', ARGV[5], 'version', ARGV[6], 'floor', ARGV[6], 'filler', by)
  call('ZADD', versions_key, ARGV[6], ARGV[6])
  version = ARGV[6]
elseif not is_mine then
  return {'away'}
elseif step == 'entries' then
  for i = 5, #ARGV, 3 do
    call('HSET', entries_key, ARGV[i], ARGV[i + 2])
    call('ZADD', changes_key, ARGV[i + 1], ARGV[i])
  end
else
  call('HDEL', state_key, 'filler', 'until')
  return {'changed', version}
end
call('HSET', state_key, 'until', text(now_ms + hold_ms))
return {'changed', version}
