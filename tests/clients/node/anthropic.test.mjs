// Anthropic's client for Node.

import assert from "node:assert/strict";
import { test } from "node:test";
import Anthropic from "@anthropic-ai/sdk";
import { isColour, JSON_CHOICE, Paint, QUESTION, SCHEMA, URL } from "./common.mjs";

const client = new Anthropic({ baseURL: URL, apiKey: "unused", maxRetries: 0 });
const REQUEST = { model: "demo", max_tokens: 1000, messages: QUESTION };
const TOOL = { name: "paint", description: "Paints.", input_schema: SCHEMA };

test("messages", async () => {
  const made = await client.messages.create({ ...REQUEST, ...JSON_CHOICE });
  assert(isColour(made.content[0].text));
  assert.equal(made.stop_reason, "end_turn");
});

test("messages, streamed", async () => {
  const stream = client.messages.stream({ ...REQUEST, ...JSON_CHOICE });
  let text = "";
  stream.on("text", (delta) => (text += delta));
  assert.equal((await stream.finalMessage()).content[0].text, text);
  assert(isColour(text));
});

for (const tool_choice of [{ type: "any" }, { type: "tool", name: "paint" }]) {
  test(`a call, ${tool_choice.type}`, async () => {
    const body = { ...REQUEST, tools: [TOOL], tool_choice };
    for (const made of [await client.messages.create(body), await client.messages.stream(body).finalMessage()]) {
      assert.equal(made.stop_reason, "tool_use");
      for (const block of made.content) Paint.parse(block.input);
    }
  });
}

test("a call and its result", async () => {
  const body = { ...REQUEST, tools: [TOOL] };
  const first = await client.messages.create({ ...body, tool_choice: { type: "tool", name: "paint" } });
  const result = { type: "tool_result", tool_use_id: first.content[0].id, content: "painted" };
  const messages = [...QUESTION, { role: "assistant", content: first.content }, { role: "user", content: [result] }];
  const made = await client.messages.create({ ...body, messages, tool_choice: { type: "none" }, ...JSON_CHOICE });
  assert(isColour(made.content[0].text));
});

test("errors", async () => {
  await assert.rejects(client.messages.create({ ...REQUEST, model: "other" }), Anthropic.NotFoundError);
  await assert.rejects(client.messages.create({ ...REQUEST, temperature: 3 }), Anthropic.BadRequestError);
});
