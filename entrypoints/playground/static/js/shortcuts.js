// Keys that work wherever no text is typed.
import { byId } from "./dom.js";

const CLICKS = { i: "invert", x: "clear", "+": "zoom-in", "=": "zoom-in", "-": "zoom-out", 0: "zoom-fit", "?": "help" };
const TOOLS = { b: "brush", e: "eraser", r: "rectangle", l: "lasso", p: "pick" };

/** run(): start the edit. sizeBy(factor): another brush. All else is a click on what shows it. */
export function addShortcuts({ run, sizeBy }) {
  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || document.querySelector("dialog[open]")) return;
    if (event.ctrlKey || event.metaKey) withControl(event, run);
    else if (!event.altKey && !isTyping(event.target)) plain(event, sizeBy);
  });
}

function withControl(event, run) {
  const key = event.key.toLowerCase();
  if (key === "enter") {
    if (!event.repeat) run(); // held, it would stop what it has begun
  } else if (isTyping(event.target)) return;
  else if (key === "z") byId(event.shiftKey ? "redo" : "undo").click();
  else if (key === "y") byId("redo").click();
  else return;
  event.preventDefault();
}

function plain(event, sizeBy) {
  const key = event.key.toLowerCase();
  if (key in TOOLS) document.querySelector(`input[name=tool][value=${TOOLS[key]}]`).click();
  else if (key in CLICKS) byId(CLICKS[key]).click();
  else if (key === "[") sizeBy(0.85);
  else if (key === "]") sizeBy(1.18);
  else return;
  event.preventDefault();
}

function isTyping(element) {
  return element.matches("textarea, select, input:not([type=radio]):not([type=range])");
}
