// The page: a conversation, its parameters, and the view of what the server does.

import { askForKeyWith, events, request } from "./api.js";
import { ChatView, isSend } from "./chat.js";
import { Lanes } from "./lanes.js";
import { load, save } from "./store.js";
import { Inspector, TokenReader } from "./tokens.js";

const SAVE_MS = 2000; // while an answer comes
const ALTERNATIVES = 5;

const at = (id) => document.getElementById(id);
const state = load();
let running = null; // the AbortController of the answer that comes
let undo = null;

const view = new ChatView(at("conversation"), at("scroller"), new Inspector(at("inspector")), {
  edit(index, text) {
    cut(index);
    send(text);
  },
  retry(index) {
    cut(index);
    view.show(state.messages);
    answer();
  },
});

askForKeyWith(
  (wasTried) =>
    new Promise((resolve) => {
      at("key-problem").textContent = wasTried ? "That key is not the right one." : "";
      at("key").value = "";
      at("key-dialog").showModal();
      at("key-form").onsubmit = (event) => {
        event.preventDefault();
        at("key-dialog").close();
        resolve(at("key").value.trim());
      };
    }),
);
at("key-dialog").addEventListener("cancel", (event) => event.preventDefault());

const lanes = new Lanes(at("lanes"), at("figures"), (news) => {
  const status = news ? (news.status === "ok" ? "" : news.status) : "not reachable";
  if (at("status").textContent !== status) at("status").textContent = status;
  if (news) listModels(news.models);
});

function listModels(names) {
  const select = at("model");
  if (names.join() === [...select.options].map((option) => option.value).join()) return;
  select.replaceChildren(...names.map((name) => new Option(name, name)));
  if (names.includes(state.settings.model)) select.value = state.settings.model;
  select.disabled = names.length < 2;
  lanes.model = select.value;
}

/** Forget a message and those after it. */
function cut(index) {
  stop();
  state.messages.splice(index);
}

function stop() {
  running?.abort();
  running = null;
}

function keep() {
  if (!save(state)) notify("This browser has no room left to keep the conversation.");
}

function send(text) {
  stop();
  hideNotice();
  state.messages.push({ role: "user", text });
  view.show(state.messages);
  answer();
}

/** Have the conversation answered. */
async function answer() {
  const message = { role: "assistant", text: "", tokens: [], busy: true };
  const body = requestBody();
  const index = state.messages.push(message) - 1;
  const control = new AbortController();
  running = control;
  view.add(message, index);
  showRunning();
  const figures = { start: performance.now(), first: null, usage: null };
  const saving = setInterval(keep, SAVE_MS);
  try {
    await read(body, control, message, index, figures);
  } catch (error) {
    if (!control.signal.aborted) message.problem = error.message;
  }
  clearInterval(saving);
  delete message.busy;
  message.facts = facts(message, figures, control.signal.aborted);
  if (state.messages[index] === message) {
    view.settle(index, message);
    keep();
  }
  if (running === control) running = null;
  showRunning();
}

async function read(body, control, message, index, figures) {
  const reader = new TokenReader();
  const response = await request("/v1/chat/completions", { body, signal: control.signal });
  for await (const event of events(response)) {
    figures.usage = event.usage ?? figures.usage;
    const choice = event.choices[0];
    if (!choice || control.signal.aborted) continue;
    const tokens = reader.read(choice);
    if (!tokens.length) continue;
    figures.first ??= performance.now();
    const first = message.tokens.length;
    message.tokens.push(...tokens);
    message.text += choice.delta.content;
    view.grow(index, tokens, first);
  }
}

function requestBody() {
  const { system, model, shading, ...chosen } = state.settings;
  const parameters = Object.entries(chosen).filter(([, value]) => value !== "");
  const messages = state.messages.map(({ role, text }) => ({ role, content: text }));
  if (system?.trim()) messages.unshift({ role: "system", content: system });
  return {
    ...(at("model").value && { model: at("model").value }),
    messages,
    stream: true,
    stream_options: { include_usage: true },
    logprobs: true,
    top_logprobs: ALTERNATIVES,
    headrace: { token_details: true },
    ...Object.fromEntries(parameters.map(([name, value]) => [name, Number(value)])),
  };
}

function facts(message, { start, first, usage }, wasStopped) {
  const found = [];
  const known = message.tokens.filter((token) => token[1] !== null);
  if (known.length) {
    const seconds = (performance.now() - first) / 1000;
    found.push(`${known.length} tokens`);
    if (known.length > 1) found.push(`${(known.length / seconds).toFixed(0)} a second`);
    found.push(`first after ${((first - start) / 1000).toFixed(2)} s`);
    const guessed = known.filter((token) => token[3]).length;
    if (guessed) found.push(`${guessed} guessed`);
    const nats = known.reduce((sum, token) => sum + token[1], 0) / known.length;
    found.push(`${nats.toFixed(2)} nats on average`);
  }
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  if (cached) found.push(`${cached} of ${usage.prompt_tokens} prompt tokens from the cache`);
  if (wasStopped) found.push("stopped");
  return found.join(" \u00b7 ");
}

function showRunning() {
  at("send").hidden = Boolean(running);
  at("stop").hidden = !running;
  at("empty").hidden = state.messages.length > 0;
}

function notify(text, action, label) {
  const notice = at("notice");
  notice.textContent = text;
  notice.hidden = false;
  if (!action) return;
  const button = document.createElement("button");
  button.className = "quiet";
  button.textContent = label;
  button.addEventListener("click", action);
  notice.append(button);
}

function hideNotice() {
  at("notice").hidden = true;
  undo = null;
}

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("prompt").value.trim();
  if (!text || running) return;
  at("prompt").value = "";
  send(text);
});
at("prompt").addEventListener("keydown", (event) => {
  if (!isSend(event)) return;
  event.preventDefault();
  at("composer").requestSubmit();
});
at("stop").addEventListener("click", () => {
  stop();
  at("prompt").focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (running) stop();
  else if (at("panel").classList.contains("open")) openPanel(false);
});

at("new").addEventListener("click", () => {
  if (!state.messages.length) return;
  stop();
  undo = state.messages;
  state.messages = [];
  showAll();
  at("prompt").focus();
  notify("The conversation was cleared.", () => {
    state.messages = undo;
    hideNotice();
    showAll();
  }, "Undo");
});

function showAll() {
  view.show(state.messages);
  showRunning();
  keep();
}

function openPanel(isOpen) {
  at("panel").classList.toggle("open", isOpen);
  at("toggle-panel").setAttribute("aria-expanded", isOpen);
  (isOpen ? at("close-panel") : at("toggle-panel")).focus();
}
at("toggle-panel").addEventListener("click", () => openPanel(true));
at("close-panel").addEventListener("click", () => openPanel(false));

at("model").addEventListener("change", () => {
  state.settings.model = lanes.model = at("model").value;
  keep();
});
at("shading").addEventListener("change", () => {
  state.settings.shading = at("shading").checked;
  applyShading();
  keep();
});
at("parameters").addEventListener("submit", (event) => event.preventDefault());
at("parameters").addEventListener("input", (event) => {
  if (event.target.validity.valid) state.settings[event.target.name] = event.target.value;
  keep();
});

function applyShading() {
  document.body.classList.toggle("plain", state.settings.shading === false);
}

for (const field of at("parameters").elements) field.value = state.settings[field.name] ?? "";
at("shading").checked = state.settings.shading !== false;
for (const message of state.messages.filter((message) => message.busy)) {
  delete message.busy; // the page was closed while it came
  message.facts = "interrupted";
}
applyShading();
view.show(state.messages);
showRunning();
