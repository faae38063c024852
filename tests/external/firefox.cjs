// Drives the dashboard in Firefox over WebDriver BiDi, by commands on standard input: one JSON object a line, each answered by one
// line with its result. `problems` lists messages of the console and exceptions.
//
//     firefox.cjs FIREFOX

const { mkdtempSync, rmSync, writeFileSync } = require("fs");
const { spawn } = require("child_process");
const { tmpdir } = require("os");
const { join } = require("path");
const readline = require("readline");

const LIMIT_MS = 90_000;
// No requests of its own.
const PREFERENCES = { "app.update.disabledForTesting": true, "browser.shell.checkDefaultBrowser": false, "browser.startup.homepage": "about:blank", "datareporting.policy.dataSubmissionEnabled": false, "network.captive-portal-service.enabled": false, "network.connectivity-service.enabled": false, "network.proxy.type": 0, "services.settings.server": "data:,", "toolkit.telemetry.enabled": false };

async function start(program, profile) {
  const text = Object.entries(PREFERENCES).map(([name, value]) => `user_pref(${JSON.stringify(name)}, ${JSON.stringify(value)});\n`).join("");
  writeFileSync(join(profile, "user.js"), text);
  const firefox = spawn(program, ["--headless", "--no-remote", "--remote-debugging-port", "0", "--profile", profile, "about:blank"], { env: { ...process.env, HOME: profile }, stdio: ["ignore", "ignore", "pipe"] });
  const address = await new Promise((resolve, reject) => {
    let seen = "";
    firefox.stderr.on("data", data => {
      seen += data;
      const found = /WebDriver BiDi listening on (ws:\S+)/.exec(seen);
      if (found) resolve(found[1]);
    });
    firefox.on("exit", () => reject(new Error(`Firefox ended: ${seen}`)));
  });
  return { firefox, address };
}

async function main(program) {
  const profile = mkdtempSync(join(tmpdir(), "transom-firefox-"));
  const { firefox, address } = await start(program, profile);
  // A signal ends Firefox too.
  for (const signal of ["SIGINT", "SIGTERM"]) process.on(signal, () => process.exit(1));
  process.on("exit", () => { firefox.kill("SIGKILL"); rmSync(profile, { recursive: true, force: true }); });
  const socket = new WebSocket(`${address}/session`);
  await new Promise((resolve, reject) => { socket.onopen = resolve; socket.onerror = reject; });
  const waiting = new Map();
  let problems = [], last = 0;
  socket.onmessage = ({ data }) => {
    const message = JSON.parse(data);
    if (message.method === "log.entryAdded") problems.push(message.params.text);
    if (!waiting.has(message.id)) return;
    const { resolve, reject } = waiting.get(message.id);
    waiting.delete(message.id);
    if (message.type === "error") reject(new Error(message.message)); else resolve(message.result);
  };
  const send = (method, params) => new Promise((resolve, reject) => {
    last += 1;
    waiting.set(last, { resolve, reject });
    socket.send(JSON.stringify({ id: last, method, params }));
  });
  await send("session.new", { capabilities: {} });
  await send("session.subscribe", { events: ["log.entryAdded"] });
  const { contexts: [{ context }] } = await send("browsingContext.getTree", {});
  const evaluate = async script => {
    const found = await send("script.evaluate", { expression: `JSON.stringify(${script})`, target: { context }, awaitPromise: true });
    if (found.type !== "success") throw new Error(found.exceptionDetails.text);
    return found.result.value === undefined ? null : JSON.parse(found.result.value);
  };
  const commands = {
    async open({ url }) {
      problems = [];
      await send("browsingContext.navigate", { context, url, wait: "complete" });
    },
    async wait({ of, text }) {
      for (const began = Date.now(); ;) {
        if (await evaluate(`(document.querySelector(${JSON.stringify(of)})?.textContent || "").includes(${JSON.stringify(text)})`)) return;
        if (Date.now() - began > LIMIT_MS) throw new Error(`no ${text} in ${of}`);
        await new Promise(resolve => setTimeout(resolve, 50));
      }
    },
    click: ({ of }) => evaluate(`document.querySelector(${JSON.stringify(of)}).click()`),
    run: ({ script }) => evaluate(script),
    problems: () => problems,
  };
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const command = JSON.parse(line);
    console.log(JSON.stringify((await commands[command.do](command)) ?? null));
  }
  process.exit(0);
}

main(...process.argv.slice(2)).catch(error => {
  console.error(error);
  process.exit(1);
});
