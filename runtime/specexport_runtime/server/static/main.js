// The page: controls, the two runs and their numbers.

import { RoundChart } from "./rounds.js";
import { Run } from "./run.js";
import { getJson, RequestError } from "./stream.js";
import { TokenView } from "./tokens.js";

const LOADING_RETRIES = 120; // a second each
const EXAMPLES = [
  ["Read lines", 'def read_lines(path, *, encoding="utf-8"):\n    """Return the lines of a file without their line endings."""'],
  ["Cache class", 'class LRUCache:\n    """A mapping that forgets its least recently used item when full."""\n\n    def __init__(self, maxsize=128):'],
  ["Walk a tree", 'def walk(node):\n    """Recursively yield all descendant nodes, including *node* itself, in no specified order."""\n'],
  ["Command line", "def main(args=None):\n    import argparse\n    parser = argparse.ArgumentParser(description='A simple command line interface.')"],
];
const CHAT_EXAMPLES = [
  ["Explain", "Explain in three sentences how a hash table finds a key."],
  ["Rewrite", "Rewrite this in plain English: The party of the first part shall indemnify the party of the second part."],
  ["Code", "Write a Python function that merges two sorted lists."],
];
const LOOKAHEAD_OF_NONE = 4;

const byId = (id) => document.getElementById(id);
const form = byId("controls");
const number = (value, digits) => (value == null ? "–" : value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }));

let bundle = null;
let abort = null;

const columns = {};
const chart = new RoundChart(byId("chart"), { onRound: (round) => columns.speculative.view.mark(round) });
for (const name of ["speculative", "plain"]) {
  const box = byId(name);
  const stats = {};
  for (const dd of box.querySelectorAll("[data-stat]")) stats[dd.dataset.stat] = dd;
  columns[name] = {
    name,
    box,
    stats,
    state: box.querySelector("[data-state]"),
    bar: byId(`bar-${name}`),
    race: byId(`race-${name}`),
    run: null,
    queue: [],
    view: new TokenView(box.querySelector("[data-output]"), { onRound: (round) => name === "speculative" && chart.mark(round) }),
  };
}

// ---- what the bundle can do

async function loadBundle(retries = LOADING_RETRIES) {
  try {
    bundle = await getJson("playground.json", byId("api-key").value);
  } catch (error) {
    if (error.status === 503 && retries > 0) {
      setText("speedup", "Loading");
      setText("speedup-note", "The server loads the model.");
      await new Promise((resolve) => setTimeout(resolve, 1000));
      return loadBundle(retries - 1);
    }
    showError(error);
    return;
  }
  setText("speedup", "Ready");
  setText("speedup-note", "Run a prompt to see which tokens the draft got right.");
  showBundle();
}

function showBundle() {
  setText("fact-model", bundle.model);
  setText("fact-context", `${number(bundle.max_model_len, 0)} tokens`);
  setText("fact-draft", `up to ${bundle.max_speculative_tokens} tokens`);
  byId("facts").hidden = false;
  byId("max-tokens").max = bundle.max_tokens;
  byId("mode").hidden = !bundle.chat;
  byId("drafter").replaceChildren(
    ...bundle.drafters.map(({ name, obstacle }) => {
      const option = new Option(obstacle ? `${name} (not here)` : name, name);
      option.disabled = Boolean(obstacle);
      option.title = obstacle ?? "";
      return option;
    }),
  );
  const able = bundle.drafters.filter(({ obstacle }) => !obstacle).map(({ name }) => name);
  byId("drafter").value = bundle.default_drafter ?? able[0];
  showLookaheads();
}

function showLookaheads() {
  const drafter = bundle.drafters.find(({ name }) => name === byId("drafter").value);
  const choices = Array.from({ length: bundle.max_speculative_tokens }, (_, i) => String(i + 1));
  if (bundle.auto) choices.unshift("auto");
  byId("lookahead").replaceChildren(...choices.map((text) => new Option(text, text)));
  const isDefault = drafter.name === bundle.default_drafter;
  const preferred = (isDefault && bundle.default_num_speculative_tokens) || drafter.num_speculative_tokens;
  byId("lookahead").value = String(preferred);
}

function showExamples() {
  const examples = isChat() ? CHAT_EXAMPLES : EXAMPLES;
  byId("examples").replaceChildren(
    ...examples.map(([title, text]) => {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: title });
      button.addEventListener("click", () => {
        byId("prompt").value = text;
      });
      return button;
    }),
  );
  byId("prompt").value = examples[0][1];
  byId("system-field").hidden = !isChat();
  setText("prompt-label", isChat() ? "Message" : "Prompt");
}

function showOrder() {
  const together = byId("together");
  together.disabled = !byId("compare").checked;
  setText(
    "order-note",
    together.disabled ? "Only the speculative run."
      : together.checked ? "Both share the machine and the batch: neither speed is its own."
        : "The plain run comes second, so that neither slows the other.",
  );
}

// ---- a run

function isChat() {
  return form.elements.mode.value === "chat";
}

function settingsOf(column) {
  const numberOf = (id) => (byId(id).value.trim() === "" ? undefined : Number(byId(id).value));
  const plain = column.name === "plain";
  const choice = byId("lookahead").value;
  const lookahead = choice === "auto" ? choice : Number(choice);
  const drafter = byId("drafter").value;
  return {
    model: bundle.model,
    chat: isChat(),
    system: byId("system").value,
    prompt: byId("prompt").value,
    maxTokens: numberOf("max-tokens"),
    temperature: numberOf("temperature"),
    topP: numberOf("top-p"),
    seed: numberOf("seed"),
    drafter: plain ? "none" : drafter,
    lookahead: plain ? undefined : lookahead,
    draftsWholeK: !plain && lookahead !== "auto" && (drafter === "draft-model" || drafter === "self"),
  };
}

async function runBoth() {
  if (abort) return;
  if (!bundle) await loadBundle(0);
  if (!bundle) return;
  abort = new AbortController();
  const compare = byId("compare").checked;
  const together = compare && byId("together").checked;
  const runs = Object.values(columns).filter(({ name }) => compare || name === "speculative");
  begin(compare, together);
  const tick = startTicking();
  try {
    if (together) await Promise.all(runs.map(runOne));
    else for (const column of runs) await runOne(column);
    conclude(compare, together);
  } catch (error) {
    const stopped = abort.signal.aborted && !failure;
    failure ??= error;
    abort.abort(); // the other one too
    if (stopped || error.name === "AbortError") announce("Stopped", "The request was ended before its text was whole.");
    else showError(failure);
  } finally {
    tick.stop();
    for (const column of runs) settle(column);
    failure = null;
    abort = null;
    setRunning(false);
  }
}

let failure = null; // what ended the runs, if it was not Stop

async function runOne(column) {
  column.run = new Run(settingsOf(column));
  column.state.textContent = "running";
  column.box.dataset.phase = "running";
  column.view.clear(column.run, column.run.settings.chat ? "" : column.run.settings.prompt);
  if (column.name === "speculative") chart.clear(column.run, Number(column.run.settings.lookahead) || LOOKAHEAD_OF_NONE);
  try {
    await column.run.stream((tokens) => column.queue.push(...tokens), { key: byId("api-key").value, signal: abort.signal });
  } catch (error) {
    if (!abort.signal.aborted) failure ??= error;
    throw error;
  }
  settle(column);
}

function begin(compare, together) {
  byId("error").hidden = true;
  byId("equal").hidden = true;
  byId("columns").classList.toggle("single", !compare);
  byId("plain").hidden = !compare;
  setRunning(true);
  const { drafter, lookahead } = settingsOf(columns.speculative);
  columns.speculative.box.querySelector("[data-how]").textContent = `${drafter}, K = ${lookahead}`;
  for (const column of Object.values(columns)) {
    column.run = null;
    column.queue = [];
    column.view.clear();
    column.box.dataset.phase = "waiting";
    column.state.textContent = column.name === "plain" && !together ? "waiting" : "";
    showNumbers(column);
  }
  announce("Running", together ? "Both at the same time." : compare ? "First with drafts, then without." : "With drafts.");
  if (byId("results").getBoundingClientRect().top > innerHeight * 0.7) byId("results").scrollIntoView();
}

/** Draw what came, once a frame. */
function startTicking() {
  let frame = 0;
  const draw = () => {
    for (const column of Object.values(columns)) if (column.run && !column.run.done) flush(column);
    frame = requestAnimationFrame(draw);
  };
  draw();
  return { stop: () => cancelAnimationFrame(frame) };
}

function flush(column) {
  if (column.queue.length) {
    column.view.append(column.queue);
    column.queue = [];
    if (column.name === "speculative") chart.update();
  }
  showNumbers(column);
}

function settle(column) {
  const { run } = column;
  column.box.dataset.phase = run?.usage ? "done" : "stopped";
  if (!run) {
    column.state.textContent = "";
    return;
  }
  flush(column);
  column.state.textContent = run.usage ? { length: "max tokens", stop: "ended" }[run.finishReason] ?? run.finishReason : "stopped";
  if (column.name === "speculative") {
    const lengths = run.rounds.map((round) => round.accepted + (round.end ? 1 : 0));
    byId("chart").setAttribute("aria-label", `${lengths.length} rounds; tokens of each: ${lengths.join(", ")}`);
  }
}

// ---- numbers

function showNumbers(column) {
  const { run, stats } = column;
  const set = (name, text) => {
    if (stats[name] && stats[name].textContent !== text) stats[name].textContent = text;
  };
  const acceptance = run?.acceptance;
  const speed = run?.speed ?? null;
  const first = run?.secondsToFirstToken;
  set("speed", number(speed, speed < 100 ? 1 : 0));
  set("first", first == null ? "–" : first < 1 ? `${number(first * 1000, 0)} ms` : `${number(first, 2)} s`);
  set("acceptance", acceptance?.value == null ? "–" : `${acceptance.exact ? "" : "≈ "}${number(100 * acceptance.value, acceptance.exact ? 1 : 0)} %`);
  set("length", number(run?.draftRounds ? run.meanAcceptedLength : null, 2));
  set("tokens", number(run?.tokens, 0));
  set("rounds", number(run?.rounds.length, 0));
  column.race.textContent = speed == null ? "–" : `${number(speed, speed < 100 ? 1 : 0)} tokens/s`;
  if (column.name === "speculative") {
    for (const b of document.querySelectorAll("[data-count]")) b.textContent = run ? number(run.counts[b.dataset.count], 0) : "";
  }
  const fastest = Math.max(...Object.values(columns).map((each) => each.run?.speed ?? 0), 1e-9);
  for (const each of Object.values(columns)) each.bar.setAttribute("width", `${(100 * (each.run?.speed ?? 0)) / fastest}%`);
}

function conclude(compare, together) {
  const [fast, plain] = [columns.speculative.run, columns.plain.run];
  if (!compare) {
    announce(`${number(fast.speed, 0)} tokens/s`, `${number(fast.tokens, 0)} tokens in ${number(fast.rounds.length, 0)} rounds.`);
    return;
  }
  const ratio = fast.speed / plain.speed;
  const word = ratio >= 1 ? "faster" : "as fast";
  const rounds = `${number(fast.rounds.length, 0)} rounds instead of ${number(plain.rounds.length, 0)}`;
  announce(`${number(ratio, 2)}× ${word}`, together ? `${rounds}; measured while both ran` : rounds);
  const badge = byId("equal");
  const greedy = fast.settings.temperature === 0;
  const equal = fast.text === plain.text;
  badge.hidden = false;
  badge.className = `badge ${!greedy ? "neutral" : equal ? "good" : "bad"}`;
  badge.textContent = !greedy ? "Sampled: texts may differ" : equal ? "✓ Both texts are equal" : "✗ The texts differ";
  byId("status").textContent += ` ${badge.textContent}`;
}

// ---- messages

function setText(id, text) {
  byId(id).textContent = text;
}

function announce(title, note) {
  setText("speedup", title);
  setText("speedup-note", note);
  setText("status", `${title}. ${note}`);
}

function showError(error) {
  const known = error instanceof RequestError;
  setText("error-title", known ? error.title : "The page failed");
  setText("error-text", error.message);
  setText("error-detail", known ? error.detail : "");
  byId("error").hidden = false;
  setText("speedup", "No result");
  setText("speedup-note", "See the message above.");
  if (error.status === 401) {
    byId("key-field").hidden = false;
    byId("api-key").focus();
  }
}

function setRunning(running) {
  byId("run").disabled = running;
  byId("stop").disabled = !running;
  document.body.classList.toggle("running", running);
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  runBoth();
});
byId("stop").addEventListener("click", () => abort?.abort());
byId("drafter").addEventListener("change", showLookaheads);
byId("compare").addEventListener("change", showOrder);
byId("together").addEventListener("change", showOrder);
byId("mode").addEventListener("change", showExamples);
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && event.target.tagName !== "SELECT") abort?.abort();
});

showExamples();
showOrder();
loadBundle();
