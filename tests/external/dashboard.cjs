// Drives the dashboard in Chromium with playwright-core, by commands on standard input: one JSON object a line, each answered by
// one line with its result. `problems` lists messages of the console, exceptions and violations of the page's policy.
//
//     dashboard.cjs CHROMIUM

const { readFileSync } = require("fs");
const readline = require("readline");
const { chromium } = require("playwright-core");

const LIMIT_MS = 90_000;
const VIEWS = {
  light: { viewport: { width: 1280, height: 900 }, colorScheme: "light" },
  dark: { viewport: { width: 1280, height: 900 }, colorScheme: "dark" },
  phone: { viewport: { width: 390, height: 844 }, colorScheme: "light", deviceScaleFactor: 1.5, isMobile: true, hasTouch: true },
};

let page, problems = [];
const commands = {
  // Opens a page. Its policy would stop the accessibility checker, so `bypass` does not enforce it.
  async open(browser, { url, view, bypass }) {
    if (page) await page.context().close();
    problems = [];
    page = await (await browser.newContext({ ...VIEWS[view], bypassCSP: Boolean(bypass) })).newPage();
    page.setDefaultTimeout(LIMIT_MS);
    page.on("console", message => problems.push(message.text()));
    page.on("pageerror", error => problems.push(String(error.stack)));
    page.on("request", request => new URL(request.url()).origin === new URL(url).origin || problems.push(request.url()));
    await page.addInitScript(() => addEventListener("securitypolicyviolation", event => console.error("policy", event.violatedDirective)));
    await page.goto(url);
  },
  // Waits until an element contains a text.
  async wait(_, { of, text }) {
    await page.waitForFunction(([of, text]) => (document.querySelector(of)?.textContent || "").includes(text), [of, text]);
  },
  text: (_, { of }) => page.locator(of).first().innerText(),
  count: (_, { of }) => page.locator(of).count(),
  click: (_, { of }) => page.click(of),
  hover: (_, { of, x, y }) => page.hover(of, { position: { x, y } }),
  press: (_, { of, key }) => page.locator(of).press(key),
  fill: (_, { of, value }) => page.fill(of, value),
  select: (_, { of, value }) => page.selectOption(of, value),
  resize: (_, { width }) => page.setViewportSize({ width, height: 900 }),
  run: (_, { script }) => page.evaluate(script),
  problems: () => problems,
  // Of the whole page, or of its first `height` pixels.
  async screenshot(_, { file, height }) {
    if (height) await page.setViewportSize({ width: page.viewportSize().width, height });
    await page.screenshot({ path: file, fullPage: !height });
  },
  // Findings of axe-core, and by how many pixels the page is too wide. In the dark, only colours can differ.
  async check() {
    await page.evaluate(readFileSync(require.resolve("axe-core"), "utf8"));
    const { violations } = await page.evaluate(() => axe.run({ resultTypes: ["violations"] }));
    await page.emulateMedia({ colorScheme: "dark" });
    violations.push(...(await page.evaluate(() => axe.run({ resultTypes: ["violations"], runOnly: ["color-contrast", "link-in-text-block"] }))).violations);
    await page.emulateMedia({ colorScheme: "light" });
    const overflow = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
    return { findings: violations.map(({ id, nodes }) => `${id}: ${nodes[0].html}`), overflow };
  },
};

async function main(executablePath) {
  // Without a sandbox, which root in a container cannot use; the page is trusted.
  const browser = await chromium.launch({ executablePath, timeout: LIMIT_MS, chromiumSandbox: false, args: ["--disable-gpu", "--no-first-run", "--no-proxy-server"] });
  try {
    for await (const line of readline.createInterface({ input: process.stdin })) {
      const command = JSON.parse(line);
      console.log(JSON.stringify((await commands[command.do](browser, command)) ?? null));
    }
  } finally {
    await browser.close();
  }
}

main(...process.argv.slice(2)).catch(error => {
  console.error(error);
  // Standard input is still open.
  process.exit(1);
});
