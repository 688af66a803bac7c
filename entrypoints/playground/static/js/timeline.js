// Who shares a batch: time goes to the right, every image has a lane, a step is a block on the lane of each image in it.
import { svg } from "./dom.js";

const LANE = 16; // px
const BLOCK = 11;
const MARGIN = 4;

/**
 * An SVG element. steps: [{start, end, requests, degree}] with times in ms before now, the oldest first, positive. spanMs: how far
 * back it reaches; width in px.
 */
export function timeline(steps, spanMs, width) {
  const lanes = lanesOf(steps);
  const height = Math.max(1, lanes.count) * LANE + 2 * MARGIN + 16;
  const toX = (ago) => Math.max(0, width * (1 - ago / spanMs));
  const rows = Array.from({ length: Math.max(1, lanes.count) }, (_, lane) => middle(lane));
  return svg(
    "svg",
    { class: "timeline", viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": inWords(steps) },
    ...rows.map((y) => svg("line", { class: "lane", x1: 0, x2: width, y1: y, y2: y })),
    ...steps.flatMap((step) => drawStep(step, lanes.of, toX)),
    svg("text", { x: 0, y: height - 2 }, `${spanMs / 1000} s ago`),
    svg("text", { x: width, y: height - 2, "text-anchor": "end" }, "now"),
  );
}

/** The same for those who cannot see it. */
export function inWords(steps) {
  if (!steps.length) return "No step was run.";
  const images = steps.reduce((sum, { requests }) => sum + requests.length, 0);
  const most = Math.max(...steps.map(({ requests }) => requests.length));
  return `${steps.length} step${steps.length === 1 ? "" : "s"}, ${(images / steps.length).toFixed(1)} images in each on average, ${most} at most.`;
}

/** A lane for each image from its first to its last step; lanes that became free are used again. */
export function lanesOf(steps) {
  const last = new Map();
  steps.forEach(({ requests }, index) => requests.forEach((request) => last.set(request, index)));
  const of = new Map();
  const free = [];
  let count = 0;
  steps.forEach(({ requests }, index) => {
    for (const request of requests) if (!of.has(request)) of.set(request, free.length ? free.shift() : count++);
    for (const request of requests) {
      if (last.get(request) === index) free.push(of.get(request));
    }
    free.sort((one, other) => one - other);
  });
  return { of, count };
}

function drawStep({ start, end, requests, degree }, lanes, toX) {
  const [x, right] = [toX(start), toX(end)];
  const width = Math.max(1, right - x - 0.5);
  const own = requests.map((request) => lanes.get(request)).sort((one, other) => one - other);
  const blocks = requests.map((request) =>
    svg("rect", { class: requests.length > 1 ? "step" : "alone", x, width, y: middle(lanes.get(request)) - BLOCK / 2, height: BLOCK, rx: 1.5 }, svg("title", {}, title(requests, start - end, degree))),
  );
  if (own.length < 2) return blocks;
  const at = x + width / 2;
  return [svg("line", { class: "link", x1: at, x2: at, y1: middle(own[0]), y2: middle(own.at(-1)) }), ...blocks];
}

function title(requests, ms, degree) {
  const together = degree > 1 ? ` on ${degree} workers` : "";
  return `${requests.length} image${requests.length === 1 ? "" : "s"}, ${ms.toFixed(1)} ms${together}\n${requests.join("\n")}`;
}

function middle(lane) {
  return MARGIN + lane * LANE + LANE / 2;
}
