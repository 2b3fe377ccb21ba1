// What all files share: answers are one of a few by grammar, whatever the model would like to say.

import { z } from "zod";

export const URL = process.env.OUTRIDER_URL;
export const COLOURS = ["red", "green", "blue"];
export const CHOICE = { structured_outputs: { choice: COLOURS } };
// The same for Anthropic's API, which has only JSON: the colour comes in quotes.
export const JSON_CHOICE = { output_config: { format: { type: "json_schema", schema: { type: "string", enum: COLOURS } } } };
export const isColour = (text) => COLOURS.includes(text.replaceAll('"', ""));
export const QUESTION = [{ role: "user", content: "Which colour?" }];

export const Paint = z.object({ colour: z.enum(COLOURS), coats: z.union([z.literal(1), z.literal(2)]) });
export const SCHEMA = {
  type: "object",
  properties: { colour: { type: "string", enum: COLOURS }, coats: { type: "integer", enum: [1, 2] } },
  required: ["colour", "coats"],
  additionalProperties: false,
};
export const FUNCTION = { name: "paint", description: "Paints.", parameters: SCHEMA };
export const TOOL = { type: "function", function: FUNCTION };
export const NAMED = { type: "function", function: { name: "paint" } };

export async function all(events) {
  const seen = [];
  for await (const event of events) seen.push(event);
  return seen;
}

// A `fetch` for clients that take no fields beyond their own: `fields` are added to every body.
export function adding(fields) {
  return (url, init) => {
    if (init?.body) init = { ...init, body: JSON.stringify({ ...JSON.parse(init.body), ...fields }) };
    return fetch(url, init);
  };
}
