// One request: what is sent, what came of it, and the numbers of it.

import { streamEvents } from "./stream.js";

/** The body of a request. `settings.drafter` "none" decodes plainly. */
export function requestBody(settings) {
  const body = {
    model: settings.model,
    max_tokens: settings.maxTokens,
    temperature: settings.temperature,
    top_p: settings.topP,
    seed: settings.seed,
    stream: true,
    stream_options: { include_usage: true },
    speculative: { drafter: settings.drafter, num_speculative_tokens: settings.lookahead, token_origins: true },
  };
  if (settings.chat) {
    const system = settings.system ? [{ role: "system", content: settings.system }] : [];
    body.messages = [...system, { role: "user", content: settings.prompt }];
  } else {
    body.prompt = settings.prompt;
  }
  return body; // what is undefined is not sent
}

/** A running or finished request. Counts are exact; `usage` of the server comes with the end. */
export class Run {
  constructor(settings) {
    this.settings = settings;
    this.counts = { accepted: 0, corrected: 0, bonus: 0, target: 0 };
    this.drafters = new Map(); // accepted tokens by drafter, in the order in which they first had one
    // {accepted, branches, drafter, end}: accepted tokens, those beside the chain, whose they are, and the kind of the target's own token; null if it was cut off
    this.rounds = [];
    this.text = "";
    this.usage = null;
    this.drafted = 0;
    this.finishReason = null;
    this.started = 0;
    this.firstToken = 0;
    this.lastToken = 0;
    this.done = false;
    this._open = null;
  }

  /** Send it, and call `onTokens` with the tokens that came, each with the number of its round. */
  async stream(onTokens, { key, signal }) {
    this.started = performance.now();
    const path = this.settings.chat ? "v1/chat/completions" : "v1/completions";
    try {
      for await (const events of streamEvents(path, requestBody(this.settings), { key, signal })) {
        const tokens = events.flatMap((event) => this._take(event));
        if (tokens.length) onTokens(tokens);
      }
    } finally {
      this.done = true;
    }
  }

  _take(event) {
    this.usage = event.usage ?? this.usage;
    const choice = event.choices?.[0];
    if (!choice) return [];
    this.text += choice.text ?? choice.delta?.content ?? "";
    this.finishReason = choice.finish_reason ?? this.finishReason;
    this.drafted += choice.drafted ?? 0;
    const tokens = (choice.tokens ?? []).map((token) => this._count(token));
    if (tokens.length) {
      this.lastToken = performance.now();
      this.firstToken ||= this.lastToken;
    }
    return tokens;
  }

  // A round is some accepted tokens, then one of the target's own, unless the text ended before it.
  _count({ text, kind, drafter, branch = false }) {
    this.counts[kind] += 1;
    this._open ??= this._newRound();
    const round = this._open;
    const index = this.rounds.length - 1;
    if (kind === "accepted") {
      round.accepted += 1;
      if (branch) round.branches += 1;
      round.drafter = drafter;
      this.drafters.set(drafter, (this.drafters.get(drafter) ?? 0) + 1);
    } else {
      round.end = kind;
      this._open = null;
    }
    return { text, kind, drafter, branch, round: index };
  }

  _newRound() {
    const round = { accepted: 0, branches: 0, drafter: null, end: null };
    this.rounds.push(round);
    return round;
  }

  get tokens() {
    return this.counts.accepted + this.counts.corrected + this.counts.bonus + this.counts.target;
  }

  /** Tokens over the seconds since the request was sent. */
  get speed() {
    if (!this.tokens) return null;
    const end = this.done ? this.lastToken : performance.now();
    return (1000 * this.tokens) / Math.max(end - this.started, 1);
  }

  get secondsToFirstToken() {
    return this.firstToken ? (this.firstToken - this.started) / 1000 : null;
  }

  /** Rounds with a draft; one without gives a single token, the target's. */
  get draftRounds() {
    return this.rounds.length - this.counts.target;
  }

  /** Accepted over drafted tokens; null if nothing was drafted. */
  get acceptance() {
    return this.drafted ? this.counts.accepted / this.drafted : null;
  }

  /** Mean tokens of a round with a draft, the target's own included. */
  get meanAcceptedLength() {
    if (this.usage?.speculative) return this.usage.speculative.mean_accepted_length;
    return this.draftRounds ? 1 + this.counts.accepted / this.draftRounds : null;
  }
}
