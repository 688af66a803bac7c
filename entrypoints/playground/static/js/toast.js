// Messages that pass: errors are announced at once and stay until dismissed or for a while.
import { byId, el } from "./dom.js";

const SHOWN_MS = { error: 12000, info: 4000 };
const MOST = 3;

/** Show `text`; kind is "error" or "info". */
export function toast(text, kind = "info") {
  const region = byId("toasts");
  const close = el("button", { type: "button", class: "quiet", "aria-label": "Dismiss message" }, "×");
  const message = el("div", { class: `toast ${kind}`, role: kind === "error" ? "alert" : "status" }, el("p", {}, text), close);
  const timer = setTimeout(() => message.remove(), SHOWN_MS[kind]);
  close.addEventListener("click", () => {
    clearTimeout(timer);
    message.remove();
  });
  region.append(message);
  while (region.children.length > MOST) region.firstElementChild.remove();
}
