// npm's `openai` and the AI SDK through the gateway (`make test-clients`). Addresses come in the environment.

import assert from "node:assert/strict";
import { test } from "node:test";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const base = process.env.WARMGATE_TEST_BASE;
const scripted = process.env.WARMGATE_TEST_SCRIPTED;
const require = createRequire(`${process.env.WARMGATE_TEST_MODULES}/`);
const load = (name) => import(pathToFileURL(require.resolve(name)).href);

const { default: OpenAI } = await load("openai");
const { createOpenAI } = await load("@ai-sdk/openai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const ai = await load("ai");
const { z } = await load("zod");

const MODEL = "scripted";
const user = (content) => [{ role: "user", content }];
const parameters = { type: "object", properties: { city: { type: "string" }, days: { type: "integer" } } };
const weather = { type: "function", function: { name: "weather", parameters } };
const left = async () => (await (await fetch(`${scripted}/left`)).json()).left;
const untilLeft = async (before) => {
  while ((await left()) === before) await new Promise((resolve) => setTimeout(resolve, 20));
};
const unique = () => process.hrtime.bigint();

const client = new OpenAI({ baseURL: `${base}/v1`, apiKey: "unused", maxRetries: 0, timeout: 60_000 });

test("openai: chat, whole and streamed", async () => {
  const answer = await client.chat.completions.create({ model: MODEL, messages: user("say hello there") });
  assert.equal(answer.choices[0].message.content, "hello there");
  assert.equal(answer.usage.prompt_tokens_details.cached_tokens, 5);
  let text = "";
  for await (const chunk of await client.chat.completions.create({ model: MODEL, messages: user("say a b c"), stream: true })) {
    assert.equal(chunk.choices.length, 1, "a usage chunk that was not asked for");
    text += chunk.choices[0].delta.content ?? "";
  }
  assert.equal(text, "a b c");
});

test("openai: the stream helper, with tools", async () => {
  const stream = client.chat.completions.stream({ model: MODEL, messages: user("weather?"), tools: [weather] });
  const message = (await stream.finalChatCompletion()).choices[0].message;
  assert.deepEqual(JSON.parse(message.tool_calls[0].function.arguments), { city: "x", days: 7 });
});

test("openai: structured output", async () => {
  const schema = { type: "object", properties: { name: { type: "string" } } };
  const answer = await client.chat.completions.create({
    model: MODEL,
    messages: user("who?"),
    response_format: { type: "json_schema", json_schema: { name: "person", schema } },
  });
  assert.deepEqual(JSON.parse(answer.choices[0].message.content), { name: "x" });
});

test("openai: embeddings", async () => {
  const answer = await client.embeddings.create({ model: MODEL, input: ["ab", "abc"] });
  assert.deepEqual(answer.data.map((entry) => Array.from(entry.embedding)), [[2, 0, 0.5], [3, 1, 0.5]]);
});

test("openai: responses, whole and streamed", async () => {
  const answer = await client.responses.create({ model: MODEL, input: "say hello there" });
  assert.equal(answer.output_text, "hello there");
  const stream = client.responses.stream({ model: MODEL, input: "say a b c" });
  assert.equal((await stream.finalResponse()).output_text, "a b c");
});

test("openai: errors and retries", async () => {
  const ask = (text, options) => client.chat.completions.create({ model: MODEL, messages: user(text) }, options);
  await assert.rejects(ask("fail 400 99"), OpenAI.BadRequestError);
  await assert.rejects(client.chat.completions.create({ model: "no/such", messages: user("hi") }), (error) => {
    return error instanceof OpenAI.NotFoundError && error.code === "model_not_found" && Boolean(error.requestID);
  });
  assert.equal((await ask(`fail 500 2 ${unique()}`, { maxRetries: 2 })).choices[0].message.content, "fine");
  await assert.rejects(async () => {
    const stream = await client.chat.completions.create({ model: MODEL, messages: user("break"), stream: true });
    for await (const _ of stream);
  }, /told to break/);
  await assert.rejects(async () => {
    for await (const _ of await client.responses.create({ model: MODEL, input: "break", stream: true }));
  }, /told to break/);
});

test("openai: a stream that is aborted reaches the replica", { timeout: 60_000 }, async () => {
  const before = await left();
  const stream = await client.chat.completions.create({ model: MODEL, messages: user("hang"), stream: true });
  for await (const _ of stream) break;
  await untilLeft(before);
});

const providers = {
  "@ai-sdk/openai": createOpenAI({ baseURL: `${base}/v1`, apiKey: "unused" }),
  "@ai-sdk/openai-compatible": createOpenAICompatible({ name: "warmgate", baseURL: `${base}/v1`, apiKey: "unused" }),
};
const tool = ai.tool({
  description: "The weather in a city.",
  inputSchema: z.object({ city: z.string(), days: z.number() }),
  execute: async ({ city, days }) => `${city} ${days}`,
});

for (const [name, provider] of Object.entries(providers)) {
  const model = provider(MODEL);
  const quiet = { model, maxRetries: 0 };

  test(`${name}: text, whole and streamed`, async () => {
    const answer = await ai.generateText({ ...quiet, prompt: "say hello there" });
    assert.equal(answer.text, "hello there");
    assert.equal(answer.finishReason, "stop");
    assert.equal(answer.usage.outputTokens, 2);
    const streamed = ai.streamText({ ...quiet, prompt: "say a b c" });
    let text = "";
    for await (const part of streamed.textStream) text += part;
    assert.equal(text, "a b c");
    assert.equal(await streamed.finishReason, "stop");
  });

  test(`${name}: a tool loop with its defaults, whole and streamed`, async () => {
    const options = { ...quiet, prompt: "weather?", tools: { weather: tool }, stopWhen: ai.stepCountIs(3) };
    assert.equal((await ai.generateText(options)).text, 'the result is x 7');
    const streamed = ai.streamText(options);
    await streamed.consumeStream();
    assert.equal(await streamed.text, "the result is x 7");
    assert.equal((await streamed.steps).length, 2);
  });

  test(`${name}: structured output`, async () => {
    const schema = z.object({ name: z.string(), age: z.number() });
    const structured = name === "@ai-sdk/openai-compatible"
      ? createOpenAICompatible({ name: "w", baseURL: `${base}/v1`, apiKey: "k", supportsStructuredOutputs: true })(MODEL)
      : model;
    const { output } = await ai.generateText({ model: structured, prompt: "who?", output: ai.Output.object({ schema }) });
    assert.deepEqual(output, { name: "x", age: 7 });
  });

  test(`${name}: errors and retries`, async () => {
    await assert.rejects(ai.generateText({ ...quiet, prompt: "fail 400 99" }), (error) => error.statusCode === 400);
    const answer = await ai.generateText({ model, maxRetries: 3, prompt: `fail 500 2 ${unique()}` });
    assert.equal(answer.text, "fine");
    const errors = [];
    const broken = ai.streamText({ ...quiet, prompt: "break", onError: ({ error }) => errors.push(error) });
    await broken.consumeStream({ onError: () => {} });
    assert.match(JSON.stringify(errors[0]?.message ?? errors[0]), /told to break/);
  });

  test(`${name}: a stream that is aborted reaches the replica`, { timeout: 60_000 }, async () => {
    const before = await left();
    const controller = new AbortController();
    const streamed = ai.streamText({ ...quiet, prompt: "hang", abortSignal: controller.signal, onError: () => {} });
    for await (const part of streamed.fullStream) if (part.type === "text-delta") controller.abort();
    await untilLeft(before);
  });
}

test("@ai-sdk/openai: embeddings", async () => {
  const { embeddings } = await ai.embedMany({
    model: providers["@ai-sdk/openai"].textEmbeddingModel(MODEL),
    values: ["ab", "abc"],
  });
  assert.deepEqual(embeddings, [[2, 0, 0.5], [3, 1, 0.5]]);
});
