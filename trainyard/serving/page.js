// The page of a server: one prompt, generated with two settings side by side.
"use strict";

const $ = (id) => document.getElementById(id);
let running = null; // AbortController of the texts that are being generated

function headers() {
  const key = $("key").value;
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

async function messageOf(reply) {
  try {
    return (await reply.json()).error.message;
  } catch {
    return `status ${reply.status}`;
  }
}

async function showModel() {
  const reply = await fetch("/v1/models", { headers: headers() });
  if (!reply.ok) {
    $("state").textContent = await messageOf(reply);
    return;
  }
  const model = (await reply.json()).data[0];
  $("model").textContent = model.id;
  $("state").textContent = `takes ${model.max_model_len} tokens, prompt and output together`;
}

// The fields of a column that are filled in.
function sampling(column) {
  const fields = {};
  for (const input of column.querySelectorAll("input")) {
    if (input.value !== "") fields[input.name] = Number(input.value);
  }
  return fields;
}

// Documents of a stream of server-sent events.
async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function generate(column, common, signal) {
  const output = column.querySelector("output");
  const figures = column.querySelector(".figures");
  const prompt = document.createElement("span");
  prompt.className = "prompt";
  prompt.textContent = common.prompt;
  const text = document.createElement("span");
  output.replaceChildren(prompt, text);
  figures.textContent = "";
  const began = performance.now();
  let first = null;
  try {
    const body = { ...common, ...sampling(column), stream: true };
    body.stream_options = { include_usage: true };
    const options = { method: "POST", headers: headers(), body: JSON.stringify(body), signal };
    const reply = await fetch("/v1/completions", options);
    if (!reply.ok) throw new Error(await messageOf(reply));
    for await (const event of events(reply)) {
      if (event.error) throw new Error(event.error.message);
      first ??= performance.now();
      for (const choice of event.choices) text.textContent += choice.text;
      if (event.usage) {
        const seconds = (performance.now() - began) / 1000;
        const count = event.usage.completion_tokens;
        figures.textContent =
          `${count} tokens, first after ${((first - began) / 1000).toFixed(2)} s, ` +
          `${(count / seconds).toFixed(1)} tokens/s`;
      }
    }
  } catch (error) {
    figures.textContent = error.name === "AbortError" ? "stopped" : error.message;
  }
}

async function generateBoth(event) {
  event.preventDefault();
  running = new AbortController();
  $("generate").disabled = true;
  $("stop").disabled = false;
  const common = { prompt: $("prompt").value, max_tokens: Number($("max_tokens").value) };
  if ($("seed").value !== "") common.seed = Number($("seed").value);
  const columns = [...document.querySelectorAll("fieldset")];
  await Promise.all(columns.map((column) => generate(column, common, running.signal)));
  $("generate").disabled = false;
  $("stop").disabled = true;
}

$("form").addEventListener("submit", generateBoth);
$("stop").addEventListener("click", () => running.abort());
$("key").addEventListener("change", showModel);
showModel();
