// The tokens of an answer: from events of the stream to shaded text that can be looked into.

const SHADES = [0.1, 0.4, 0.9, 1.5, 2.2, 3.0]; // nats; above the last is the strongest

/**
 * Tokens of an answer as they come: [text, nats, probability, guessed, [[text, probability]…]].
 *
 * The text is that of the answer; how it divides over tokens is found from their bytes.
 */
export class TokenReader {
  #decoder = new TextDecoder();

  /** The tokens of one event's choice. */
  read(choice) {
    const text = choice.delta?.content ?? "";
    const logprobs = choice.logprobs?.content ?? [];
    const { entropy_nats: nats = [], drafted = [] } = choice.headrace ?? {};
    if (!logprobs.length) return text ? [[text, null, null, 0, []]] : [];
    const tokens = logprobs.map((token, i) => [
      this.#decoder.decode(new Uint8Array(token.bytes), { stream: true }),
      nats[i] ?? null,
      Math.exp(token.logprob),
      drafted[i] ? 1 : 0,
      token.top_logprobs.map((other) => [other.token, round(Math.exp(other.logprob))]),
    ]);
    for (const token of tokens) token[2] = round(token[2]);
    if (tokens.map((token) => token[0]).join("") !== text) {
      // Text was held back, or is no token's: it is shown with the newest of them.
      this.#decoder = new TextDecoder();
      for (const token of tokens) token[0] = "";
      tokens.at(-1)[0] = text;
    }
    return tokens;
  }
}

function round(probability) {
  return Number(probability.toPrecision(4));
}

/** An element for a token. Text only: what a model says is never HTML. */
export function tokenElement(token, index) {
  const [text, nats, , guessed] = token;
  const element = document.createElement("span");
  element.className = `t${nats === null ? "" : ` h${shade(nats)}`}${guessed ? " guessed" : ""}`;
  element.dataset.index = index;
  element.tabIndex = -1;
  element.textContent = text;
  return element;
}

function shade(nats) {
  const found = SHADES.findIndex((limit) => nats < limit);
  return found < 0 ? SHADES.length : found;
}

/** Shows what a token was drawn from, beside the token that is pointed at or has the focus. */
export class Inspector {
  #box;
  #shown = null;

  constructor(box) {
    this.#box = box;
    document.addEventListener("scroll", () => this.hide(), { capture: true, passive: true });
  }

  /** Look into the tokens of an answer; `tokens` is read when it is looked into. */
  attach(container, tokens) {
    const at = (event) => event.target.closest?.(".t");
    const show = (event) => {
      const element = at(event);
      if (element) this.show(element, tokens[element.dataset.index]);
    };
    container.addEventListener("pointerover", show);
    container.addEventListener("focusin", show);
    container.addEventListener("pointerout", (event) => {
      if (event.pointerType === "mouse" && document.activeElement !== at(event)) this.hide();
    });
    container.addEventListener("focusout", () => this.hide());
    container.addEventListener("keydown", (event) => this.#move(event, container));
  }

  show(element, token) {
    if (!token || token[1] === null) return;
    this.#shown?.classList.remove("shown");
    this.#shown = element;
    element.classList.add("shown");
    this.#box.replaceChildren(...details(token));
    this.#box.hidden = false;
    place(this.#box, element.getClientRects()[0] ?? element.getBoundingClientRect());
  }

  hide() {
    this.#shown?.classList.remove("shown");
    this.#shown = null;
    this.#box.hidden = true;
  }

  #move(event, container) {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") this.hide();
    if (!step || event.ctrlKey || event.metaKey || event.altKey) return;
    const all = [...container.querySelectorAll(".t")].filter((token) => token.textContent);
    const now = all.indexOf(document.activeElement);
    const next = Math.min(Math.max(now < 0 ? 0 : now + step, 0), all.length - 1);
    all[next]?.focus();
    event.preventDefault();
  }
}

function details([text, nats, probability, guessed, others]) {
  const head = tag("p", "head", tag("b", "", visible(text)), tag("span", "", percent(probability)));
  const facts = tag("p", "facts", `entropy ${nats.toFixed(2)} nats`);
  if (guessed) facts.append(tag("span", "guess", "guessed ahead"));
  const list = tag("ul", "");
  for (const [other, chance] of others) {
    const bar = tag("i", "bar");
    bar.style.setProperty("--part", chance);
    const mark = other === text ? "chosen" : "";
    list.append(tag("li", mark, bar, tag("span", "", visible(other)), percent(chance)));
  }
  return [head, facts, list];
}

function tag(name, className, ...content) {
  const element = document.createElement(name);
  element.className = className;
  element.append(...content);
  return element;
}

function visible(text) {
  return text.replaceAll(" ", "\u00b7").replaceAll("\n", "\u21b5").replaceAll("\t", "\u21e5");
}

function percent(part) {
  if (part >= 0.9995) return "100%";
  return part < 0.0005 ? "<0.1%" : `${(100 * part).toFixed(1)}%`;
}

/** Below the token where there is room, above it otherwise, never beyond the edges. */
function place(box, rect) {
  const margin = 8;
  const { width, height } = box.getBoundingClientRect();
  const below = rect.bottom + margin + height < innerHeight;
  const left = Math.min(Math.max(rect.left, margin), innerWidth - width - margin);
  box.style.left = `${Math.max(left, margin)}px`;
  box.style.top = `${below ? rect.bottom + margin : Math.max(rect.top - height - margin, margin)}px`;
}
