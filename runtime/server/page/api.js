// Requests to the server that this page came from.

const KEY = "headrace.key"; // in sessionStorage: gone with the tab

/** What the server refused: `status` and OpenAI's error object. */
export class ApiError extends Error {
  constructor(status, error) {
    super(error?.message ?? `the server answered with status ${status}`);
    this.status = status;
  }
}

let wantKey = async () => {};
let asking = null;

/** Say how to ask for a key: called with whether one was tried already, resolves with another. */
export function askForKeyWith(ask) {
  wantKey = ask;
}

/** The response to a request; asks for a key where the server wants one. */
export async function request(path, { body, signal } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    if (body) headers["Content-Type"] = "application/json";
    const response = await fetch(path, {
      method: body ? "POST" : "GET",
      body: body && JSON.stringify(body),
      headers,
      signal,
      cache: "no-store",
    });
    if (response.ok) return response;
    if (response.status !== 401) throw await refusal(response);
    if (sessionStorage.getItem(KEY) === key) await replaceKey(Boolean(key));
  }
}

async function replaceKey(wasTried) {
  asking ??= wantKey(wasTried).finally(() => (asking = null));
  sessionStorage.setItem(KEY, await asking);
}

async function refusal(response) {
  const answer = await response.json().catch(() => null);
  return new ApiError(response.status, answer?.error);
}

/** The objects of a stream of server-sent events, up to `[DONE]`. */
export async function* events(response) {
  for await (const event of blocks(response.body)) {
    const lines = event.split("\n");
    const data = lines.filter((line) => line.startsWith("data: ")).map((line) => line.slice(6));
    if (!data.length) continue;
    if (data[0] === "[DONE]") return;
    const value = JSON.parse(data.join("\n"));
    if (lines.includes("event: error")) throw new ApiError(500, value.error);
    yield value;
  }
  throw new ApiError(500, { message: "the connection ended before the answer did" });
}

async function* blocks(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (waiting + value).split("\n\n");
      waiting = parts.pop();
      yield* parts;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
