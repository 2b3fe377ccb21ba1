// OpenAI's client for Node: its helpers, its streams and its errors.  Routes and fields are those of the client for Python.

import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodResponsesFunction, zodTextFormat } from "openai/helpers/zod";
import { all, CHOICE, COLOURS, FUNCTION, NAMED, Paint, QUESTION, TOOL, URL } from "./common.mjs";

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: "unused", maxRetries: 0 });
const { chat: { completions: chat }, responses } = client;
const REQUEST = { model: "demo", messages: QUESTION };
const RESPONSE = { model: "demo", input: "Which colour?" };
const PARSED = { ...REQUEST, response_format: zodResponseFormat(Paint, "paint") };
const PARSED_RESPONSE = { ...RESPONSE, text: { format: zodTextFormat(Paint, "paint") } };
const FLAT = { type: "function", strict: true, ...FUNCTION };
const FLAT_NAMED = { type: "function", name: "paint" };

test("chat, with its response", async () => {
  const { data, response, request_id } = await chat.create({ ...REQUEST, ...CHOICE }).withResponse();
  assert(COLOURS.includes(data.choices[0].message.content));
  assert.equal(data.choices[0].finish_reason, "stop");
  assert.equal(response.headers.get("x-request-id"), request_id);
});

test("chat, stream helper", async () => {
  const stream = chat.stream({ ...REQUEST, ...CHOICE, stream_options: { include_usage: true } });
  let text = "";
  stream.on("content", (delta) => (text += delta));
  const final = await stream.finalChatCompletion();
  assert.equal(final.choices[0].message.content, text);
  assert(COLOURS.includes(text));
  assert((await stream.totalUsage()).total_tokens > 0);
});

test("chat, stream helper and calls", async () => {
  const stream = chat.stream({ ...REQUEST, tools: [TOOL], tool_choice: "required" });
  const done = [];
  stream.on("tool_calls.function.arguments.done", (each) => done.push(each));
  const { tool_calls: calls } = (await stream.finalChatCompletion()).choices[0].message;
  assert.equal(done.length, calls.length);
  for (const call of calls) Paint.parse(JSON.parse(call.function.arguments));
});

test("chat, parse", async () => {
  Paint.parse((await chat.parse(PARSED)).choices[0].message.parsed);
  Paint.parse((await chat.stream(PARSED).finalChatCompletion()).choices[0].message.parsed);
  const tools = [zodFunction({ name: "paint", parameters: Paint })];
  const called = await chat.parse({ ...REQUEST, tools, tool_choice: NAMED });
  Paint.parse(called.choices[0].message.tool_calls[0].function.parsed_arguments);
});

for (const stream of [false, true]) {
  test(`chat, runTools ends with a function that is named, ${stream ? "streamed" : "whole"}`, async () => {
    const seen = [];
    const paint = { ...FUNCTION, parse: JSON.parse, function: (input) => seen.push(Paint.parse(input)) };
    await chat.runTools({ ...REQUEST, tools: [{ type: "function", function: paint }], tool_choice: NAMED, stream }).done();
    assert.equal(seen.length, 1);
  });
}

test("chat, runTools hands results back", async () => {
  const seen = [];
  const paint = { ...FUNCTION, parse: JSON.parse, function: (input) => void seen.push(Paint.parse(input)) ?? "painted" };
  const settings = { ...REQUEST, tools: [{ type: "function", function: paint }], tool_choice: "required" };
  const runner = chat.runTools({ ...settings, parallel_tool_calls: false }, { maxChatCompletions: 2 });
  await runner.done();
  assert.equal(seen.length, 2);
  assert.equal(runner.messages.filter((each) => each.role === "tool").length, 2);
});

test("chat, aborted", async () => {
  const stream = chat.stream({ ...REQUEST, ignore_eos: true, max_tokens: 200 });
  stream.on("content", () => stream.abort());
  await assert.rejects(stream.done(), OpenAI.APIUserAbortError);
});

test("responses, stream helper and a call", async () => {
  const stream = responses.stream({ ...RESPONSE, tools: [FLAT], tool_choice: FLAT_NAMED });
  let text = "";
  stream.on("response.function_call_arguments.delta", (event) => (text += event.delta));
  const [call] = (await stream.finalResponse()).output;
  assert.equal(call.arguments, text);
  Paint.parse(JSON.parse(text));
});

test("responses, parse", async () => {
  Paint.parse((await responses.parse(PARSED_RESPONSE)).output_parsed);
  Paint.parse((await responses.stream(PARSED_RESPONSE).finalResponse()).output_parsed);
  const tools = [zodResponsesFunction({ name: "paint", parameters: Paint })];
  const called = await responses.parse({ ...RESPONSE, tools, tool_choice: FLAT_NAMED });
  Paint.parse(called.output[0].parsed_arguments);
});

test("responses, in the background and taken up again", async () => {
  const events = await all(await responses.create({ ...RESPONSE, ...CHOICE, background: true, stream: true }));
  assert.equal(events.at(-1).type, "response.completed");
  const deltas = events.filter((event) => event.type === "response.output_text.delta");
  assert(COLOURS.includes(deltas.map((event) => event.delta).join("")));
  const again = await all(await responses.retrieve(events[0].response.id, { stream: true, starting_after: 1 }));
  assert.equal(again.length, events.length - 2);
});

test("pages of items", async () => {
  const { id } = await client.conversations.create({ metadata: { a: "b" } });
  await responses.create({ ...RESPONSE, ...CHOICE, conversation: id });
  assert.equal((await all(client.conversations.items.list(id))).length, 2);
});

test("errors", async () => {
  await assert.rejects(chat.create({ ...REQUEST, model: "other" }), OpenAI.NotFoundError);
  await assert.rejects(chat.create({ ...REQUEST, temperature: 3 }), (error) => {
    assert(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "temperature");
    return true;
  });
});
