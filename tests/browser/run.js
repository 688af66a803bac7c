// Runs the tests: one set of servers for all of them, then node's own test runner. Its arguments go to the runner.
import { spawn } from "node:child_process";
import { once } from "node:events";
import { mkdtempSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";

import { ADAPTER, KEY, PYTHON, ROOT } from "./server.js";

const HERE = fileURLToPath(new URL("./", import.meta.url));
const BESIDE = 2; // files; each has a browser of its own
const CONTROLLED = `
[controlnets]
edges = "edges"
depth = "depth"

[[model]]
name = "sd"
path = "sd"
controlnets = ["edges", "depth"]
`;

async function main() {
  const folder = mkdtempSync(join(tmpdir(), "playground-"));
  const { urls, stop } = await startServers(folder);
  try {
    return await runTests(urls);
  } finally {
    await stop();
    rmSync(folder, { recursive: true });
  }
}

/** The servers that server.js names, with the models of models.py: {urls, stop()}. stop() fails unless all leave with status 0. */
async function startServers(folder) {
  const made = (name) => join(folder, name);
  writeFileSync(made("controlled.toml"), CONTROLLED);
  const flags = {
    OPEN_URL: ["--max-pixels", "13000000"],
    GUARDED_URL: ["--api-key", KEY, "--segmenter", "none", "--lora", `${ADAPTER}=${made("adapter.safetensors")}`],
    WORKFLOWS_URL: ["--catalog", `${ROOT}tests/browser/workflows.toml`, "--workflow", `${ROOT}tests/workflow_files`],
    REFERENCES_URL: ["--model", `klein=${made("klein")}`],
    CONTROLLED_URL: ["--catalog", made("controlled.toml")],
  };
  const env = { ...process.env, PYTHONUNBUFFERED: "1", PYTHONPATH: `${ROOT}:${ROOT}tests` };
  const servers = spawn(PYTHON, [`${HERE}servers.py`, folder, JSON.stringify(flags)], { cwd: ROOT, env, stdio: ["pipe", "pipe", "inherit"] });
  const ended = once(servers, "exit");
  const stop = async () => {
    servers.stdin.end();
    const [status] = await ended;
    if (status !== 0) throw new Error(`servers.py left with status ${status}`);
  };
  for await (const line of createInterface({ input: servers.stdout })) return { urls: JSON.parse(line), stop };
  throw new Error("the servers did not become ready");
}

async function runTests(urls) {
  const asked = process.argv.slice(2);
  const files = asked.some((word) => word.endsWith(".test.js")) ? [] : readdirSync(HERE).filter((name) => name.endsWith(".test.js"));
  const command = ["--test", `--test-concurrency=${BESIDE}`, "--test-reporter=spec", ...asked, ...files];
  const runner = spawn(process.execPath, command, { cwd: HERE, env: { ...process.env, ...urls }, stdio: "inherit" });
  const [status] = await once(runner, "exit");
  return status ?? 1;
}

process.exitCode = await main();
