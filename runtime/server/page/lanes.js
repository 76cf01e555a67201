// The live view: which sequences share a step, and what that comes to.

import { request } from "./api.js";

const BUSY_MS = 250;
const IDLE_MS = 1000;
const LANE = 14; // CSS pixels
const COLUMN = 4;
const MIN_LANES = 4;
const RATE_S = 3;
const KEPT = 600; // steps

/** Asks the server again and again while somebody can see it. */
export class Lanes {
  #canvas;
  #figures;
  #steps = [];
  #model = "";
  #onNews;

  /** `onNews` gets each answer of the server, or null where it cannot be reached. */
  constructor(canvas, figures, onNews) {
    this.#canvas = canvas;
    this.#figures = figures;
    this.#onNews = onNews;
    new ResizeObserver(() => this.#draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#draw());
    this.#run();
  }

  /** Which model to look at; "" is the first. */
  set model(name) {
    if (name === this.#model) return;
    this.#model = name;
    this.#steps = [];
  }

  async #run() {
    for (;;) {
      let wait = IDLE_MS;
      if (!document.hidden) {
        const news = await this.#ask();
        if (news?.running) wait = BUSY_MS;
        this.#onNews(news);
        if (news?.steps) this.#take(news);
      }
      await new Promise((resolve) => setTimeout(resolve, wait));
    }
  }

  async #ask() {
    const query = new URLSearchParams({ after: this.#steps.at(-1)?.id ?? -1 });
    if (this.#model) query.set("model", this.#model);
    try {
      return await (await request(`/lanes?${query}`)).json();
    } catch {
      return null;
    }
  }

  #take(news) {
    if (this.#model && news.model !== this.#model) return; // another was chosen meanwhile
    this.#steps = [...this.#steps, ...news.steps].slice(-KEPT);
    const recent = this.#steps.filter((step) => step.end_s > news.now_s - RATE_S);
    show(this.#figures, figures(news, recent.length ? recent : this.#steps.slice(-50), recent));
    this.#draw();
  }

  #draw() {
    const canvas = this.#canvas;
    const width = canvas.clientWidth;
    const steps = this.#steps.slice(-Math.floor(width / COLUMN));
    const slots = steps.flatMap((step) => step.rows.map((row) => row[0]));
    const lanes = Math.max(MIN_LANES, ...slots.map((slot) => slot + 1));
    const scale = devicePixelRatio;
    canvas.style.height = `${lanes * LANE}px`;
    canvas.width = width * scale;
    canvas.height = lanes * LANE * scale;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    const colours = palette(canvas);
    pen.fillStyle = colours.line;
    for (let lane = 0; lane < lanes; lane++) pen.fillRect(0, (lane + 1) * LANE - 1, width, 1);
    steps.forEach((step, i) => {
      const x = width - (steps.length - i) * COLUMN;
      for (const row of step.rows) drawRow(pen, x, row, colours);
    });
    const rows = steps.at(-1)?.rows.length ?? 0;
    canvas.setAttribute("aria-label", `${steps.length} steps; ${rows} sequences in the newest`);
  }
}

function palette(canvas) {
  const style = getComputedStyle(canvas);
  const read = (name) => style.getPropertyValue(name).trim();
  return { line: style.color, lightness: read("--lane-light"), chroma: read("--lane-chroma") };
}

function drawRow(pen, x, [slot, sequence, tokens, drafted, accepted, isPrompt], colours) {
  const hue = (185 + sequence * 137.5) % 360;
  const colour = (alpha) => `oklch(${colours.lightness} ${colours.chroma} ${hue} / ${alpha})`;
  const bottom = (slot + 1) * LANE - 1;
  const room = LANE - 3;
  const bar = (from, to, alpha) => {
    const [low, high] = [from, to].map((count) => Math.round((room * Math.min(count, 5)) / 5));
    pen.fillStyle = colour(alpha);
    pen.fillRect(x, bottom - high, COLUMN - 1, high - low);
  };
  if (isPrompt) {
    pen.fillStyle = colour(0.3);
    pen.fillRect(x, bottom - room, COLUMN, room);
    return;
  }
  bar(0, 2, 0.75);
  bar(2, 2 + accepted, 1);
  bar(2 + accepted, 2 + drafted, 0.22);
}

function figures(news, steps, recent) {
  const rows = steps.flatMap((step) => step.rows);
  const sum = (of, list) => list.reduce((total, item) => total + of(item), 0);
  const drafted = sum((row) => row[3], rows);
  const accepted = sum((row) => row[4], rows);
  const written = sum(
    (step) => sum((row) => (row[5] ? 0 : 1 + row[4]), step.rows),
    recent,
  );
  const first = recent[0];
  const span = first ? news.now_s - first.end_s + first.ms / 1000 : 1;
  const perStep = (total) => (steps.length ? total / steps.length : null);
  return [
    ["Tokens a second", (written / span).toFixed(0)],
    ["Running, waiting", `${news.running}, ${news.waiting}`],
    ["Sequences a step", perStep(rows.length)?.toFixed(1) ?? "\u2013"],
    ["A step", steps.length ? `${perStep(sum((step) => step.ms, steps)).toFixed(1)} ms` : "\u2013"],
    ["Guesses right", drafted ? `${accepted} of ${drafted}` : "\u2013"],
    ["Memory", `${(news.memory_bytes / 2 ** 20).toFixed(0)} MiB`],
  ];
}

function show(list, pairs) {
  if (list.children.length !== pairs.length) {
    list.replaceChildren(
      ...pairs.map(() => {
        const item = document.createElement("div");
        item.append(document.createElement("dt"), document.createElement("dd"));
        return item;
      }),
    );
  }
  pairs.forEach(([name, value], i) => {
    const [term, figure] = list.children[i].children;
    if (term.textContent !== name) term.textContent = name;
    if (figure.textContent !== value) figure.textContent = value;
  });
}
