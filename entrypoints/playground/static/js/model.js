// What the server serves: waited for while it loads.
import { ApiError, get } from "./api.js";

const RETRY_MS = 1000;

/** The model's facts, then those of others and of adapters, as /v1/engine/stats tells them. tell(text): what there is to wait for. */
export async function waitForModels(tell) {
  for (;;) {
    try {
      const { models } = await get("v1/engine/stats");
      if (models.length) return models;
      tell("the model is loading…");
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      tell(error.status === 401 ? "an API key is needed" : "the server cannot be reached");
      if (error.status === 401) throw error;
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

/** What /v1/models says of a model's workflow: {inputs, partial_images: whether an edit may show some}. */
export async function workflowOf(model) {
  const { data } = await get("v1/models");
  const { inputs = [], partial_images = true } = data.find(({ id }) => id === model.id);
  return { inputs, partial_images };
}
