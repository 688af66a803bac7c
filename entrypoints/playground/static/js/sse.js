// Server-sent events out of a response's body. An event may be many megabytes, so every byte is looked at once.

/** Async generator of the `data` texts of a stream's events; comments and other fields are passed over. */
export async function* events(body) {
  const decoder = new TextDecoder();
  const reader = body.getReader();
  let pieces = []; // of the line that has not ended
  let data = []; // lines of the event that has not ended
  try {
    for (;;) {
      const { done, value } = await reader.read();
      const lines = decoder.decode(value, { stream: !done }).split("\n");
      for (const [index, piece] of lines.entries()) {
        pieces.push(piece);
        if (index === lines.length - 1) break; // its end has not come yet
        const line = pieces.join("").replace(/\r$/, "");
        pieces = [];
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
      if (done) return; // an event without its blank line was cut off
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
