// Numbers as people read them.

/** 0.253 -> "25 %"; what is there at all is never "0 %". */
export function percent(share) {
  const value = share * 100;
  return value > 0 && value < 1 ? "<1 %" : `${Math.round(value)} %`;
}

/** Milliseconds -> "86 ms" or "1.24 s". */
export function duration(ms) {
  if (ms >= 1000) return `${(ms / 1000).toFixed(2)} s`;
  return ms >= 10 ? `${Math.round(ms)} ms` : `${ms.toFixed(1)} ms`;
}

/** Bytes -> "14.2 MB". */
export function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let value = count;
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${unit && value < 100 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

/** 12345 -> "12,345". */
export function count(number) {
  return Math.round(number).toLocaleString("en-US");
}

/** (1, "reference") -> "1 reference"; (3, "reference") -> "3 references". */
export function counted(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}
