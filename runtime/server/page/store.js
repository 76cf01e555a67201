// What is kept between visits: in this browser, and nowhere else.

const PLACE = "headrace.chat";

/**
 * `messages`: role, text and, of answers, tokens as `tokens.js` makes them.
 * `settings`: as the forms have them; "" is the server's default.
 */
export function load() {
  try {
    const kept = JSON.parse(localStorage.getItem(PLACE));
    if (kept?.version === 1) return kept;
  } catch {
    // damaged, or storage is off: begin anew
  }
  return { version: 1, messages: [], settings: {} };
}

/** Keep it, if need be without the tokens of old answers; false where there is no room at all. */
export function save(state) {
  const lean = structuredClone(state);
  for (;;) {
    try {
      localStorage.setItem(PLACE, JSON.stringify(lean));
      return true;
    } catch {
      const oldest = lean.messages.find((message) => message.tokens);
      if (!oldest) return false;
      delete oldest.tokens;
    }
  }
}
