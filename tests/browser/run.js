// Runs the tests: three servers for all of them, then node's own test runner. Its arguments go to the runner.
import { spawn } from "node:child_process";
import { once } from "node:events";
import { mkdtempSync, readdirSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

import { ADAPTER, KEY, ROOT, runPython, startServer } from "./server.js";

const HERE = fileURLToPath(new URL("./", import.meta.url));

async function main() {
  const folder = mkdtempSync(join(tmpdir(), "playground-"));
  const adapter = makeAdapter(join(folder, "adapter.safetensors"));
  const servers = await Promise.all([
    startServer("--max-pixels", "13000000"),
    startServer("--api-key", KEY, "--segmenter", "none", "--lora", `${ADAPTER}=${adapter}`),
    startServer("--catalog", `${ROOT}tests/browser/workflows.toml`, "--workflow", `${ROOT}tests/workflow_files`),
  ]);
  try {
    const [open, guarded, workflows] = servers.map(({ url }) => url);
    return await runTests({ OPEN_URL: open, GUARDED_URL: guarded, WORKFLOWS_URL: workflows });
  } finally {
    await Promise.all(servers.map((server) => server.stop()));
    rmSync(folder, { recursive: true });
  }
}

/** Write a random adapter of the embedded model, and return its path. */
function makeAdapter(path) {
  const program = "import pathlib, sys; import adapters; adapters.make_lora(*map(pathlib.Path, sys.argv[1:]))";
  runPython(program, path, `${ROOT}model_executor/embedded`);
  return path;
}

async function runTests(urls) {
  const asked = process.argv.slice(2);
  const files = asked.some((word) => word.endsWith(".test.js")) ? [] : readdirSync(HERE).filter((name) => name.endsWith(".test.js"));
  const command = ["--test", "--test-concurrency=1", "--test-reporter=spec", ...asked, ...files];
  const runner = spawn(process.execPath, command, { cwd: HERE, env: { ...process.env, ...urls }, stdio: "inherit" });
  const [status] = await once(runner, "exit");
  return status ?? 1;
}

process.exitCode = await main();
