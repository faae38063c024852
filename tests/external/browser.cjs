// Opens a page in Chromium with playwright-core. Prints one line of JSON: the results of the page, the protocols of
// responses, and how each WebSocket was opened.
//
//     browser.cjs CHROMIUM ADDRESS PIN
//
// The page is https://gateway.test/. All names below `test` are resolved to ADDRESS; only the certificate with the key PIN is accepted.

const { chromium } = require("playwright-core");

const LIMIT_MS = 90_000;

async function main(executablePath, address, pin) {
  const [host, port] = address.split(":");
  const browser = await chromium.launch({
    executablePath,
    timeout: LIMIT_MS,
    // Without a sandbox, which root in a container cannot use; the page is trusted.
    chromiumSandbox: false,
    args: [
      "--disable-gpu", "--disable-quic", "--no-first-run", "--no-proxy-server", "--disable-background-networking",
      "--disable-component-update", "--disable-sync",
      `--ignore-certificate-errors-spki-list=${pin}`,
      `--host-resolver-rules=MAP *.test ${host}`,
    ],
  });
  try {
    const page = await browser.newPage();
    page.setDefaultTimeout(LIMIT_MS);
    const observed = { errors: [], protocols: {}, sockets: [] };
    page.on("pageerror", error => observed.errors.push(String(error)));
    const network = await page.context().newCDPSession(page);
    network.on("Network.responseReceived", ({ response }) => {
      if (response.url.startsWith("https:")) {
        observed.protocols[response.protocol] = true;
      }
    });
    network.on("Network.webSocketHandshakeResponseReceived", ({ response }) => observed.sockets.push(response.status));
    await network.send("Network.enable");
    await page.goto(`https://gateway.test:${port}/`);
    const results = await page.evaluate(() => finished);
    console.log(JSON.stringify({ results, observed }));
  } finally {
    await browser.close();
  }
}

main(...process.argv.slice(2)).catch(error => {
  console.error(error);
  process.exitCode = 1;
});
