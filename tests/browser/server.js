// The real server, by default with the embedded model, as a child process on a free port.
import { spawn } from "node:child_process";
import { once } from "node:events";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";

export const ROOT = fileURLToPath(new URL("../../", import.meta.url));
export const PYTHON = process.env.PYTHON ?? `${ROOT}.venv/bin/python`;

export const KEY = "sk-browser-test";
export const ADAPTER = "stripes";

/**
 * What run.js has started: servers without and with an API key and an adapter, of which the latter finds no masks; one with
 * workflows, of which its model has one; one whose model sees references, and has no ControlNets; one whose model has two.
 */
export const { OPEN_URL, GUARDED_URL, WORKFLOWS_URL, REFERENCES_URL, CONTROLLED_URL } = process.env;

/** Started and ready: {url, stop()}. stop() fails unless it leaves with status 0. */
export async function startServer(...flags) {
  const environment = { ...process.env, PYTHONUNBUFFERED: "1", PYTHONPATH: ROOT };
  const command = ["-m", "entrypoints.serve", "--port", "0", "--threads", "1", "--log-level", "warning", "--allowed-host", "stencil.test", ...flags];
  const child = spawn(PYTHON, command, { cwd: ROOT, env: environment, stdio: ["ignore", "pipe", "inherit"] });
  const url = await readyUrl(child);
  return {
    url: `${url}/`,
    async stop() {
      const ended = once(child, "exit");
      child.kill("SIGTERM");
      const [status] = await ended;
      if (status !== 0) throw new Error(`the server left with status ${status}`);
    },
  };
}

async function readyUrl(child) {
  for await (const line of createInterface({ input: child.stdout })) {
    const match = /^Stencil ready on (\S+)/.exec(line);
    if (match) return match[1];
  }
  throw new Error("the server did not become ready");
}
