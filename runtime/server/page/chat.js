// The conversation on the screen: messages, what can be done with them, an answer as it comes.

import { tokenElement } from "./tokens.js";

/**
 * Draws messages and reports what is asked of them.
 *
 * `actions`: `edit(index, text)` and `retry(index)`.
 */
export class ChatView {
  #list;
  #scroller;
  #inspector;
  #actions;

  constructor(list, scroller, inspector, actions) {
    this.#list = list;
    this.#scroller = scroller;
    this.#inspector = inspector;
    this.#actions = actions;
  }

  /** All messages anew. */
  show(messages) {
    this.#inspector.hide();
    this.#list.replaceChildren(...messages.map((message, i) => this.#article(message, i)));
    this.#scroller.scrollTop = this.#scroller.scrollHeight;
  }

  /** A message that was added at the end. */
  add(message, index) {
    this.#list.append(this.#article(message, index));
    this.#scroller.scrollTop = this.#scroller.scrollHeight;
  }

  /** Tokens that an answer was given, the first of which has this index. */
  grow(index, tokens, first) {
    const text = this.#list.children[index].querySelector(".text");
    const added = tokens.map((token, i) => tokenElement(token, first + i));
    this.#following(() => text.append(...added));
  }

  /** An answer has begun or ended. */
  settle(index, message) {
    const article = this.#list.children[index];
    const footer = this.#footer(message, index);
    this.#following(() => article.querySelector("footer").replaceWith(footer));
    article.classList.toggle("busy", Boolean(message.busy));
    this.#list.setAttribute("aria-busy", Boolean(message.busy));
  }

  /** Change what is shown; who looks at the end goes on to. */
  #following(change) {
    const { scrollHeight, scrollTop, clientHeight } = this.#scroller;
    const follows = scrollHeight - scrollTop - clientHeight < 60;
    change();
    if (follows) this.#scroller.scrollTop = this.#scroller.scrollHeight;
  }

  #article(message, index) {
    const article = make("article", `message ${message.role}${message.busy ? " busy" : ""}`);
    const text = make("div", "text");
    if (message.role === "user") {
      text.textContent = message.text;
      article.append(make("h3", "hidden", "You"), text);
    } else {
      if (message.tokens) text.append(...message.tokens.map(tokenElement));
      else text.textContent = message.text;
      text.tabIndex = 0;
      text.setAttribute("role", "group");
      text.setAttribute("aria-label", "Answer; arrow keys go from token to token");
      this.#inspector.attach(text, message.tokens ?? []);
      article.append(make("h3", "hidden", "Answer"), text);
    }
    article.append(this.#footer(message, index));
    return article;
  }

  #footer(message, index) {
    const footer = make("footer", "");
    if (message.problem) {
      const problem = make("p", "problem", message.problem);
      problem.setAttribute("role", "alert");
      footer.append(problem);
    }
    const line = make("div", "line");
    if (message.role === "user") {
      line.append(button("Edit", () => this.#edit(message, index)));
    } else if (!message.busy) {
      line.append(button("Retry", () => this.#actions.retry(index)));
      if (message.text) line.append(copyButton(message.text));
      if (message.facts) line.append(make("span", "facts", message.facts));
    }
    footer.append(line);
    return footer;
  }

  #edit(message, index) {
    const article = this.#list.children[index];
    const form = make("form", "edit");
    const field = make("textarea", "");
    field.value = message.text;
    field.rows = Math.min(message.text.split("\n").length + 1, 12);
    field.setAttribute("aria-label", "Edit the message");
    const leave = () => {
      article.replaceWith(this.#article(message, index));
      this.#list.children[index].querySelector("button").focus();
    };
    form.append(field, button("Cancel", leave), button("Send again", null, "submit"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const text = field.value.trim();
      if (text) this.#actions.edit(index, text);
    });
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") leave();
      if (isSend(event)) form.requestSubmit();
      if (isSend(event) || event.key === "Escape") event.preventDefault();
      event.stopPropagation();
    });
    article.replaceChildren(form);
    field.focus();
  }
}

/** Whether a key says to send: Enter alone, and not to choose a word of an input method. */
export function isSend(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing;
}

function copyButton(text) {
  const copy = button("Copy", async () => {
    await navigator.clipboard.writeText(text);
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  });
  return copy;
}

function button(label, action, type = "button") {
  const element = make("button", "quiet", label);
  element.type = type;
  if (action) element.addEventListener("click", action);
  return element;
}

function make(name, className, text = "") {
  const element = document.createElement(name);
  element.className = className;
  element.textContent = text;
  return element;
}
