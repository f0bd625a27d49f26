// The page: the two runs, their numbers, and what is said of them.

import { byId, Controls, number, setText } from "./controls.js";
import { RoundChart } from "./rounds.js";
import { Run } from "./run.js";
import { getJson, RequestError } from "./stream.js";
import { TokenView } from "./tokens.js";

const LOADING_RETRIES = 120; // a second each
const DEFAULT_ROWS = 4; // of the chart, where K is "auto"
const FRAME_MS = 66; // the model may run on the same cores: drawing more often would slow it down

const controls = new Controls();
const columns = [makeColumn("speculative"), makeColumn("plain")];
const [speculative, plain] = columns;
const chart = new RoundChart(byId("chart"), {
  onRound: (round) => speculative.view.mark(round),
  onPick: (round) => speculative.view.reveal(round),
});

let abort = null; // ends what is running; null while nothing is
let failure = null; // what ended it, if that was not Stop

function makeColumn(name) {
  const box = byId(name);
  const stats = Object.fromEntries([...box.querySelectorAll("[data-stat]")].map((dd) => [dd.dataset.stat, dd]));
  const onRound = (round) => name === "speculative" && chart.mark(round);
  return {
    box,
    stats,
    state: box.querySelector("[data-state]"),
    bar: byId(`bar-${name}`),
    race: byId(`race-${name}`),
    view: new TokenView(box.querySelector("[data-output]"), { onRound }),
    queue: [], // tokens that came and were not drawn yet
    run: null,
  };
}

// ---- runs

async function loadBundle(retries) {
  try {
    controls.show(await getJson(`playground.json${location.search}`, controls.key));
    headline("Ready", "Run a prompt to see which tokens the draft got right.");
  } catch (error) {
    if (error.status !== 503 || !retries) return showError(error);
    headline("Loading", "The server loads the model.");
    await new Promise((resolve) => setTimeout(resolve, 1000));
    await loadBundle(retries - 1);
  }
}

async function runBoth() {
  if (abort) return;
  abort = new AbortController();
  controls.setRunning(true);
  byId("error").hidden = true;
  if (!controls.bundle) await loadBundle(0);
  if (controls.bundle) await runColumns(controls.compare, controls.together);
  abort = null;
  controls.setRunning(false);
}

async function runColumns(compare, together) {
  const chosen = compare ? columns : [speculative];
  begin(compare, together);
  const drawing = drawOften();
  try {
    if (together) await Promise.all(chosen.map(runOne));
    else for (const column of chosen) await runOne(column);
    conclude(compare, together);
  } catch {
    if (failure) showError(failure);
    else announce("Stopped", "The text is not whole.");
  } finally {
    drawing.stop();
    columns.forEach(settle);
    failure = null;
  }
}

async function runOne(column) {
  const settings = controls.settings({ plain: column === plain });
  const run = new Run(settings);
  column.run = run;
  column.box.dataset.phase = "running";
  column.state.textContent = "running";
  column.view.clear(run, settings.chat ? "" : settings.prompt);
  if (column === speculative) chart.clear(run, Number(settings.lookahead) || DEFAULT_ROWS);
  try {
    await run.stream((tokens) => column.queue.push(...tokens), { key: controls.key, signal: abort.signal });
  } catch (error) {
    if (!abort.signal.aborted) failure = error;
    abort.abort(); // the other one too
    throw error;
  }
  settle(column);
}

function begin(compare, together) {
  byId("equal").hidden = true;
  byId("columns").classList.toggle("single", !compare);
  plain.box.hidden = !compare;
  const { drafter, lookahead } = controls.settings({ plain: false });
  speculative.box.querySelector("[data-how]").textContent = `${drafter}, K = ${lookahead}`;
  for (const column of columns) {
    column.run = null;
    column.queue = [];
    column.view.clear();
    column.box.dataset.phase = "waiting";
    column.state.textContent = column === plain && !together ? "waits its turn" : "";
    showNumbers(column);
  }
  announce("Running", together ? "Both at the same time." : compare ? "First with drafts, then without." : "With drafts.");
  if (byId("results").getBoundingClientRect().top > innerHeight * 0.7) byId("results").scrollIntoView();
}

/** Draw what came, some times a second; not at all while the page is hidden. */
function drawOften() {
  let frame = 0;
  let last = -FRAME_MS;
  const draw = (now) => {
    if (now - last >= FRAME_MS) {
      columns.filter(({ run }) => run && !run.done).forEach(flush);
      last = now;
    }
    frame = requestAnimationFrame(draw);
  };
  frame = requestAnimationFrame(draw);
  return { stop: () => cancelAnimationFrame(frame) };
}

function flush(column) {
  if (column.queue.length) {
    column.view.append(column.queue);
    column.queue = [];
    if (column === speculative) chart.update();
  }
  showNumbers(column);
}

function settle(column) {
  const { run } = column;
  column.box.dataset.phase = !run ? "idle" : run.usage ? "done" : "stopped";
  column.state.textContent = "";
  if (!run) return;
  flush(column);
  const reasons = { length: "max tokens reached", stop: "ended by itself" };
  column.state.textContent = run.usage ? (reasons[run.finishReason] ?? run.finishReason) : "stopped";
  if (column === speculative) chart.describe();
}

// ---- numbers

function showNumbers({ run, stats, race }) {
  const acceptance = run?.acceptance;
  const first = run?.secondsToFirstToken;
  const speed = run?.speed;
  const texts = {
    speed: number(speed, speed < 100 ? 1 : 0),
    first: first == null ? "–" : first < 1 ? `${number(first * 1000)} ms` : `${number(first, 2)} s`,
    acceptance: acceptance == null ? "–" : `${number(100 * acceptance, 1)} %`,
    length: number(run?.meanAcceptedLength, 2),
    tokens: number(run?.tokens),
    rounds: number(run?.rounds.length),
  };
  for (const [name, dd] of Object.entries(stats)) dd.textContent = texts[name];
  race.textContent = speed == null ? "–" : `${texts.speed} tokens/s`;
  for (const count of document.querySelectorAll("[data-count]")) {
    count.textContent = speculative.run ? number(speculative.run.counts[count.dataset.count]) : "";
  }
  const drafters = [...(speculative.run?.drafters ?? [])].map(([name, count]) => `${name} ${number(count)}`);
  setText("drafters", drafters.join(", "));
  const speeds = columns.map((each) => each.run?.speed ?? 0);
  columns.forEach(({ bar }, i) => bar.setAttribute("width", `${(100 * speeds[i]) / Math.max(...speeds, 1e-9)}%`));
}

function conclude(compare, together) {
  const [fast, slow] = [speculative.run, plain.run];
  if (!compare) {
    announce(`${number(fast.speed)} tokens/s`, `${number(fast.tokens)} tokens in ${number(fast.rounds.length)} rounds.`);
    return;
  }
  const ratio = fast.speed / slow.speed;
  const rounds = `${number(fast.rounds.length)} rounds instead of ${number(slow.rounds.length)}`;
  const badge = byId("equal");
  badge.hidden = false;
  if (fast.settings.temperature !== 0) {
    badge.className = "badge neutral";
    badge.textContent = "Sampled: the texts may differ";
  } else {
    const equal = fast.text === slow.text;
    badge.className = `badge ${equal ? "good" : "bad"}`;
    badge.textContent = equal ? "✓ Both texts are equal" : "✗ The texts differ";
  }
  const note = together ? `${rounds}; measured while both ran` : rounds;
  announce(`${number(ratio, 2)}× ${ratio >= 1 ? "faster" : "the speed"}`, note, badge.textContent);
}

// ---- messages

function headline(title, note) {
  setText("speedup", title);
  setText("speedup-note", note);
}

/** Say it on the page and to screen readers. */
function announce(title, note, more = "") {
  headline(title, note);
  setText("status", `${title}. ${note} ${more}`);
}

function showError(error) {
  const known = error instanceof RequestError;
  setText("error-title", known ? error.title : "The page failed");
  setText("error-text", error.message);
  setText("error-detail", known ? error.detail : "");
  byId("error").hidden = false;
  headline("No result", "See the message above.");
  if (error.status === 401) controls.askForKey();
}

controls.form.addEventListener("submit", (event) => {
  event.preventDefault();
  runBoth();
});
byId("stop").addEventListener("click", () => abort?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") abort?.abort();
});

loadBundle(LOADING_RETRIES);
