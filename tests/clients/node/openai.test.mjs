// OpenAI's client for Node.

import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodResponsesFunction, zodTextFormat } from "openai/helpers/zod";
import { all, CHOICE, COLOURS, FUNCTION, NAMED, Paint, QUESTION, SCHEMA, TOOL, URL } from "./asked.mjs";

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: "unused", maxRetries: 0 });
const chat = client.chat.completions;
const ASKED = { model: "demo", messages: QUESTION };
const ASKED_RESPONSE = { model: "demo", input: "Which colour?" };
const FLAT = { type: "function", strict: true, ...FUNCTION };
const FLAT_NAMED = { type: "function", name: "paint" };

test("chat", async () => {
  const answer = await chat.create({ ...ASKED, ...CHOICE });
  assert(COLOURS.includes(answer.choices[0].message.content));
  assert.equal(answer.choices[0].finish_reason, "stop");
  assert(answer._request_id);
});

test("chat, streamed", async () => {
  const stream = await chat.create({ ...ASKED, ...CHOICE, stream: true, stream_options: { include_usage: true } });
  const chunks = await all(stream);
  assert(COLOURS.includes(chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join("")));
  assert(chunks.at(-1).usage.total_tokens > 0);
});

test("chat, stream helper", async () => {
  const stream = chat.stream({ ...ASKED, ...CHOICE, stream_options: { include_usage: true } });
  let text = "";
  stream.on("content", (delta) => (text += delta));
  const final = await stream.finalChatCompletion();
  assert.equal(final.choices[0].message.content, text);
  assert(COLOURS.includes(text));
  assert((await stream.totalUsage()).total_tokens > 0);
});

test("chat, stream helper parses", async () => {
  const stream = chat.stream({ ...ASKED, response_format: zodResponseFormat(Paint, "paint") });
  Paint.parse((await stream.finalChatCompletion()).choices[0].message.parsed);
});

test("chat, stream helper and calls", async () => {
  const stream = chat.stream({ ...ASKED, tools: [TOOL], tool_choice: "required" });
  const done = [];
  stream.on("tool_calls.function.arguments.done", (each) => done.push(each));
  const { tool_calls: calls } = (await stream.finalChatCompletion()).choices[0].message;
  assert.equal(done.length, calls.length);
  for (const call of calls) Paint.parse(JSON.parse(call.function.arguments));
});

test("chat, parse", async () => {
  const answer = await chat.parse({ ...ASKED, response_format: zodResponseFormat(Paint, "paint") });
  Paint.parse(answer.choices[0].message.parsed);
});

test("chat, parse of a tool", async () => {
  const tools = [zodFunction({ name: "paint", parameters: Paint })];
  const answer = await chat.parse({ ...ASKED, tools, tool_choice: NAMED });
  Paint.parse(answer.choices[0].message.tool_calls[0].function.parsed_arguments);
});

test("chat, runTools ends with a function that is named", async () => {
  const seen = [];
  const paint = { ...FUNCTION, parse: JSON.parse, function: (asked) => seen.push(Paint.parse(asked)) };
  const runner = chat.runTools({ ...ASKED, tools: [{ type: "function", function: paint }], tool_choice: NAMED });
  await runner.done();
  assert.equal(seen.length, 1);
});

test("chat, runTools hands results back", async () => {
  const seen = [];
  const paint = { ...FUNCTION, parse: JSON.parse, function: (asked) => void seen.push(Paint.parse(asked)) ?? "painted" };
  const asked = { ...ASKED, tools: [{ type: "function", function: paint }], tool_choice: "required" };
  const runner = chat.runTools({ ...asked, parallel_tool_calls: false }, { maxChatCompletions: 2 });
  await runner.done();
  assert.equal(seen.length, 2);
  assert.equal(runner.messages.filter((each) => each.role === "tool").length, 2);
});

test("chat, runTools streamed", async () => {
  const seen = [];
  const paint = { ...FUNCTION, parse: JSON.parse, function: (asked) => seen.push(Paint.parse(asked)) };
  const runner = chat.runTools({ ...ASKED, tools: [{ type: "function", function: paint }], tool_choice: NAMED, stream: true });
  await runner.done();
  assert.equal(seen.length, 1);
});

test("chat, n and logprobs", async () => {
  const answer = await chat.create({ ...ASKED, ...CHOICE, n: 2, logprobs: true, top_logprobs: 1 });
  assert.equal(answer.choices.length, 2);
  for (const choice of answer.choices) assert(choice.logprobs.content.length > 0);
});

test("chat, aborted", async () => {
  const stream = chat.stream({ ...ASKED, ignore_eos: true, max_tokens: 200 });
  stream.on("content", () => stream.abort());
  await assert.rejects(stream.done(), OpenAI.APIUserAbortError);
});

test("completions", async () => {
  const answer = await client.completions.create({ model: "demo", prompt: ["one", "two"], ...CHOICE });
  assert(answer.choices.every((choice) => COLOURS.includes(choice.text)));
});

test("completions, streamed", async () => {
  const chunks = await all(await client.completions.create({ model: "demo", prompt: "one", ...CHOICE, stream: true }));
  assert(COLOURS.includes(chunks.map((chunk) => chunk.choices[0].text).join("")));
});

test("responses", async () => {
  const made = await client.responses.create({ ...ASKED_RESPONSE, ...CHOICE });
  assert(COLOURS.includes(made.output_text));
  assert.equal(made.status, "completed");
});

test("responses, streamed", async () => {
  const events = await all(await client.responses.create({ ...ASKED_RESPONSE, ...CHOICE, stream: true }));
  assert.equal(events.at(-1).type, "response.completed");
  const deltas = events.filter((event) => event.type === "response.output_text.delta");
  assert(COLOURS.includes(deltas.map((event) => event.delta).join("")));
});

test("responses, stream helper parses", async () => {
  const stream = client.responses.stream({ ...ASKED_RESPONSE, text: { format: zodTextFormat(Paint, "paint") } });
  Paint.parse((await stream.finalResponse()).output_parsed);
});

test("responses, stream helper and a call", async () => {
  const stream = client.responses.stream({ ...ASKED_RESPONSE, tools: [FLAT], tool_choice: FLAT_NAMED });
  let text = "";
  stream.on("response.function_call_arguments.delta", (event) => (text += event.delta));
  const [call] = (await stream.finalResponse()).output;
  assert.equal(call.arguments, text);
  Paint.parse(JSON.parse(text));
});

test("responses, parse", async () => {
  const made = await client.responses.parse({ ...ASKED_RESPONSE, text: { format: zodTextFormat(Paint, "paint") } });
  Paint.parse(made.output_parsed);
});

test("responses, parse of a tool", async () => {
  const tools = [zodResponsesFunction({ name: "paint", parameters: Paint })];
  const made = await client.responses.parse({ ...ASKED_RESPONSE, tools, tool_choice: FLAT_NAMED });
  Paint.parse(made.output[0].parsed_arguments);
});

test("responses, a call and its result", async () => {
  const first = await client.responses.create({ ...ASKED_RESPONSE, tools: [FLAT], tool_choice: FLAT_NAMED });
  const result = { type: "function_call_output", call_id: first.output[0].call_id, output: "painted" };
  const asked = { model: "demo", input: [result], previous_response_id: first.id, tools: [FLAT], tool_choice: "none" };
  assert(COLOURS.includes((await client.responses.create({ ...asked, ...CHOICE })).output_text));
});

test("responses, kept and deleted", async () => {
  const made = await client.responses.create({ ...ASKED_RESPONSE, ...CHOICE });
  assert.equal((await client.responses.retrieve(made.id)).output_text, made.output_text);
  assert.equal((await all(client.responses.inputItems.list(made.id))).length, 1);
  await client.responses.delete(made.id);
  await assert.rejects(client.responses.retrieve(made.id), OpenAI.NotFoundError);
});

test("responses, in the background and taken up again", async () => {
  const events = await all(await client.responses.create({ ...ASKED_RESPONSE, ...CHOICE, background: true, stream: true }));
  const again = await all(await client.responses.retrieve(events[0].response.id, { stream: true, starting_after: 1 }));
  assert.equal(again.length, events.length - 2);
});

test("conversations", async () => {
  const { id } = await client.conversations.create({ metadata: { a: "b" } });
  await client.responses.create({ ...ASKED_RESPONSE, ...CHOICE, conversation: id });
  assert.equal((await all(client.conversations.items.list(id))).length, 2);
  assert((await client.conversations.delete(id)).deleted);
});

test("models", async () => {
  assert.deepEqual((await all(client.models.list())).map((model) => model.id), ["demo"]);
});

test("errors", async () => {
  await assert.rejects(chat.create({ ...ASKED, model: "other" }), OpenAI.NotFoundError);
  await assert.rejects(chat.create({ ...ASKED, temperature: 3 }), (error) => {
    assert(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "temperature");
    return true;
  });
  await assert.rejects(client.responses.create({ model: "demo", input: [] }), OpenAI.BadRequestError);
});

test("raw answers", async () => {
  const { data, response, request_id } = await chat.create({ ...ASKED, ...CHOICE }).withResponse();
  assert(COLOURS.includes(data.choices[0].message.content));
  assert.equal(response.headers.get("x-request-id"), request_id);
});

test("a schema by hand", async () => {
  const response_format = { type: "json_schema", json_schema: { name: "paint", schema: SCHEMA, strict: true } };
  Paint.parse(JSON.parse((await chat.create({ ...ASKED, response_format })).choices[0].message.content));
});
