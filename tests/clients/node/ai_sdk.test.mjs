// Vercel's AI SDK: OpenAI's provider by its default (responses) and as chat, the compatible provider, Anthropic's.

import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { adding, all, CHOICE, COLOURS, isColour, JSON_CHOICE, Paint, QUESTION, URL } from "./common.mjs";

const baseURL = `${URL}/v1`;
const apiKey = "unused";
const MODELS = {
  "openai, default": (fetch) => createOpenAI({ baseURL, apiKey, fetch })("demo"),
  "openai, chat": (fetch) => createOpenAI({ baseURL, apiKey, fetch }).chat("demo"),
  compatible: (fetch) =>
    createOpenAICompatible({ name: "outrider", baseURL, fetch, supportsStructuredOutputs: true, includeUsage: true })("demo"),
  anthropic: (fetch) => createAnthropic({ baseURL, apiKey, fetch })("demo"),
};
const prompt = "Which colour?";
// The first step must call; what is said after the results is a colour.
const steps = {
  stopWhen: stepCountIs(2),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
};
const afterResults = (fields) => (url, init) => (init.body.includes("painted") ? adding(fields) : fetch)(url, init);

for (const [name, model] of Object.entries(MODELS)) {
  describe(name, () => {
    const ours = name !== "anthropic";
    const choice = ours ? CHOICE : JSON_CHOICE;
    const settings = { maxRetries: 0, maxOutputTokens: 1000 };
    const colour = { ...settings, model: model(adding(choice)), prompt };
    const free = { ...settings, model: model(fetch), prompt };
    const paints = [];
    const paint = tool({
      description: "Paints.",
      inputSchema: Paint,
      execute: (input) => void paints.push(Paint.parse(input)) ?? "painted",
    });

    test("generateText", async () => {
      const messages = [...QUESTION, { role: "assistant", content: "red" }, { role: "user", content: "Sure?" }];
      const { prompt: _, ...request } = colour;
      const made = await generateText({ ...request, system: "Be brief.", messages });
      assert(isColour(made.text));
      assert.equal(made.finishReason, "stop");
      assert(made.usage.inputTokens > 0 && made.usage.outputTokens > 0);
      assert.deepEqual(made.warnings ?? [], []);
    });

    test("streamText", async () => {
      const stream = streamText(colour);
      const parts = await all(stream.fullStream);
      const kinds = parts.map((part) => part.type).filter((kind) => kind !== "text-delta");
      assert.deepEqual(kinds, ["start", "start-step", "text-start", "text-end", "finish-step", "finish"]);
      assert(isColour(await stream.text));
      assert.equal(await stream.finishReason, "stop");
      assert((await stream.usage).outputTokens > 0);
    });

    test("a length", async () => {
      const long = { structured_outputs: { regex: "[a-z]{100}" } };
      const request = ours ? { ...colour, model: model(adding(long)), maxOutputTokens: 16 } : { ...colour, maxOutputTokens: 1 };
      assert.equal((await generateText(request)).finishReason, "length");
    });

    const objects = {
      "Output.object": async () => (await generateText({ ...free, output: Output.object({ schema: Paint }) })).output,
      "Output.object, streamed": async () => {
        const stream = streamText({ ...free, output: Output.object({ schema: Paint }) });
        await stream.consumeStream();
        return stream.output;
      },
    };
    for (const [what, made] of Object.entries(objects)) test(what, async () => void Paint.parse(await made()));

    test("Output.choice", async () => {
      assert(COLOURS.includes((await generateText({ ...free, output: Output.choice({ options: COLOURS }) })).output));
    });

    for (const toolChoice of ["required", { type: "tool", toolName: "paint" }]) {
      test(`a tool that is ${toolChoice.type ? "named" : toolChoice}`, async () => {
        const { execute: _, ...still } = paint;
        const made = await generateText({ ...free, tools: { paint: still }, toolChoice });
        assert(made.toolCalls.length > 0 && (toolChoice === "required" || made.toolCalls.length === 1));
        for (const call of made.toolCalls) Paint.parse(call.input);
        // OpenAI's chat completions say `stop` where the call was named.
        assert(made.finishReason === "tool-calls" || (toolChoice.type && made.finishReason === "stop"));
      });
    }

    test("tools in steps, streamed", async () => {
      paints.length = 0;
      const stream = streamText({ ...free, model: model(afterResults(choice)), tools: { paint }, ...steps });
      const parts = await all(stream.fullStream);
      assert.deepEqual(parts.filter((part) => part.type === "error"), []);
      const inputs = parts.filter((part) => part.type === "tool-call").map((part) => part.input);
      assert(inputs.length > 0);
      assert.deepEqual(inputs, paints);
      assert(isColour(await stream.text));
    });

    test("errors", async () => {
      const failing = generateText({ ...colour, model: model(adding({ temperature: 300 })) });
      await assert.rejects(failing, (error) => {
        assert(APICallError.isInstance(error));
        assert.equal(error.statusCode, 400);
        assert.match(error.message, /temperature/);
        assert.equal(error.isRetryable, false);
        return true;
      });
    });

    test("aborted", async () => {
      const left = new AbortController();
      const long = { ...colour, model: model(adding(ours ? { ignore_eos: true } : {})) };
      const stream = streamText({ ...long, abortSignal: left.signal });
      const kinds = [];
      for await (const part of stream.fullStream) {
        kinds.push(part.type);
        if (part.type === "text-delta") left.abort();
      }
      assert.equal(kinds.at(-1), "abort");
    });
  });
}

test("openai, default: a conversation by its last response", async () => {
  const model = MODELS["openai, default"](adding(CHOICE));
  const first = await generateText({ model, prompt });
  const previousResponseId = first.providerMetadata.openai.responseId;
  const second = await generateText({ model, prompt: "Sure?", providerOptions: { openai: { previousResponseId } } });
  assert(COLOURS.includes(second.text));
  assert(second.usage.inputTokens > first.usage.inputTokens);
});

test("openai, default: options of the provider", async () => {
  const model = MODELS["openai, default"](adding(CHOICE));
  const openai = {
    instructions: "Be brief.",
    metadata: { a: "b" },
    parallelToolCalls: false,
    promptCacheKey: "key",
    store: false,
    textVerbosity: "low",
    user: "someone",
  };
  assert(COLOURS.includes((await generateText({ model, prompt, providerOptions: { openai } })).text));
});

test("openai, default: logprobs", async () => {
  const model = MODELS["openai, default"](adding(CHOICE));
  const made = await generateText({ model, prompt, providerOptions: { openai: { logprobs: 2 } } });
  assert(made.providerMetadata.openai.logprobs[0].length > 0);
});

test("openai, completion", async () => {
  const made = await generateText({ model: createOpenAI({ baseURL, apiKey, fetch: adding(CHOICE) }).completion("demo"), prompt });
  assert(COLOURS.includes(made.text));
});
