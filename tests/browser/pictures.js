// picture_facts.py, called.
import { execFileSync } from "node:child_process";
import { fileURLToPath } from "node:url";

import { PYTHON, ROOT } from "./server.js";

const SCRIPT = fileURLToPath(new URL("picture_facts.py", import.meta.url));

export function pictures(command, args = [], input = "") {
  const environment = { ...process.env, PYTHONPATH: ROOT };
  return JSON.parse(execFileSync(PYTHON, [SCRIPT, command, ...args], { input, env: environment, encoding: "utf8", maxBuffer: 2 ** 26 }));
}
