// Opens a page in Chromium with playwright-core: light, dark, and as wide as a phone. Checks its accessibility with axe-core,
// and prints what it found as JSON: serious findings, errors, and by how many pixels the page is too wide. With a folder, also
// stores screenshots there.
//
//     report.cjs CHROMIUM FILE [FOLDER]

const { readFileSync } = require("fs");
const { chromium } = require("playwright-core");

const LIMIT_MS = 90_000;
const VIEWS = {
  light: { viewport: { width: 1100, height: 1500 }, colorScheme: "light" },
  dark: { viewport: { width: 1100, height: 1500 }, colorScheme: "dark" },
  phone: { viewport: { width: 390, height: 844 }, isMobile: true, hasTouch: true },
};

async function main(executablePath, file, folder) {
  // Without a sandbox, which root in a container cannot use; the page is trusted.
  const browser = await chromium.launch({ executablePath, timeout: LIMIT_MS, chromiumSandbox: false, args: ["--disable-gpu", "--no-first-run"] });
  try {
    const found = { findings: [], errors: [], overflow: {} };
    for (const [name, options] of Object.entries(VIEWS)) {
      // The policy of the page would stop the checker, so it is not enforced here.
      for (const bypassCSP of [false, true]) {
        const page = await (await browser.newContext({ ...options, bypassCSP })).newPage();
        page.setDefaultTimeout(LIMIT_MS);
        page.on("console", message => found.errors.push(message.text()));
        page.on("request", request => request.url().startsWith("file:") || found.errors.push(request.url()));
        await page.goto(`file://${file}`);
        found.overflow[name] = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
        if (bypassCSP) {
          await page.evaluate(readFileSync(require.resolve("axe-core"), "utf8"));
          const { violations } = await page.evaluate(() => axe.run({ resultTypes: ["violations"] }));
          const serious = violations.filter(({ impact }) => ["serious", "critical"].includes(impact));
          found.findings.push(...serious.map(({ id, nodes }) => `${name}: ${id}: ${nodes[0].html}`));
        } else if (folder) {
          await page.screenshot({ path: `${folder}/${name}.png`, fullPage: true });
        }
      }
    }
    console.log(JSON.stringify(found));
  } finally {
    await browser.close();
  }
}

main(...process.argv.slice(2)).catch(error => {
  console.error(error);
  process.exitCode = 1;
});
