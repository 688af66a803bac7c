// How a control picture steers, as fields of a request.

/** control: see control-picture.js. What is left to the server is left out. */
export function steeringOf({ type, scale, start, end }) {
  const fields = { control_type: type, control_scale: scale, control_start: start, control_end: end };
  return Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== null));
}
