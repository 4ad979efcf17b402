// The page at /: a chat that streams, and figures read off /metrics. No library, no build step.
"use strict";

const $ = (id) => document.getElementById(id);
const root = new URL(".", location.href);
const history = [];
let running = null; // AbortController of the answer being written

// -- settings ---------------------------------------------------------------------------------------------------------

const KEPT = ["temperature", "top_p", "top_k", "max_tokens", "seed", "stop_text", "system", "schema", "tools", "key"];
for (const id of KEPT) {
  const kept = sessionStorage.getItem(id);
  if (kept !== null) $(id).value = kept;
  $(id).addEventListener("change", () => sessionStorage.setItem(id, $(id).value));
}
$("more").open = Boolean($("tools").value || $("schema").value);
const theme = localStorage.getItem("theme");
if (theme) document.documentElement.dataset.theme = theme;
$("theme").addEventListener("click", () => {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme || (dark ? "dark" : "light");
  document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
  localStorage.setItem("theme", document.documentElement.dataset.theme);
});

function headers() {
  const key = $("key").value.trim();
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

function sampling() {
  const found = {};
  for (const id of ["temperature", "top_p"]) if ($(id).value !== "") found[id] = Number($(id).value);
  for (const id of ["top_k", "max_tokens", "seed"]) if ($(id).value !== "") found[id] = parseInt($(id).value, 10);
  if ($("stop_text").value) found.stop = [$("stop_text").value];
  return found;
}

// -- chat -------------------------------------------------------------------------------------------------------------

function bubble(kind, text) {
  $("examples").hidden = true;
  const item = document.createElement("li");
  item.className = kind;
  const body = document.createElement("div");
  body.className = "text";
  body.textContent = text;
  item.append(body);
  $("messages").append(item);
  item.scrollIntoView({ block: "end" });
  return { item, body };
}

function note(item, text) {
  const small = document.createElement("small");
  small.textContent = text;
  item.append(small);
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
    }
  }
}

async function problem(response) {
  try {
    const body = await response.json();
    return body.message || body.detail || response.statusText;
  } catch {
    return response.statusText || `status ${response.status}`;
  }
}

// Calls of the model whose results nobody has given yet: the next messages are these results.
const pending = [];

function parsed(id, what) {
  try {
    return JSON.parse($(id).value);
  } catch (error) {
    throw new Error(`${what} no JSON: ${error.message}`);
  }
}

function format() {
  const found = {};
  if ($("tools").value.trim()) found.tools = [parsed("tools", "The tools are")].flat();
  if ($("schema").value.trim()) {
    const schema = parsed("schema", "The schema is");
    found.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  return found;
}

function expectResult() {
  $("prompt").placeholder = pending.length
    ? `What does ${pending[0].function.name} return?`
    : $("prompt").dataset.usual;
}

function thoughts(item, text) {
  let fold = item.querySelector("details");
  if (!fold) {
    fold = document.createElement("details");
    const title = document.createElement("summary");
    title.textContent = "Thoughts";
    const body = document.createElement("div");
    body.className = "text";
    fold.append(title, body);
    item.prepend(fold);
  }
  fold.lastChild.textContent = text;
}

function addCalls(calls, deltas) {
  for (const delta of deltas) {
    const call = (calls[delta.index] ||= { id: "", type: "function", function: { name: "", arguments: "" } });
    call.id += delta.id || "";
    call.function.name += delta.function.name || "";
    call.function.arguments += delta.function.arguments || "";
  }
}

function parsedCall(call) {
  const item = element("dl", element("dt", call.function.name));
  item.className = "call";
  let given = call.function.arguments;
  try {
    given = JSON.stringify(JSON.parse(given), null, 2);
  } catch { /* still arriving, or damaged: shown as it is */ }
  item.append(element("dd", element("pre", element("code", given))));
  return item;
}

// What the model has said so far; formatted text is made anew at most once per frame.
function display(body, said) {
  if (said.drawn) return;
  said.drawn = true;
  requestAnimationFrame(() => {
    said.drawn = false;
    if (said.plain) body.textContent = said.answer;
    else markdown(body, said.answer);
    body.append(...said.calls.filter(Boolean).map(parsedCall));
    const list = $("messages");
    if (list.scrollHeight - list.scrollTop - list.clientHeight < 160) list.scrollTop = list.scrollHeight;
  });
}

// The message of the user, or the result of a call, as the next message of the chat; whether the model's turn is next.
function say(text) {
  if (!pending.length) {
    bubble("user", text);
    history.push({ role: "user", content: text });
    return true;
  }
  const call = pending.shift();
  bubble("user", `${call.function.name} → ${text}`);
  history.push({ role: "tool", tool_call_id: call.id, name: call.function.name, content: text });
  expectResult();
  return !pending.length;
}

async function ask(text) {
  let wanted;
  try {
    wanted = format();
  } catch (error) {
    bubble("assistant error", error.message);
    return;
  }
  if (!say(text)) return;
  const system = $("system").value.trim();
  const messages = system ? [{ role: "system", content: system }, ...history] : history;
  const { item, body } = bubble("assistant live", "");
  running = new AbortController();
  busy(true);
  const started = performance.now();
  const said = { answer: "", calls: [], plain: Boolean(wanted.response_format), drawn: false };
  let first = 0, usage = null, thought = "", reason = "";
  try {
    const response = await fetch(new URL("v1/chat/completions", root), {
      method: "POST",
      headers: headers(),
      signal: running.signal,
      body: JSON.stringify({
        model: $("model").value, messages, stream: true, stream_options: { include_usage: true }, ...wanted, ...sampling(),
      }),
    });
    if (response.status === 401) wantKey();
    if (!response.ok) throw new Error(await problem(response));
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) usage = event.usage;
      const choice = event.choices[0];
      if (!choice) continue;
      const { content, reasoning_content: more, tool_calls: called } = choice.delta;
      if (content || more || called) {
        first ||= performance.now();
        said.answer += content || "";
        if (more) thoughts(item, (thought += more));
        addCalls(said.calls, called || []);
        display(body, said);
      }
      reason = choice.finish_reason || reason;
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      item.classList.add("error");
      said.plain = true;
      display(body, { ...said, answer: [said.answer, error.message].filter(Boolean).join("\n\n"), drawn: false });
    }
    reason = "stopped";
  }
  item.classList.remove("live");
  const { answer, calls } = said;
  if (calls.length && reason !== "stopped") {
    history.push({ role: "assistant", content: answer || null, tool_calls: calls });
    pending.push(...calls);
  } else if (answer) history.push({ role: "assistant", content: answer });
  else history.pop();
  expectResult();
  if (usage) {
    const seconds = (performance.now() - first) / 1000;
    const rate = usage.completion_tokens > 1 ? ((usage.completion_tokens - 1) / seconds).toFixed(1) : "–";
    const wait = Math.round(first - started);
    note(item, `${usage.completion_tokens} tokens, ${rate} tokens/s, first after ${wait} ms${reason === "length" ? ", cut at max tokens" : ""}`);
  } else if (reason === "stopped" && answer) {
    note(item, "stopped");
  }
  if (answer) item.append(copyButton(() => answer, "Copy answer"));
  running = null;
  busy(false);
}

function busy(on) {
  $("send").disabled = on;
  $("stop").disabled = !on;
  if (!on) $("prompt").focus();
}

$("prompt").dataset.usual = $("prompt").placeholder;
$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("prompt").value.trim();
  if (!text || running) return;
  $("prompt").value = "";
  ask(text);
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
$("stop").addEventListener("click", () => running && running.abort());
$("clear").addEventListener("click", () => {
  if (running) running.abort();
  history.length = pending.length = 0;
  expectResult();
  $("messages").replaceChildren();
  $("examples").hidden = false;
  $("prompt").focus();
});
$("examples").addEventListener("click", (event) => {
  if (event.target.localName === "button" && !running) ask(event.target.textContent);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
});

// -- figures ----------------------------------------------------------------------------------------------------------

const rates = [];
let before = null;

// The sums over all copies of the engine, and how many copies there are.
function parse(text) {
  const found = { copies: 0 };
  for (const line of text.split("\n")) {
    const match = /^vllm:([a-z_0-9]+)(\{[^}]*\})? ([-+.\deEInfNa]+)$/.exec(line);
    if (match && !match[1].endsWith("_bucket")) found[match[1]] = (found[match[1]] || 0) + Number(match[3]);
    if (match && match[1] === "engine_alive") found.copies++;
  }
  found.time = performance.now() / 1000;
  return found;
}

function show(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text;
}

function mean(now, name) {
  const count = now[`${name}_count`] - before[`${name}_count`];
  return count > 0 ? (now[`${name}_sum`] - before[`${name}_sum`]) / count : null;
}

function draw() {
  const peak = roundUp(Math.max(1, ...rates));
  const step = 240 / 119;
  const points = rates.map((rate, i) => [(i + 120 - rates.length) * step, 79 - (rate / peak) * 78]);
  const list = points.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`);
  $("line").setAttribute("points", list.join(" "));
  $("area").setAttribute("d", list.length ? `M${points[0][0].toFixed(1)},80 L${list.join(" L")} L240,80 Z` : "");
  show("peak", short(peak));
  show("half", short(peak / 2));
}

// The next of 1, 2, 5, 10, 20, ... so that the axis does not change with every step.
function roundUp(value) {
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((n) => n * unit).find((n) => n >= value);
}

function short(value) {
  return value >= 1000 ? `${value / 1000}k` : String(value);
}

function state(text, bad) {
  show("state", text);
  $("state").classList.toggle("bad", bad);
}

let asked = false;
function wantKey() {
  state("the server wants an API key", true);
  $("key").classList.add("wanted");
  if (asked) return;
  asked = true;
  $("key").focus();
  $("key").scrollIntoView({ block: "center" });
}

async function tick() {
  try {
    if (!$("model").options.length && !(await models())) return;
    const response = await fetch(new URL("metrics", root), { headers: headers() });
    if (response.status === 401) return wantKey();
    if (!response.ok) throw new Error();
    const now = parse(await response.text());
    state("ready", false);
    show("running", String(now.num_requests_running));
    show("waiting", String(now.num_requests_waiting));
    show("cache", `${(100 * now.kv_cache_usage_perc / now.copies).toFixed(1)} %`);
    show("hits", now.prefix_cache_queries_total ? `${(100 * now.prefix_cache_hits_total / now.prefix_cache_queries_total).toFixed(1)} %` : "–");
    if (before && now.generation_tokens_total >= before.generation_tokens_total) { // else the server is a new one
      const seconds = now.time - before.time;
      const rate = (now.generation_tokens_total - before.generation_tokens_total) / seconds;
      rates.push(rate);
      if (rates.length > 120) rates.shift();
      show("rate", rate.toFixed(rate < 10 ? 1 : 0));
      show("prompt_rate", ((now.prompt_tokens_total - before.prompt_tokens_total) / seconds).toFixed(0));
      const ttft = mean(now, "time_to_first_token_seconds");
      const tpot = mean(now, "time_per_output_token_seconds");
      if (ttft !== null) show("ttft", `${(1000 * ttft).toFixed(0)} ms`);
      if (tpot !== null) show("tpot", `${(1000 * tpot).toFixed(1)} ms`);
      draw();
    }
    before = now;
  } catch {
    state("no answer from the server", true);
  }
}

async function models() {
  const response = await fetch(new URL("v1/models", root), { headers: headers() });
  if (response.status === 401) return wantKey();
  if (!response.ok) throw new Error();
  $("key").classList.remove("wanted");
  for (const card of (await response.json()).data) $("model").append(new Option(card.id, card.id));
  return true;
}

async function start() {
  try {
    show("version", (await (await fetch(new URL("version", root))).json()).version);
  } catch { /* the state line says it */ }
  await tick();
  setInterval(() => document.hidden || tick(), 1000);
}
start();
