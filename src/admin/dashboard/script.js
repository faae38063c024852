"use strict";
// Data becomes text or attributes by DOM calls only, never markup: names of keys come from clients.
const $ = id => document.getElementById(id);
const SAMPLE = 10e3;
// What the charts and tables show: a part of the samples that the gateway keeps for so many hours.
const RANGES = [{ name: "5 min", text: "5 minutes", ms: 300e3, hours: 1 }, { name: "1 h", text: "hour", ms: 3600e3, hours: 1 }, { name: "6 h", text: "6 hours", ms: 6 * 3600e3, hours: 6 }, { name: "24 h", text: "24 hours", ms: 24 * 3600e3, hours: 24 }];
const state = {
  // All samples of the stream, and those of the range.
  all: [], samples: [], downtimes: [], range: RANGES[1],
  live: [], snapshot: null, config: null, connected: false, seen: 0,
  filter: null, keysBy: "refused", keysRule: "", upstreams: new Map(), lookup: null,
  // The paths of the admin API of this gateway.
  offers: {}, clients: null, clientTotal: 0, hasMoreClients: false, plans: new Set(),
};

// --- Elements ---------------------------------------------------------------------------------------------------------
function set(node, props) {
  for (const [name, value] of Object.entries(props)) {
    if (name === "text") { if (node.textContent !== String(value)) node.textContent = value; }
    else if (name === "on") for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    else if (value === null || value === false) node.removeAttribute(name);
    else node.setAttribute(name, value === true ? "" : value);
  }
  return node;
}
function el(name, props = {}, ...children) {
  const node = set(document.createElement(name), props);
  node.append(...children.filter(child => child !== null));
  return node;
}
function svg(name, props = {}, ...children) {
  const node = set(document.createElementNS("http://www.w3.org/2000/svg", name), props);
  node.append(...children);
  return node;
}
// Keeps the elements of a list by key, so that focus and selection survive updates.
function list(parent, items, key, make, update) {
  const known = parent.items || (parent.items = new Map());
  const keys = new Set(items.map(key));
  for (const [name, node] of known) if (!keys.has(name)) { node.remove(); known.delete(name); }
  items.forEach((item, position) => {
    const name = key(item);
    if (!known.has(name)) known.set(name, make(item));
    const node = known.get(name);
    if (parent.children[position] !== node) parent.insertBefore(node, parent.children[position] || null);
    update(node, item);
  });
}
function options(select, names, all) {
  const wanted = all ? ["", ...names] : names;
  if (JSON.stringify([...select.options].map(option => option.value)) === JSON.stringify(wanted)) return;
  const chosen = select.value;
  select.replaceChildren(...wanted.map(name => el("option", { value: name, text: name || all })));
  if (wanted.includes(chosen)) select.value = chosen;
}

// --- Texts ------------------------------------------------------------------------------------------------------------
const grouped = n => Math.round(n).toLocaleString("en");
function count(n) {
  if (n < 1e5) return grouped(n);
  const [value, unit] = n < 1e6 ? [n / 1e3, "k"] : n < 1e9 ? [n / 1e6, "M"] : [n / 1e9, "G"];
  return `${value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0)} ${unit}`;
}
const rate = n => n === 0 ? "0" : n < 0.01 ? "<0.01" : n < 10 ? n.toFixed(2) : n < 100 ? n.toFixed(1) : count(n);
function duration(us) {
  if (us === null || us === undefined) return "–";
  if (us < 1e3) return `${us} µs`;
  const ms = us / 1e3;
  return ms < 10 ? `${ms.toFixed(1)} ms` : ms < 1e3 ? `${Math.round(ms)} ms` : `${(ms / 1e3).toFixed(1)} s`;
}
function share(part, whole) {
  if (!whole) return "–";
  const percent = part / whole * 100;
  return part === 0 ? "0 %" : percent < 0.1 ? "<0.1 %" : `${percent.toFixed(percent < 10 ? 1 : 0)} %`;
}
const clockTime = (ms, seconds) => new Date(ms).toLocaleTimeString("en", { hour: "2-digit", minute: "2-digit", second: seconds ? "2-digit" : undefined, hourCycle: "h23" });
function span(ms) {
  const s = Math.max(0, Math.round(ms / 1e3));
  if (s < 90) return `${s} s`;
  return s < 5400 ? `${Math.round(s / 60)} min` : s < 172800 ? `${Math.round(s / 3600)} h` : `${Math.round(s / 86400)} days`;
}
const plural = (n, one, many = `${one}s`) => `${grouped(n)} ${n === 1 ? one : many}`;
const routeName = name => name === "" ? "no route" : name;

// --- Data -------------------------------------------------------------------------------------------------------------
const ruleSum = (sample, rule) => {
  const sum = [0, 0, 0, 0, 0];
  for (const [, name, counts] of sample.rules) if (name === rule) counts.forEach((n, i) => sum[i] += n);
  return sum;
};
const routeOf = (sample, route) => (sample.routes.find(([name]) => name === route) || [])[1] || [0, 0, 0, null, null];
// What the charts show of a sample: all, refused, failed, median, p99.
function shown(sample, filter) {
  if (!filter) return sample.all;
  if (filter.route !== undefined) return routeOf(sample, filter.route);
  const [admitted, refused, delayed, shadowed, exempt] = ruleSum(sample, filter.rule);
  return [admitted + refused + delayed + shadowed + exempt, refused + shadowed, 0, null, null];
}
const perSecond = (n, sample) => n * 1000 / Math.max(sample.ms, 1);
const now = () => state.snapshot ? state.snapshot.time : Date.now();
// A sample replaces those of its interval: it is longer, or they are of a former stream.
function addSamples(samples) {
  for (const sample of samples) {
    const start = sample.end - sample.ms, isApart = known => known.end <= start + sample.ms / 2 || known.end > sample.end;
    if (!state.all.every(isApart)) state.all = state.all.filter(isApart);
    state.all.push(sample);
  }
  state.all.sort((a, b) => a.end - b.end);
}
function selectSamples() {
  const oldest = now() - RANGES[3].ms - SAMPLE, start = now() - state.range.ms;
  if (state.all.length && state.all[0].end <= oldest) state.all = state.all.filter(sample => sample.end > oldest);
  state.samples = state.all.filter(sample => sample.end > start + sample.ms / 2);
}
const rangeText = () => `in the last ${state.range.text}`;
// When something was down in the range: a server by its URL, the store by "".
const downtimesOf = what => state.downtimes.filter(({ down, end }) => down === what && end > now() - state.range.ms);
const wasDown = (what, { end, ms }) => state.downtimes.some(downtime => downtime.down === what && downtime.start < end && downtime.end > end - ms);

// --- Charts -----------------------------------------------------------------------------------------------------------
const stripes = (id, spacing) => svg("pattern", { id, width: spacing, height: spacing, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, svg("line", { x1: 0, y1: 0, x2: 0, y2: spacing, class: "stripe" }));
const LAYERS = [["answered", "answered"], ["refused", "refused"], ["failed", "failed (5xx)"]];
// A round distance of the lines of an axis that ends at `value` or above, in at most five steps.
function axisStep(value) {
  const power = 10 ** Math.floor(Math.log10(value / 4));
  return [1, 2, 2.5, 5, 10].map(step => step * power).find(step => step * 5 >= value * 0.999 && step * 4 >= value * 0.9);
}
// Outlines the values of samples as steps between `low` and `high`.
function steps(samples, x, low, high) {
  let path = "", at = null, back = [];
  const close = () => { if (back.length) path += back.reverse().join("") + "Z"; back = []; };
  for (const sample of samples) {
    const left = x(sample.end - sample.ms), right = x(sample.end), y0 = low(sample), y1 = high(sample);
    if (at === null || left - at > 1.5) { close(); path += `M${left.toFixed(1)},${y1.toFixed(1)}`; } else path += `L${at.toFixed(1)},${y1.toFixed(1)}`;
    path += `L${right.toFixed(1)},${y1.toFixed(1)}`;
    back.push(`L${right.toFixed(1)},${y0.toFixed(1)}L${(at === null || left - at > 1.5 ? left : at).toFixed(1)},${y0.toFixed(1)}`);
    at = right;
  }
  close();
  return path;
}
function line(samples, x, y, value) {
  let path = "", last = null;
  for (const sample of samples) {
    if (value(sample) === null) continue;
    const at = sample.end - sample.ms / 2;
    path += `${last !== null && at - last < sample.ms * 3 ? "L" : "M"}${x(at).toFixed(1)},${y(value(sample)).toFixed(1)}`;
    if (last === null || at - last >= sample.ms * 3) path += "h.01";
    last = at;
  }
  return path;
}
const frame = { left: 46, right: 40, top: 10, bottom: 22 };
function timeAxis(root, width, height, x) {
  const end = now(), every = 60e3 * [1, 2, 5, 10, 20, 60, 120, 240, 480].find(minutes => state.range.ms / minutes / 60e3 <= (width < 560 ? 4 : 7));
  // From midnight here on, so that labels are whole hours.
  const offset = new Date(end).getTimezoneOffset() * 60e3;
  for (let at = Math.ceil((end - state.range.ms - offset) / every) * every + offset; at <= end; at += every) {
    root.append(svg("line", { x1: x(at), x2: x(at), y1: frame.top, y2: height - frame.bottom, class: "grid" }), svg("text", { x: x(at), y: height - 6, "text-anchor": "middle", text: clockTime(at) }));
  }
}
function begin(plot, height) {
  const width = Math.max(plot.clientWidth, 200), end = now();
  const x = at => frame.left + (at - (end - state.range.ms)) / state.range.ms * (width - frame.left - frame.right);
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img" });
  return { width, height, x, root, end };
}
function finish(plot, chart, isEmpty, text) {
  plot.chart = chart;
  plot.querySelectorAll("svg,.empty").forEach(node => node.remove());
  plot.prepend(chart.root);
  if (isEmpty) plot.append(el("div", { class: "empty", text }));
  moveCursor(plot, plot.at);
}
function markers(chart, bottom) {
  const { root, x, end } = chart, clip = at => Math.max(x(at), frame.left);
  // Of the store. What is down of an upstream stands beside its servers.
  for (const { start, end } of downtimesOf("")) root.append(svg("rect", { class: "outage", x: clip(start), width: Math.max(x(end) - clip(start), 1), y: frame.top, height: bottom - frame.top }));
  for (const reload of (state.config ? state.config.reloads : [])) {
    if (reload.time < end - state.range.ms || reload.time > end) continue;
    const at = x(reload.time), mark = reload.problem === null ? "flag-mark" : "flag-mark flag-bad";
    root.append(svg("line", { class: "flag", x1: at, x2: at, y1: frame.top, y2: bottom }), svg("path", { class: mark, d: `M${at - 4},${frame.top - 6}h8l-4,7z` }, svg("title", { text: reload.problem === null ? "reload" : "rejected reload" })));
  }
}
function drawTraffic() {
  const plot = $("traffic"), chart = begin(plot, 230), { root, x, width, height } = chart, bottom = height - frame.bottom;
  const values = sample => shown(sample, state.filter).slice(0, 3).map(n => perSecond(n, sample));
  const total = sample => Math.max(values(sample)[0], values(sample)[1] + values(sample)[2]);
  const most = Math.max(0, ...state.samples.map(total)), step = axisStep(Math.max(most, 1)), max = Math.ceil(Math.max(most, 1) / step - 0.001) * step;
  const y = value => bottom - value / max * (bottom - frame.top);
  root.append(svg("defs", {}, stripes("stripes-refused", 5)));
  timeAxis(root, width, height, x);
  for (let value = 0; value <= max * 1.001; value += step) {
    root.append(svg("line", { class: value ? "grid" : "axis", x1: frame.left, x2: width - frame.right, y1: y(value), y2: y(value) }), svg("text", { x: frame.left - 6, y: y(value) + 4, "text-anchor": "end", text: value < 1e5 ? +value.toFixed(2) : count(value) }));
  }
  root.append(svg("text", { x: 0, y: 2, text: "1/s" }));
  if (state.samples.length) {
    const first = state.samples[0].end - state.samples[0].ms, left = x(now() - state.range.ms);
    if (x(first) - left > 1) root.append(svg("rect", { class: "gap", x: left, width: Math.max(x(first) - left, 0), y: frame.top, height: bottom - frame.top }));
  }
  markers(chart, bottom);
  const level = [sample => 0, sample => total(sample) - values(sample)[1] - values(sample)[2], sample => total(sample) - values(sample)[2], total];
  const inside = state.samples.filter(sample => x(sample.end - sample.ms) >= frame.left - 1);
  LAYERS.forEach(([name], layer) => {
    const d = steps(inside.filter(sample => level[layer + 1](sample) > level[layer](sample) || layer === 0), x, sample => y(level[layer](sample)), sample => y(level[layer + 1](sample)));
    root.append(svg("path", { class: name, d }));
    if (name === "refused") root.append(svg("path", { d, fill: "url(#stripes-refused)" }));
  });
  root.append(svg("line", { class: "cursor", y1: frame.top, y2: bottom, x1: -9, x2: -9 }));
  const sums = rangeSums(state.filter);
  root.setAttribute("aria-label", `${grouped(sums[0])} requests ${rangeText()}, ${grouped(sums[1])} refused, ${grouped(sums[2])} failed; at most ${rate(most)} per second`);
  finish(plot, chart, most === 0, state.samples.length ? `no requests ${rangeText()}` : "waiting for the first sample");
}
function drawLatency() {
  const plot = $("latency"), chart = begin(plot, 150), { root, x, width, height } = chart, bottom = height - frame.bottom;
  const p50 = sample => shown(sample, state.filter)[3], p99 = sample => shown(sample, state.filter)[4];
  const found = state.samples.flatMap(sample => [p50(sample), p99(sample)]).filter(value => value !== null).map(value => Math.max(value, 1));
  const low = 10 ** Math.floor(Math.log10(Math.min(...found, 1e4))), high = 10 ** Math.ceil(Math.log10(Math.max(...found, low * 10) * 1.001));
  const y = us => bottom - Math.log10(Math.max(us, low) / low) / Math.log10(high / low) * (bottom - frame.top);
  timeAxis(root, width, height, x);
  for (let value = low; value <= high; value *= 10) {
    root.append(svg("line", { class: value === low ? "axis" : "grid", x1: frame.left, x2: width - frame.right, y1: y(value), y2: y(value) }), svg("text", { x: frame.left - 6, y: y(value) + 4, "text-anchor": "end", text: duration(value).replace(".0", "") }));
  }
  markers(chart, bottom);
  const inside = state.samples.filter(sample => x(sample.end - sample.ms) >= frame.left - 1);
  root.append(svg("path", { class: "median", d: line(inside, x, y, p50) }), svg("path", { class: "slow", d: line(inside, x, y, p99) }));
  const last = inside.findLast(sample => p99(sample) !== null);
  if (last) {
    const at = x(last.end) + 4, [a, b] = [y(p99(last)), y(p50(last))], apart = Math.max(0, 12 - (b - a)) / 2;
    root.append(svg("text", { class: "end-slow", x: at, y: a + 4 - apart, text: "p99" }), svg("text", { class: "end-median", x: at, y: b + 4 + apart, text: "p50" }));
  }
  root.append(svg("line", { class: "cursor", y1: frame.top, y2: bottom, x1: -9, x2: -9 }));
  root.setAttribute("aria-label", last ? `Durations of requests, latest: median ${duration(p50(last))}, 99th percentile ${duration(p99(last))}` : "No durations");
  finish(plot, chart, found.length === 0, state.filter && state.filter.rule !== undefined ? "durations are measured by route" : `no requests ${rangeText()}`);
}
// Shows the values at a time in both charts.
function moveCursor(plot, at) {
  const sample = at === null || at === undefined ? null : state.samples.find(sample => sample.end >= at);
  for (const id of ["traffic", "latency"]) {
    const other = $(id), cursor = other.querySelector(".cursor");
    other.at = sample ? at : null;
    other.querySelectorAll(".tip").forEach(node => node.remove());
    if (!cursor || !other.chart) continue;
    const x = sample ? other.chart.x(sample.end - sample.ms / 2) : -9;
    set(cursor, { x1: x, x2: x, visibility: sample && x >= frame.left ? "visible" : "hidden" });
    if (!sample || other !== plot) continue;
    const [all, refused, failed, p50, p99] = shown(sample, state.filter);
    const rows = [["all", `${rate(perSecond(all, sample))} /s`], ["refused", `${rate(perSecond(refused, sample))} /s · ${share(refused, all)}`]];
    if (!state.filter || state.filter.rule === undefined) rows.push(["failed", `${rate(perSecond(failed, sample))} /s`], ["p50 · p99", `${duration(p50)} · ${duration(p99)}`]);
    if (wasDown("", sample)) rows.push(["shared store", "unreachable"]);
    const tip = el("div", { class: "tip", role: "status" }, el("strong", { text: `${clockTime(sample.end - sample.ms, true)} – ${clockTime(sample.end, true)}` }), el("dl", {}, ...rows.flatMap(([name, value]) => [el("dt", { text: name }), el("dd", { text: value })])));
    other.append(tip);
    tip.style.left = `${Math.min(Math.max(x > other.clientWidth / 2 ? x - tip.offsetWidth - 10 : x + 10, 0), Math.max(other.clientWidth - tip.offsetWidth, 0))}px`;
  }
}
for (const id of ["traffic", "latency"]) {
  const plot = $(id);
  plot.addEventListener("pointermove", event => {
    if (!plot.chart) return;
    const share = (event.clientX - plot.getBoundingClientRect().left - frame.left) / (plot.chart.width - frame.left - frame.right);
    moveCursor(plot, share >= 0 && share <= 1 ? plot.chart.end + (share - 1) * state.range.ms : null);
  });
  plot.addEventListener("pointerleave", () => moveCursor(plot, null));
  plot.addEventListener("blur", () => moveCursor(plot, null));
  plot.addEventListener("keydown", event => {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity, Escape: null }[event.key];
    if (step === undefined || !state.samples.length) return;
    event.preventDefault();
    const last = state.samples.length - 1, position = plot.at ? state.samples.findIndex(sample => sample.end >= plot.at) : last + 1;
    moveCursor(plot, step === null ? null : state.samples[Math.min(Math.max(position + step, 0), last)].end);
  });
}
// A small chart of a row by slots: all, and at its bottom what was refused, and on top of that what failed.
function drawSpark(root, width, height, values, slots) {
  const most = Math.max(1e-9, ...values.map(([, all]) => all)), bar = width / slots;
  const path = (amount, below) => values.map(value => {
    const base = height - below(value) / most * (height - 1), top = base - Math.max(amount(value) / most * (height - 1), 1);
    return amount(value) ? `M${(value[0] * bar).toFixed(1)},${base.toFixed(1)}V${top.toFixed(1)}h${Math.max(bar - .6, 1).toFixed(1)}V${base.toFixed(1)}z` : "";
  }).join("");
  const none = () => 0, all = ([, all]) => all, refused = ([, , refused]) => refused, failed = ([, , , failed]) => failed || 0;
  if (!root.firstChild) root.append(svg("path", { class: "answered" }), svg("path", { class: "refused" }), svg("path", { class: "failed" }), svg("line", { class: "axis" }));
  set(root, { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true", preserveAspectRatio: "none" });
  set(root.children[0], { d: path(all, none) });
  set(root.children[1], { d: path(refused, none) });
  set(root.children[2], { d: path(failed, refused) });
  set(root.children[3], { x1: 0, x2: width, y1: height, y2: height });
}
// [slot, all, refused, failed] of the range in slots.
const slotCount = () => Math.min(60, state.range.ms / SAMPLE);
function sparkValues(of) {
  const slots = new Map(), start = now() - state.range.ms, most = slotCount();
  for (const sample of state.samples) {
    const slot = Math.min(Math.floor((sample.end - 1 - start) / state.range.ms * most), most - 1);
    if (slot < 0) continue;
    const [all, refused, failed = 0] = of(sample), sum = slots.get(slot) || [slot, 0, 0, 0];
    slots.set(slot, [slot, sum[1] + all, sum[2] + refused, sum[3] + failed]);
  }
  return [...slots.values()];
}
function rangeSums(filter) {
  const sums = [0, 0, 0];
  for (const sample of state.samples) shown(sample, filter).slice(0, 3).forEach((n, i) => sums[i] += n);
  return sums;
}
function drawLegends() {
  const swatch = (name, striped) => svg("svg", { viewBox: "0 0 16 10", "aria-hidden": "true" }, svg("rect", { class: name, width: 16, height: 10, rx: 2 }), ...(striped ? [svg("rect", { fill: "url(#stripes-refused)", width: 16, height: 10, rx: 2 })] : []));
  const stroke = name => svg("svg", { viewBox: "0 0 16 10", "aria-hidden": "true" }, svg("line", { class: name, x1: 0, x2: 16, y1: 5, y2: 5 }));
  const ofRule = state.filter && state.filter.rule !== undefined;
  const box = name => svg("svg", { viewBox: "0 0 16 10", "aria-hidden": "true" }, svg("rect", { class: name, width: 16, height: 10 }));
  const flag = bad => svg("svg", { viewBox: "0 0 16 10", "aria-hidden": "true" }, svg("path", { class: `flag-mark ${bad ? "flag-bad" : ""}`, d: "M4,1h8l-4,7z" }));
  const recent = (state.config ? state.config.reloads : []).filter(reload => reload.time > now() - state.range.ms);
  const events = [
    downtimesOf("").length ? el("li", {}, box("outage"), "shared store unreachable") : null,
    recent.some(reload => reload.problem === null) ? el("li", {}, flag(false), "reload") : null,
    recent.some(reload => reload.problem !== null) ? el("li", {}, flag(true), "rejected reload") : null,
    state.samples.length && state.samples[0].end - state.samples[0].ms > now() - state.range.ms + state.samples[0].ms ? el("li", {}, box("gap"), "no data") : null,
  ].filter(item => item);
  const layers = ofRule ? [["answered", "admitted"], ["refused", "refused, or would be"]] : LAYERS;
  $("traffic-legend").replaceChildren(...layers.map(([name, text]) => el("li", {}, swatch(name, name === "refused"), text)), ...events);
  $("latency-legend").replaceChildren(el("li", {}, stroke("slow"), "99th percentile"), el("li", {}, stroke("median"), "median"));
  const title = $("traffic-title"), chosen = state.filter;
  title.replaceChildren(chosen ? (ofRule ? `Rule ${chosen.rule}` : `Route ${routeName(chosen.route)}`) : "Requests", ` ${rangeText()}`);
  if (chosen) title.append(" ", el("button", { type: "button", class: "plain", text: "show all", on: { click: () => choose(null) } }));
}
function drawTable() {
  const details = $("values");
  if (!details.open) return;
  const rows = new Map(), length = state.range.ms / 12;
  for (const sample of state.samples) {
    const slot = Math.floor((sample.end - 1) / length), row = rows.get(slot) || [0, 0, 0, null, null];
    const [all, refused, failed, p50, p99] = shown(sample, state.filter);
    rows.set(slot, [row[0] + all, row[1] + refused, row[2] + failed, p50 === null ? row[3] : p50, p99 === null ? row[4] : Math.max(row[4], p99)]);
  }
  const cells = values => values.map(text => el("td", { text }));
  details.querySelector("div").replaceChildren(el("table", {},
    el("thead", {}, el("tr", {}, ...[`${span(length)} from`, "Requests", "Refused", "Failed", "Median, latest", "p99, highest"].map(text => el("th", { scope: "col", text })))),
    el("tbody", {}, ...[...rows].reverse().map(([slot, [all, refused, failed, p50, p99]]) => el("tr", {}, el("th", { scope: "row", text: clockTime(slot * length) }), ...cells([grouped(all), grouped(refused), grouped(failed), duration(p50), duration(p99)]))))));
}
$("values").addEventListener("toggle", drawTable);
function drawCharts() {
  drawLegends(); drawTraffic(); drawLatency(); drawTable();
}
function choose(filter) {
  state.filter = filter;
  drawCharts(); drawRoutes(); drawRules();
}

// --- Numbers of now ---------------------------------------------------------------------------------------------------
// The mean of the last seconds, and the durations of the last one with requests.
function current(of) {
  const recent = state.live.length ? state.live.slice(-5) : state.samples.slice(-1);
  const ms = recent.reduce((sum, sample) => sum + sample.ms, 0), sums = [0, 0, 0];
  let p50 = null, p99 = null;
  for (const sample of recent) {
    const values = of(sample);
    sums.forEach((_, i) => sums[i] += values[i]);
    if (values[4] !== null && values[4] !== undefined) [p50, p99] = values.slice(3);
  }
  return { rates: sums.map(sum => sum * 1000 / Math.max(ms, 1)), sums, p50, p99 };
}
function drawTiles() {
  const { rates, sums, p50, p99 } = current(sample => sample.all), inRange = rangeSums(null), snapshot = state.snapshot;
  const table = snapshot.counters, filled = table.live / Math.max(table.live + table.free, 1);
  const tiles = [
    ["Requests", rate(rates[0]), "/s", `${count(inRange[0])} ${rangeText()}`, "spark"],
    ["Refused", share(sums[1], sums[0]).replace(" %", ""), sums[0] ? "%" : "", `${count(inRange[1])} ${rangeText()}`, "spark"],
    ["Failed (5xx)", share(sums[2], sums[0]).replace(" %", ""), sums[0] ? "%" : "", `${count(inRange[2])} ${rangeText()}`],
    ["Duration, p99", ...`${duration(p99)} `.split(" ").slice(0, 2), `median ${duration(p50)}`],
    ["In flight", grouped(snapshot.requests_active), "", `${plural(snapshot.connections, "connection")}${snapshot.requests_delayed ? `, ${grouped(snapshot.requests_delayed)} waiting` : ""}`],
    ["Counter table", share(table.live, table.live + table.free).replace(" %", ""), "% full", `${count(table.live)} of ${count(table.live + table.free)}${table.overflow ? `, ${count(table.overflow)} by overflow` : ""}`, "meter"],
  ];
  list($("tiles"), tiles, ([name]) => name, ([name, , , , kind]) => {
    const node = el("div", {}, el("dt", { text: name }), el("dd", {}, "", el("span")), el("dd", { class: "more" }));
    if (kind === "meter") node.id = "counters";
    if (kind) node.append(el("dd", {}, kind === "meter" ? el("span", { class: "meter" }, el("i")) : svg("svg", { height: 22, width: "100%" })));
    return node;
  }, (node, [, value, unit, more, kind]) => {
    const main = node.children[1];
    if (main.firstChild.data !== value) main.firstChild.data = value;
    set(main.lastChild, { text: ` ${unit}` });
    set(node.children[2], { text: more });
    if (kind === "meter") {
      node.querySelector("i").style.width = `${Math.max(filled * 100, 0.5)}%`;
      node.querySelector(".meter").classList.toggle("high", filled > 0.8);
    } else if (kind) {
      const recent = state.live.slice(-60), isAll = node === $("tiles").firstElementChild;
      drawSpark(node.querySelector("svg"), 240, 22, recent.map((sample, i) => [60 - recent.length + i, isAll ? perSecond(sample.all[0], sample) : perSecond(sample.all[1], sample), perSecond(sample.all[1], sample), isAll ? perSecond(sample.all[2], sample) : 0]), 60);
    }
  });
}
function troubles() {
  const { snapshot, config } = state, found = [];
  const servers = snapshot.upstreams.flatMap(upstream => upstream.servers);
  const down = servers.filter(server => serverState(server)[0] !== "ok");
  found.push(["upstreams", "Upstreams", ...(servers.length === 0 ? ["ok", "built in"] : down.length === 0 ? ["ok", `${plural(servers.length, "server")} in use`] : [down.length === servers.length ? "bad" : "warn", `${down.length} of ${plural(servers.length, "server")} in trouble`])]);
  const shared = snapshot.shared;
  found.push(["store", "Shared store", ...(shared === null ? ["ok", "not used"] : shared.unreachable ? ["bad", "unreachable"] : shared.evicting ? ["warn", "evicts counters"] : ["ok", "reachable"])]);
  const filled = snapshot.counters.live / Math.max(snapshot.counters.live + snapshot.counters.free, 1);
  found.push(["counters", "Counter table", filled > 0.98 ? "bad" : filled > 0.8 ? "warn" : "ok", `${share(snapshot.counters.live, snapshot.counters.live + snapshot.counters.free)} full`]);
  const reload = config && config.reloads[0];
  found.push(["config", "Configuration", ...(!reload ? ["ok", "as at the start"] : reload.problem === null ? ["ok", `reloaded ${span(snapshot.time - reload.time)} ago`] : ["bad", `reload rejected ${span(snapshot.time - reload.time)} ago`])]);
  return found;
}
function drawStatus() {
  list($("status"), troubles(), ([id]) => id, ([id, name]) => el("li", {}, el("a", { href: `#${id}` }, el("span", { class: "mark" }), el("small"))),
    (node, [, name, mark, text]) => {
      set(node.querySelector(".mark"), { class: `mark ${mark}`, text: name });
      set(node.querySelector("small"), { text });
    });
}

// --- Tables -----------------------------------------------------------------------------------------------------------
const cell = (classes = "") => el("td", { class: classes });
const ROWS = 10, ROWS_MAX = 500;
// The rows of a table that are shown: those that match its search, and of many only the first. `text` is what is searched.
function selectRows(section, rows, text, empty) {
  const words = section.querySelector("[type=search]").value.toLowerCase().split(/\s+/).filter(word => word);
  const found = words.length ? rows.filter(row => words.every(word => text(row).toLowerCase().includes(word))) : rows;
  const shown = found.slice(0, section.showsAll ? ROWS_MAX : ROWS), more = section.querySelector(".more"), left = found.length - ROWS;
  set(section.querySelector(".none"), { text: rows.length ? "Nothing matches the search." : empty, hidden: found.length > 0 });
  set(more, { text: section.showsAll ? `Show ${ROWS} only` : `Show ${grouped(left)} more`, hidden: left <= 0 });
  return shown;
}
function searchable(section, draw) {
  section.querySelector("[type=search]").addEventListener("input", draw);
  section.querySelector(".more").addEventListener("click", () => { section.showsAll = !section.showsAll; draw(); });
}
for (const [id, draw] of [["routes", () => drawRoutes()], ["rules", () => drawRules()]]) {
  const section = $(id), fold = section.querySelector(".fold");
  searchable(section, draw);
  fold.addEventListener("click", () => {
    const isOpen = fold.getAttribute("aria-expanded") === "false";
    set(fold, { "aria-expanded": String(isOpen) });
    for (const node of section.querySelectorAll(".body, [type=search], .head small")) node.hidden = !isOpen;
    draw();
  });
}
const isFolded = section => section.querySelector(".fold").getAttribute("aria-expanded") === "false";
function drawRoutes() {
  const section = $("routes"), rows = new Map();
  if (isFolded(section)) return;
  for (const route of state.config ? state.config.routes : []) rows.set(route.name, { name: route.name, path: route.path, sums: [0, 0, 0], p50: null, p99: null });
  const recent = now() - 60e3;
  for (const sample of state.samples) for (const [name, values] of sample.routes) {
    if (!rows.has(name)) rows.set(name, { name, path: "", sums: [0, 0, 0], p50: null, p99: null });
    const row = rows.get(name);
    row.sums.forEach((_, i) => row.sums[i] += values[i]);
    if (sample.end > recent && values[4] !== null) [row.p50, row.p99] = values.slice(3);
  }
  const sorted = [...rows.values()].sort((a, b) => b.sums[0] - a.sums[0]);
  const shownRows = selectRows(section, sorted, row => `${routeName(row.name)} ${row.path}`, "No route is configured.");
  list(section.querySelector("tbody"), shownRows, row => row.name, row => {
    const node = el("tr", {}, el("th", { scope: "row" }, el("button", { type: "button", class: "plain", on: { click: () => choose(state.filter && state.filter.route === row.name ? null : { route: row.name }) } }), el("small")), el("td", {}, svg("svg", { class: "spark" })));
    node.append(cell("minor"), cell("minor"), cell(), cell("minor"), cell("minor"), cell("minor"));
    return node;
  }, (node, row) => {
    const [head, spark, live, all, refused, failed, median, p99] = node.children;
    set(head.firstChild, { text: routeName(row.name), "aria-pressed": String(Boolean(state.filter && state.filter.route === row.name)) });
    set(head.lastChild, { text: row.path === row.name ? "" : row.path });
    drawSpark(spark.firstChild, 132, 26, sparkValues(sample => routeOf(sample, row.name)), slotCount());
    const latest = current(sample => routeOf(sample, row.name));
    set(live, { text: rate(latest.rates[0]) });
    set(all, { text: count(row.sums[0]) });
    partOf(refused, row.sums[1], row.sums[0]);
    set(failed, { text: count(row.sums[2]) });
    // As in the tiles; of a route with few requests, the latest of the last minute.
    set(median, { text: duration(latest.p50 === null ? row.p50 : latest.p50) });
    set(p99, { text: duration(latest.p99 === null ? row.p99 : latest.p99) });
  });
}
const partOf = (node, part, whole) => textAnd(node, count(part), share(part, whole));
function textAnd(node, text, small) {
  if (!node.firstChild) node.append("", el("small"));
  if (node.firstChild.data !== text) node.firstChild.data = text;
  set(node.lastChild, { text: small });
}
function drawRules() {
  const section = $("rules"), rows = new Map(), blank = () => [0, 0, 0, 0, 0];
  if (isFolded(section)) return;
  for (const rule of state.config ? state.config.rules : []) rows.set(rule.name, { name: rule.name, rule, sums: blank(), windows: new Map(), usage: new Map() });
  for (const sample of state.samples) {
    for (const [, name, counts] of sample.rules) {
      if (!rows.has(name)) rows.set(name, { name, rule: null, sums: blank(), windows: new Map(), usage: new Map() });
      counts.forEach((n, i) => rows.get(name).sums[i] += n);
    }
    for (const part of ["windows", "usage"]) for (const [name, of, n] of sample[part] || []) {
      const sums = rows.has(name) ? rows.get(name)[part] : new Map();
      sums.set(of, (sums.get(of) || 0) + n);
    }
  }
  const shownRows = selectRows(section, [...rows.values()], row => `${row.name} ${row.rule ? row.rule.key.join(" ") : ""}`, "No rule is configured: nothing is limited.");
  list(section.querySelector("tbody"), shownRows, row => row.name, row => {
    const node = el("tr", {}, el("th", { scope: "row" }, el("button", { type: "button", class: "plain", on: { click: () => choose(state.filter && state.filter.rule === row.name ? null : { rule: row.name }) } }), el("small")), cell("left minor"), el("td", {}, svg("svg", { class: "spark" })));
    node.append(cell("minor"), cell(), cell("minor"), cell("minor"), cell("left minor"));
    return node;
  }, (node, row) => {
    const [head, limits, spark, admitted, refused, delayed, exempt, full] = node.children, { rule, sums } = row;
    const all = sums.reduce((a, b) => a + b, 0), bad = sums[1] + sums[3];
    set(head.firstChild, { text: row.name, "aria-pressed": String(Boolean(state.filter && state.filter.rule === row.name)) });
    set(head.lastChild, { text: rule ? `by ${rule.key.join(", ")}` : "no longer configured" });
    const texts = !rule ? [] : [
      rule.limits.join(", "),
      ...rule.plans.map(plan => `${plan.name}: ${plan.limits.join(", ")}`),
      rule.plan_count > rule.plans.length ? `and ${plural(rule.plan_count - rule.plans.length, "more plan")}` : "",
      [rule.on_limit === "refuse" ? "" : rule.on_limit, rule.shared ? "shared" : ""].filter(text => text).join(", "),
    ].filter(text => text);
    if (limits.shown !== JSON.stringify(texts)) {
      limits.shown = JSON.stringify(texts);
      limits.replaceChildren(...texts.map((text, i) => i ? el("small", { text }) : text));
    }
    drawSpark(spark.firstChild, 132, 26, sparkValues(sample => { const [a, b, c, d, e] = ruleSum(sample, row.name); return [a + b + c + d + e, b + d]; }), slotCount());
    textAnd(admitted, count(sums[0]), [...row.usage].map(([kind, n]) => `${count(n)} ${kind.replaceAll("_", " ")}`).join(", "));
    partOf(refused, bad, all);
    if (sums[3]) set(refused.lastChild, { text: `${share(bad, all)}, shadow` });
    set(delayed, { text: count(sums[2]) });
    set(exempt, { text: count(sums[4]) });
    const windows = [...row.windows].sort((a, b) => b[1] - a[1]).slice(0, 3);
    list(full, windows.length ? windows : [["–", null]], ([name]) => name, () => el("div", {}, "", el("small")), (line, [name, n]) => { line.firstChild.data = name; set(line.lastChild, { text: n === null ? "" : ` ${count(n)}`, hidden: n === null }); });
  });
}
function drawKeys() {
  const section = $("keys"), top = state.snapshot.top, none = section.querySelector(".none"), by = state.keysBy;
  const rules = (top && top[by]) || [];
  options($("keys-rule"), rules.map(rule => rule.rule), "all rules");
  set($("keys-count"), { text: by === "refused" ? "Refused" : "Admitted" });
  const rows = rules.filter(rule => !state.keysRule || rule.rule === state.keysRule).flatMap(rule => rule.keys.map(key => ({ rule, key })));
  rows.sort((a, b) => b.key.count - b.key.error - a.key.count + a.key.error);
  list(section.querySelector("tbody"), rows.slice(0, 12), ({ rule, key }) => JSON.stringify([rule.rule, key.id]), ({ rule, key }) => {
    const isReadable = !key.fallback && key.key.every(part => part.value !== null && !part.value.startsWith("hmac-"));
    const values = isReadable ? key.key.filter(part => part.part !== "global").map(part => part.value) : [];
    const button = el("button", { type: "button", class: "plain", text: "Look up", "aria-label": `Look up ${key.label}`, on: { click: () => lookUp(rule.rule, values, isReadable ? null : key) } });
    return el("tr", {}, el("th", { scope: "row" }, el("span", { class: "key" }), el("small")), cell("left minor"), cell(), cell("minor"), el("td", {}, button));
  }, (node, { rule, key }) => {
    const [head, name, counted, part] = node.children;
    set(head.firstChild, { text: key.label });
    set(head.lastChild, { text: [key.client === null ? "" : "client", key.fallback ? `by ${key.key.map(part => part.part).join(", ")}` : ""].filter(text => text).join(", ") });
    set(name, { text: rule.shadow ? `${rule.rule} (shadow)` : rule.rule });
    set(counted, { text: `${key.error ? "≤ " : ""}${count(key.count)}` });
    set(part, { text: share(key.count, rule.total) });
  });
  const text = state.config && !state.config.top_keys ? "Keys are not counted: [admin] top_keys is 0." : !top ? "Waiting for the counts of the workers." : by === "refused" ? "No key was refused in the last 30 to 60 minutes." : "No key was admitted in the last 30 to 60 minutes.";
  set(none, { text, hidden: rows.length > 0 });
}
function serverState(server) {
  if (server.state === "in" && server.failures_in_a_row > 0) return ["warn", `${plural(server.failures_in_a_row, "failure")} in a row`];
  return { "in": ["ok", "in use"], "slow-start": ["ok", "slow start"], failing: ["warn", "failing"], ejected: ["bad", "ejected"], unhealthy: ["bad", "unhealthy"] }[server.state] || ["wait", server.state];
}
// A strip of the range, with the times in which a server was down.
function drawDowntimes(strip, url) {
  const found = downtimesOf(url), x = at => Math.max(100 - (now() - at) / state.range.ms * 100, 0);
  const d = found.map(({ start, end }) => `M${x(start).toFixed(2)},0H${Math.max(x(end), x(start) + .5).toFixed(2)}V4H${x(start).toFixed(2)}z`).join("");
  set(strip.firstChild, { d });
  set(strip, { "aria-label": found.length ? `down ${found.map(({ start, end }) => `${clockTime(start)} – ${clockTime(end)}`).join(", ")}` : `not down ${rangeText()}` });
}
function drawUpstreams() {
  const section = $("upstreams"), rows = state.snapshot.upstreams.flatMap(upstream => upstream.servers.map(server => ({ upstream, server, id: JSON.stringify([upstream.name, server.url]) })));
  const known = new Map();
  list(section.querySelector("tbody"), rows, row => row.id, () => el("tr", {}, el("th", { scope: "row" }, el("span"), el("small"), svg("svg", { class: "downtime", viewBox: "0 0 100 4", preserveAspectRatio: "none", role: "img" }, svg("path"))), el("td", { class: "left" }, el("span", { class: "mark" })), cell(), cell("minor"), cell()), (node, { upstream, server, id }) => {
    const [head, mark, active, speed, failed] = node.children, before = state.upstreams.get(id), requests = server.requests || 0, time = state.snapshot.time;
    const [kind, text] = serverState(server);
    set(head.firstChild, { text: server.url.replace(/^http:\/\//, "") });
    drawDowntimes(head.lastChild, server.url);
    set(head.children[1], { text: `${upstream.name}, weight ${server.weight}${upstream.pending ? `, ${upstream.pending} pending` : ""}` });
    set(mark.firstChild, { class: `mark ${kind}`, text });
    set(active, { text: grouped(server.active || 0) });
    if (before && time > before.time) set(speed, { text: rate(Math.max(requests - before.requests, 0) * 1000 / (time - before.time)) });
    partOf(failed, server.failed || 0, requests);
    known.set(id, { time, requests });
  });
  state.upstreams = known;
  set(section.querySelector(".none"), { text: "All upstreams are built in.", hidden: rows.length > 0 });
}
function facts(node, rows) {
  list(node, rows.flatMap(([name, value]) => [[`${name}:`, name, "dt"], [name, value, "dd"]]), ([id]) => id, ([, , tag]) => el(tag), (part, [, text]) => set(part, { text }));
}
function drawParts() {
  const { shared } = state.snapshot;
  const store = $("store").querySelector("dl");
  if (shared === null) facts(store, [["counters", "of this gateway alone"]]);
  else {
    const total = Object.values(shared.calls).reduce((a, b) => a + b, 0), failed = ["error", "unreachable", "timeout"].map(name => [name, shared.calls[name] || 0]).filter(([, n]) => n > 0);
    facts(store, [
      ["store", shared.store], ["state", shared.unreachable ? "unreachable" : shared.evicting ? "evicts counters: limits are lost" : "reachable"],
      ["calls since the start", count(total)], ["failed", failed.length ? failed.map(([name, n]) => `${count(n)} ${name}`).join(", ") : "none"],
      ["duration", `median ${duration(shared.p50)}, p99 ${duration(shared.p99)}`], ["decided during outages", count(shared.outage_decisions)], ["outages", plural(shared.outages, "outage")],
    ]);
  }
  const outages = [...downtimesOf("")].reverse();
  list($("store").querySelector("ul"), shared === null ? [] : outages.slice(0, 8), ({ start }) => String(start), () => el("li"), (node, { start, end }) => set(node, { text: `unreachable ${clockTime(start)} – ${clockTime(end)}, ${span(end - start)}` }));
  const reloads = state.config ? state.config.reloads : [];
  list($("config").querySelector("ol"), reloads.length ? reloads.slice(0, 5) : [null], reload => reload ? `${reload.time} ${reload.problem}` : "", reload => reload
    ? el("li", {}, el("span", { class: `mark ${reload.problem === null ? "ok" : "bad"}`, text: reload.problem === null ? "applied" : "rejected" }), " ", el("small"), reload.problem === null ? null : el("pre", { text: reload.problem, tabindex: 0 }))
    : el("li", { class: "dim", text: "No reload since the start." }),
  (node, reload) => reload && set(node.querySelector("small"), { text: `${clockTime(reload.time, true)}, ${span(now() - reload.time)} ago` }));
  const errors = new Map();
  for (const sample of state.samples) for (const [name, n] of sample.errors) errors.set(name, (errors.get(name) || 0) + n);
  $("errors").querySelector(".none").hidden = errors.size > 0;
  list($("errors").querySelector("ul"), [...errors].sort((a, b) => b[1] - a[1]), ([name]) => name, () => el("li", {}, el("strong"), " ", el("small")), (node, [name, n]) => { set(node.firstChild, { text: count(n) }); set(node.lastChild, { text: name }); });
}

// --- Token and requests -----------------------------------------------------------------------------------------------
const TOKEN = "transom-admin-token";
const token = () => sessionStorage.getItem(TOKEN) || "";
const isTokenUsed = () => Boolean(token() || (state.config && state.config.token_required));
// Whether changes can be asked for.
const mayChange = () => Boolean(token() || (state.config && !state.config.token_required));
function askForToken(text) {
  $("sign-in").hidden = false;
  set($("token-button"), { "aria-expanded": "true", hidden: false });
  set($("token-text"), { text, class: text ? "mark bad" : "" });
  $("token").value = token();
  $("token-forget").hidden = !token();
  if (!text) $("token").focus();
}
function closeTokenForm() {
  $("sign-in").hidden = true;
  set($("token-button"), { "aria-expanded": "false", text: token() ? "Token set" : "Token…", hidden: !isTokenUsed() });
}
function useToken(value) {
  if (value) sessionStorage.setItem(TOKEN, value); else sessionStorage.removeItem(TOKEN);
  closeTokenForm();
  connect();
}
$("token-button").addEventListener("click", () => { if ($("sign-in").hidden) askForToken(""); else closeTokenForm(); });
$("token-form").addEventListener("submit", event => { event.preventDefault(); useToken($("token").value); });
$("token-forget").addEventListener("click", () => useToken(""));

const authorization = () => token() ? { authorization: `Bearer ${token()}` } : {};
async function call(method, path, query, headers = {}) {
  const body = query === undefined ? {} : { body: JSON.stringify(query) };
  const response = await fetch(path, { method, headers: { "content-type": "application/json", ...authorization(), ...headers }, ...body, signal: AbortSignal.timeout(10e3) });
  const text = await response.text(), isText = (response.headers.get("content-type") || "").startsWith("text/plain");
  let found = text;
  if (!isText) try { found = JSON.parse(text); } catch { found = {}; }
  if (response.status === 401) {
    const problem = token() ? "The token is wrong." : "A token is required.";
    askForToken(problem);
    throw new Error(problem);
  }
  if (!response.ok) throw new Error(found.detail || `The gateway responded with ${response.status}.`);
  return found;
}
const ask = (path, query) => call("POST", path, query);
const hasNoResponse = error => error.name === "TimeoutError" || error instanceof TypeError;
const explainError = error => hasNoResponse(error) ? "The gateway does not respond." : error.message;
const showError = (node, error) => set(node, { text: error ? explainError(error) : "", class: error ? "mark bad" : "" });
// Which paths the gateway has: it may be of another version than this page expects.
async function readOffers() {
  try { state.offers = (await call("GET", "/v1/openapi.json")).paths || {}; } catch { state.offers = {}; }
}
const offers = (method, path) => mayChange() && Boolean(state.offers[path] && state.offers[path][method]);
// Without [access] there is no list to add an entry to.
const canBlock = () => offers("post", "/v1/deny") && state.config.access;
const canGrant = () => offers("post", "/v1/clients/{name}/grants");

// --- Block and grant --------------------------------------------------------------------------------------------------
const TIMES = [["15 minutes", 15], ["1 hour", 60], ["8 hours", 480], ["1 day", 1440], ["1 week", 10080]];
let runAction = null;
// Opens the dialog. `run` makes the change, and returns what it did.
function openAction(title, button, fields, run) {
  set($("action-title"), { text: title });
  set($("action-do"), { text: button, disabled: false });
  set($("action-close"), { text: "Cancel" });
  showError($("action-error"), null);
  $("action-fields").replaceChildren(...fields.map(([name, input]) => el("label", {}, name, input)));
  runAction = run;
  $("action").showModal();
}
$("action-close").addEventListener("click", () => $("action").close());
$("action-form").addEventListener("submit", async event => {
  event.preventDefault();
  set($("action-do"), { disabled: true });
  showError($("action-error"), null);
  try {
    set($("action-error"), { text: await runAction(), class: "mark ok" });
    set($("action-close"), { text: "Close" });
  } catch (error) {
    showError($("action-error"), error);
    set($("action-do"), { disabled: false });
  }
});
// `entry` is what is denied: a network, a client, or a key.
function block(label, entry) {
  const time = el("select", {}, ...TIMES.map(([text, minutes]) => el("option", { value: minutes, text, selected: minutes === 60 })));
  const reason = el("input", { spellcheck: "false" });
  openAction(`Block ${label}`, "Block", [["For", time], ["Reason, for the log", reason]], async () => {
    const until = new Date(now() + time.value * 60e3).toISOString().replace(/\.\d+Z/, "Z");
    await ask("/v1/deny", { ...entry, until, ...(reason.value ? { reason: reason.value } : {}) });
    return `Blocked until ${clockTime(Date.parse(until))}: requests get 403.`;
  });
}
function grant(client) {
  const windows = client.usage.rules.filter(rule => !rule.store).flatMap(rule => (rule.windows || []).map(window => ({ rule: rule.rule, window: window.name })));
  if (!windows.length) throw new Error(`No rule counts ${client.name} alone.`);
  const choice = el("select", {}, ...windows.map(({ window }, i) => el("option", { value: i, text: window })));
  const tokens = el("input", { type: "number", min: 1, value: 100, required: true });
  // Equal for all attempts of one grant.
  const key = [...crypto.getRandomValues(new Uint8Array(16))].map(byte => byte.toString(16).padStart(2, "0")).join("");
  openAction(`Grant ${client.name} more`, "Grant", [["Current window", choice], ["Tokens", tokens]], async () => {
    await call("POST", `/v1/clients/${encodeURIComponent(client.name)}/grants`, { ...windows[choice.value], tokens: Number(tokens.value) }, { "idempotency-key": key });
    readUsage();
    return `Granted ${grouped(Number(tokens.value))} in ${windows[choice.value].window}.`;
  });
}
// What blocks a key: the client that it names, the network or the value of its only part; null for others.
function denyEntry(rule, values, client) {
  const parts = partsOf(rule);
  if (client) return { client };
  if (parts.length !== 1 || values.length !== 1) return null;
  if (parts[0] === "client") return { client: values[0] };
  return parts[0].startsWith("ip") ? { network: values[0] } : parts[0].startsWith("json:") ? null : { key: { part: parts[0], value: values[0] } };
}

// --- Look up a key ----------------------------------------------------------------------------------------------------
const partsOf = rule => { const found = state.config && state.config.rules.find(known => known.name === rule); return found ? found.key.filter(part => part !== "global") : []; };
function drawLookupForm() {
  options($("lookup-rule"), state.config.rules.map(rule => rule.name));
  $("lookup-button").disabled = state.config.rules.length === 0;
  const parts = partsOf($("lookup-rule").value), box = $("lookup-parts");
  list(box, parts.length ? parts.map((part, i) => `${i} ${part}`) : ["global"], name => name, name => name === "global"
    ? el("p", { class: "dim", text: "This rule has one counter for all requests." })
    : el("label", {}, name.slice(name.indexOf(" ") + 1), el("input", { autocomplete: "off", spellcheck: "false", required: true })), () => {});
}
$("lookup-rule").addEventListener("change", () => { clearLookup(); drawLookupForm(); });
// Responses to former look-ups are not shown.
let lookupNumber = 0;
function clearLookup() {
  lookupNumber++;
  state.lookup = null;
  set($("lookup-error"), { text: "" });
  $("lookup-result").replaceChildren();
  $("reset-button").hidden = true;
  $("block-button").hidden = $("grant-button").hidden = true;
  disarm();
}
function showLookup(query, value, label) {
  const box = $("lookup-result"), rows = [...value.windows.map(window => ({ ...window, until: `resets in ${span(window.ttl * 1e3)}` })), ...(value.concurrent || []).map(slots => ({ ...slots, until: "in flight" }))];
  const notes = [value.exempt ? "No rule counts this key: it is exempt." : "", value.unknown_key ? "The key names no client." : "", value.store ? "The store cannot be reached: these are counts of this gateway." : "", value.exempt || value.unknown_key ? "" : value.allowed ? "The next request is admitted." : `The next request is refused${value.retry_after ? `, for ${span(value.retry_after * 1e3)}` : ""}.`].filter(text => text);
  list(box, [{ title: true }, ...rows], row => row.title ? "" : row.name, row => row.title ? el("p", {}, el("strong", { class: "key" }), el("span", { class: "mark" }), el("small")) : el("div", {}, el("div", { class: "pair" }, el("strong"), el("span")), el("span", { class: "meter" }, el("i")), el("small")), (node, row) => {
    if (row.title) {
      set(node.children[0], { text: label ? `${label}: ` : "" });
      set(node.children[1], { class: `mark ${value.allowed ? "ok" : "bad"}`, text: notes.join(" ") });
      return;
    }
    const [pair, meter, more] = node.children, part = row.limit ? row.count / row.limit : 1;
    set(pair.firstChild, { text: row.name });
    set(pair.lastChild, { text: `${grouped(row.count)} of ${grouped(row.limit)}` });
    meter.firstChild.style.width = `${Math.min(part, 1) * 100}%`;
    meter.classList.toggle("high", part > 0.8);
    set(more, { text: `${grouped(row.remaining)} left, ${row.until}` });
  });
  $("reset-button").hidden = false;
  const entry = denyEntry(query.rule, [].concat(query.key || []), value.client || (state.lookupClient === label ? label : null));
  $("block-button").hidden = !(entry && canBlock());
  $("grant-button").hidden = !(entry && entry.client && !value.store && canGrant());
  state.lookup = { query, label, entry };
}
// `listed`: a key of the lists whose values are not known here, because they are secret.
async function lookUp(rule, key, listed) {
  clearLookup();
  state.lookupClient = listed && listed.client;
  $("lookup-rule").value = rule;
  drawLookupForm();
  const inputs = [...$("lookup-parts").querySelectorAll("input")];
  inputs.forEach((input, i) => { input.value = key[i] === undefined ? "" : key[i]; });
  $("lookup").scrollIntoView({ block: "nearest" });
  await refreshLookup(listed ? { rule, id: listed.id } : { rule, ...(key.length ? { key } : {}) }, listed ? listed.label : key.join(" "));
}
// `isPeriodic`: the error of a former reset stays, and the values do while the gateway does not respond.
async function refreshLookup(query, label, path = "/v1/value", isPeriodic = false) {
  const number = lookupNumber;
  try {
    const value = await ask(path, query);
    if (number !== lookupNumber) return;
    if (!isPeriodic) set($("lookup-error"), { text: "" });
    showLookup(query, value, label);
    if (path === "/v1/reset") set($("lookup-result").firstChild.lastChild, { text: " Reset: its counts begin anew." });
  } catch (error) {
    if (number !== lookupNumber || (isPeriodic && hasNoResponse(error))) return;
    if (path === "/v1/value") clearLookup();
    showError($("lookup-error"), error);
  }
}
$("lookup-form").addEventListener("submit", event => {
  event.preventDefault();
  lookUp($("lookup-rule").value, [...$("lookup-parts").querySelectorAll("input")].map(input => input.value));
});
$("block-button").addEventListener("click", () => block(state.lookup.label, state.lookup.entry));
$("grant-button").addEventListener("click", async () => {
  const name = state.lookup.entry.client;
  try { grant({ name, usage: await call("GET", `/v1/clients/${encodeURIComponent(name)}`) }); } catch (error) { showError($("lookup-error"), error); }
});
const disarm = () => { const button = $("reset-button"); delete button.dataset.armed; set(button, { text: "Reset this key" }); };
$("reset-button").addEventListener("click", async () => {
  const button = $("reset-button"), lookup = state.lookup;
  if (!lookup) return;
  if (!button.dataset.armed) {
    button.dataset.armed = "yes";
    set(button, { text: "Forget its usage: confirm" });
    setTimeout(disarm, 6000);
    return;
  }
  disarm();
  await refreshLookup(lookup.query, lookup.label, "/v1/reset");
});
$("lookup-parts").addEventListener("input", () => { if (state.lookup) clearLookup(); });
// Values that are shown stay current.
setInterval(() => { if (state.lookup && state.connected && !document.hidden && !$("reset-button").dataset.armed) refreshLookup(state.lookup.query, state.lookup.label, "/v1/value", true); }, 2000);

// --- Clients ----------------------------------------------------------------------------------------------------------
const CLIENTS = 24, USAGE_MAX = 240;
// Reads the clients that match the search, up to a number.
let clientsRun = 0, clientsTimer = null;
async function readClients() {
  const run = ++clientsRun, query = new URLSearchParams({ limit: USAGE_MAX });
  for (const [name, id] of [["search", "clients-search"], ["plan", "clients-plan"]]) if ($(id).value) query.set(name, $(id).value);
  try {
    const found = [];
    let page;
    do {
      page = await call("GET", `/v1/clients?${query}`);
      if (run !== clientsRun) return;
      found.push(...page.clients);
      query.set("after", page.next);
    } while (page.next !== null && found.length < USAGE_MAX);
    const known = new Map((state.clients || []).map(client => [client.name, client]));
    state.clients = found.map(client => ({ ...client, usage: (known.get(client.name) || {}).usage }));
    Object.assign(state, { clientTotal: page.total, hasMoreClients: page.next !== null });
    showError($("clients-error"), null);
    drawClients();
    await readUsage();
  } catch (error) { showError($("clients-error"), error); }
}
// How much of its fullest window a client has used.
const fullest = client => client.usage ? Math.max(0, ...client.usage.rules.flatMap(rule => (rule.windows || []).map(({ count, limit }) => limit ? count / limit : 1))) : -1;
function selectClients() {
  const by = $("clients-sort").value, byName = (a, b) => a.name.localeCompare(b.name);
  return [...(state.clients || [])].sort(by === "usage" ? (a, b) => fullest(b) - fullest(a) || byName(a, b) : by === "plan" ? (a, b) => a.plan.localeCompare(b.plan) || byName(a, b) : byName);
}
const shownClients = () => selectClients().slice(0, $("clients").showsAll ? USAGE_MAX : CLIENTS);
// Reads the usage of the clients that are shown, or of all that may be sorted by it, a few at a time.
let usageRun = 0;
async function readUsage() {
  const run = ++usageRun, wanted = $("clients-sort").value === "usage" ? selectClients().slice(0, USAGE_MAX) : shownClients();
  const next = wanted[Symbol.iterator]();
  const work = async () => {
    for (const client of next) {
      if (run !== usageRun) return;
      client.usage = await call("GET", `/v1/clients/${encodeURIComponent(client.name)}`);
    }
  };
  try { await Promise.all([work(), work(), work(), work()]); showError($("clients-error"), null); } catch (error) { showError($("clients-error"), error); }
  if (run === usageRun) drawClients();
}
function drawUsage(box, client) {
  const windows = !client.usage ? [] : client.usage.rules.flatMap(rule => [
    ...(rule.windows || []).map(window => ({ id: `${rule.rule} ${window.name}`, name: window.name, ...window, until: `resets in ${span(window.ttl * 1e3)}${rule.store ? ", at this gateway: the store cannot be reached" : ""}` })),
    ...(rule.concurrent || []).map(slots => ({ id: `${rule.rule} slots ${slots.name}`, ...slots, until: "in flight" })),
    ...(rule.store && !rule.windows ? [{ id: rule.rule, name: rule.rule, until: "the store cannot be reached" }] : rule.exempt ? [{ id: rule.rule, name: rule.rule, until: "exempt" }] : !rule.windows && !rule.concurrent ? [{ id: rule.rule, name: rule.rule, until: `a counter for each ${rule.key.filter(part => part !== "client").join(", ")}` }] : []),
  ]);
  list(box, windows, window => window.id, () => el("div", {}, el("div", { class: "pair" }, el("span"), el("span")), el("span", { class: "meter" }, el("i")), el("small")), (node, { name, count, limit, until }) => {
    const [pair, meter, more] = node.children, part = limit ? count / limit : 1;
    set(pair.firstChild, { text: name });
    set(pair.lastChild, { text: count === undefined ? "" : `${grouped(count)} of ${grouped(limit)}` });
    meter.hidden = count === undefined;
    meter.firstChild.style.width = `${Math.min(part, 1) * 100}%`;
    meter.classList.toggle("high", part >= 0.8);
    set(more, { text: until });
  });
}
function drawClients() {
  const section = $("clients"), found = selectClients(), left = found.length - CLIENTS;
  for (const plan of [...found.map(client => client.plan), ...(state.config || { rules: [] }).rules.flatMap(rule => rule.plans.map(({ name }) => name))]) state.plans.add(plan);
  options($("clients-plan"), [...state.plans].sort(), "all plans");
  list(section.querySelector(".clients"), shownClients(), client => client.name, client => {
    const button = (text, act) => el("button", { type: "button", text, "aria-label": `${text.replace("…", "")} ${client.name}`, on: { click: () => act(state.clients.find(({ name }) => name === client.name)) } });
    return el("li", {}, el("div", { class: "pair" }, el("span", { class: "key" }), el("small")), el("small", { class: "about" }), el("div", { class: "usage" }),
      el("div", { class: "controls" }, button("Grant…", grant), button("Block for…", ({ name }) => block(name, { client: name }))));
  }, (node, client) => {
    const [pair, about, usage, controls] = node.children, refused = client.usage && client.usage.refused ? client.usage.refused.reduce((sum, { shadow, count }) => sum + (shadow ? 0 : count), 0) : 0;
    set(pair.firstChild, { text: client.name });
    set(pair.lastChild, { text: client.plan });
    set(about, { text: [client.keys.length ? plural(client.keys.length, "key") : "", client.subjects.length ? plural(client.subjects.length, "subject") : "", client.networks.join(", "), refused ? `${count(refused)} refused lately` : ""].filter(text => text).join(" · ") });
    drawUsage(usage, client);
    const hasWindows = client.usage && client.usage.rules.some(rule => !rule.store && rule.windows && rule.windows.length);
    controls.children[0].hidden = !(hasWindows && canGrant());
    controls.children[1].hidden = !canBlock();
    controls.hidden = [...controls.children].every(child => child.hidden);
  });
  const none = state.config && !state.config.clients ? "No client is configured: there is no [clients]." : state.clients === null ? "Waiting for the clients." : state.clientTotal ? "Nothing matches the search." : "No client is configured.";
  set(section.querySelector(".none"), { text: none, hidden: found.length > 0 });
  set(section.querySelector(".first"), { text: `These are the first ${grouped(found.length)} by name that match, of ${plural(state.clientTotal, "client")}, in the chosen order. Search for others.`, hidden: !state.hasMoreClients });
  set(section.querySelector(".more"), { text: section.showsAll ? `Show ${CLIENTS} only` : `Show ${grouped(left)} more`, hidden: left <= 0 });
}
searchable($("clients"), () => { drawClients(); readUsage(); });
$("clients-search").addEventListener("input", () => { clearTimeout(clientsTimer); clientsTimer = setTimeout(readClients, 200); });
$("clients-plan").addEventListener("change", readClients);
$("clients-sort").addEventListener("change", () => { drawClients(); readUsage(); });
// The list is read when the page is opened, usage while it is shown.
setInterval(() => { if (view() === "clients" && state.connected && !document.hidden && state.clients) readUsage(); }, 5000);

// --- Explain ----------------------------------------------------------------------------------------------------------
$("explain-form").addEventListener("submit", async event => {
  event.preventDefault();
  const headers = {}, value = id => $(`explain-${id}`).value.trim();
  for (const line of value("fields").split("\n").filter(line => line.includes(":"))) {
    const [name, ...rest] = line.split(":");
    headers[name.trim()] = rest.join(":").trim();
  }
  const question = { method: value("method"), url: value("url"), headers };
  if (value("address")) question.client = value("address");
  if (value("client")) question.as_client = value("client");
  try {
    const text = await call("POST", "/v1/explain", question, { accept: "text/plain" });
    showError($("explain-error"), null);
    set($("explanation"), { text });
  } catch (error) {
    showError($("explain-error"), error);
    set($("explanation"), { text: "" });
  }
});

// --- Configuration ----------------------------------------------------------------------------------------------------
function drawConfiguration() {
  const { config, snapshot } = state;
  if (!config || !snapshot) return;
  facts($("running"), [
    ["version", config.version], ["loaded", `${new Date(config.loaded).toLocaleString("en", { dateStyle: "medium", timeStyle: "medium", hourCycle: "h23" })}, ${span(snapshot.time - config.loaded)} ago`],
    ["gateway", `${snapshot.version}, up ${span(snapshot.time - snapshot.started)}`],
    ["parts", [plural(config.route_count, "route"), plural(config.rule_count, "rule"), plural(config.upstream_count, "upstream")].join(", ")],
  ]);
  set($("config-text"), { text: config.text });
}

// --- Pages ------------------------------------------------------------------------------------------------------------
const VIEWS = [...document.querySelectorAll(".view")].map(node => node.id);
const view = () => VIEWS.find(id => !$(id).hidden);
function showView() {
  const target = $(location.hash.slice(1)), found = target && target.closest(".view"), name = found ? found.id : "overview";
  for (const id of VIEWS) $(id).hidden = id !== name;
  for (const link of $("views").children) set(link, { "aria-current": link.hash === `#${name}` ? "page" : null });
  if (found && target !== found) target.scrollIntoView({ block: "nearest" });
  if (state.snapshot) drawAll(true);
  if (name === "clients" && state.config && state.config.clients) readClients();
}
addEventListener("hashchange", showView);

// --- Connection -------------------------------------------------------------------------------------------------------
let stream = null, retry = null;
function showConnection(mark, text) {
  const node = $("connection").firstElementChild;
  if (node.textContent !== text) set(node, { class: `mark ${mark}`, text });
}
const handlers = {
  config(config) {
    const isFirst = !state.config;
    state.config = config;
    drawLookupForm();
    closeTokenForm();
    if (isFirst) readOffers().then(() => { if (state.snapshot) drawAll(); });
    if (view() === "clients" && config.clients) readClients();
    if (state.snapshot) drawAll();
  },
  downtimes(downtimes) { state.downtimes = downtimes; },
  history(samples) { addSamples(samples); if (state.snapshot) { selectSamples(); drawCharts(); } },
  message: update,
};
function handle(event) {
  let name = "message", data = "";
  for (const line of event.split("\n")) {
    if (line.startsWith("event: ")) name = line.slice(7);
    if (line.startsWith("data: ")) data += line.slice(6);
  }
  if (!data || !handlers[name]) return;
  heard();
  handlers[name](JSON.parse(data));
}
// Reads the events by fetch: an EventSource cannot send a token.
async function connect() {
  clearTimeout(retry);
  if (stream) stream.abort();
  const controller = stream = new AbortController();
  try {
    const response = await fetch(`/v1/events?hours=${state.range.hours}`, { headers: authorization(), signal: controller.signal, cache: "no-store" });
    if (response.status === 401 || response.status === 403) {
      const { detail } = await response.json().catch(() => ({}));
      showConnection("bad", "no access");
      askForToken(response.status === 403 && detail ? detail : token() ? "The token is wrong." : "A token is required.");
      return;
    }
    if (!response.ok) throw new Error(`${response.status}`);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let text = ""; ;) {
      const { done, value } = await reader.read();
      if (done) break;
      const events = (text + value).split("\n\n");
      text = events.pop();
      events.forEach(handle);
    }
  } catch (error) { if (!(error instanceof TypeError) && error.name !== "AbortError" && !/^\d+$/.test(error.message)) console.error(error); }
  if (stream === controller) disconnected();
}
setInterval(() => { if (state.connected && performance.now() - state.seen > 6000) disconnected(); }, 1000);
function heard() {
  state.seen = performance.now();
  state.connected = true;
  $("offline").hidden = true;
}
function disconnected() {
  if (stream) stream.abort();
  stream = null;
  state.connected = false;
  state.live = [];
  showConnection("bad", "disconnected");
  $("offline").replaceChildren(el("strong", { text: "Disconnected." }), state.snapshot ? ` The page shows the state of ${clockTime(state.snapshot.time, true)}, and connects again by itself.` : " The page connects by itself.");
  $("offline").hidden = false;
  clearTimeout(retry);
  if (!document.hidden) retry = setTimeout(connect, 1000);
}
function update(snapshot) {
  const isFirst = !state.snapshot, restarted = !isFirst && snapshot.started !== state.snapshot.started;
  if (restarted) {
    state.upstreams = new Map();
    state.live = [];
    // Ids are of one process.
    if (state.lookup && state.lookup.query.id) clearLookup();
  }
  state.snapshot = snapshot;
  if (snapshot.live) state.live = [...state.live, snapshot.live].slice(-60);
  showConnection(snapshot.draining ? "warn" : "ok", snapshot.draining ? "draining" : "live");
  set($("gateway"), { text: `${location.host} · version ${snapshot.version} · up ${span(snapshot.time - snapshot.started)}` });
  set($("footer"), { text: `State of ${clockTime(snapshot.time, true)}. The gateway keeps the last 24 hours; keys are of the last 30 to 60 minutes.` });
  drawAll(isFirst || restarted);
}
function drawAll(withCharts) {
  selectSamples();
  drawUpstreams(); drawParts();
  if (view() === "configuration") drawConfiguration();
  if (view() === "clients") drawClients();
  if (view() !== "overview") return;
  drawTiles(); drawStatus(); drawRoutes(); drawRules(); drawKeys();
  if (withCharts) drawCharts();
}
// A hidden page holds no stream.
let leave = null;
document.addEventListener("visibilitychange", () => {
  clearTimeout(leave);
  if (document.hidden) leave = setTimeout(() => { if (stream) stream.abort(); stream = null; clearTimeout(retry); state.connected = false; }, 60e3);
  else if (!stream) connect();
});

// --- Theme and size ---------------------------------------------------------------------------------------------------
const THEMES = ["system", "light", "dark"];
function setTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = theme;
  set($("theme"), { text: `Theme: ${theme}` });
  }
$("theme").addEventListener("click", () => {
  setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme || "system") + 1) % THEMES.length]);
  localStorage.setItem("transom-theme", document.documentElement.dataset.theme || "system");
});
setTheme(THEMES.includes(localStorage.getItem("transom-theme")) ? localStorage.getItem("transom-theme") : "system");
for (const button of document.querySelectorAll("[data-by]")) button.addEventListener("click", () => {
  state.keysBy = button.dataset.by;
  document.querySelectorAll("[data-by]").forEach(other => set(other, { "aria-pressed": String(other === button) }));
  if (state.snapshot) drawKeys();
});
$("keys-rule").addEventListener("change", event => { state.keysRule = event.target.value; drawKeys(); });
for (const range of RANGES) $("ranges").append(el("button", { type: "button", text: range.name, "aria-pressed": String(range === state.range), on: { click: event => {
  const reconnects = range.hours !== state.range.hours;
  state.range = range;
  for (const other of $("ranges").children) set(other, { "aria-pressed": String(other === event.target) });
  if (reconnects) { state.all = []; connect(); }
  if (state.snapshot) drawAll(true);
} } }));
let drawnWidth = 0;
new ResizeObserver(() => {
  const width = $("traffic").clientWidth;
  if (width && width !== drawnWidth && state.snapshot) drawCharts();
  drawnWidth = width;
}).observe($("traffic"));
showView();
connect();
