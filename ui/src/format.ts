// Times, durations, statuses and payloads as texts.

const GLYPHS: Record<string, string> = {
  pending: "◌",
  running: "▷",
  retrying: "↻",
  waiting: "◷",
  sleeping: "◷",
  paused: "Ⅱ",
  blocked: "■",
  completed: "✓",
  failed: "✗",
  cancelled: "⊘",
  terminated: "⊗",
  done: "✓",
  open: "▷",
  queued: "◌",
  dropped: "·",
};

export function glyph(word: string): string {
  return GLYPHS[word.toLowerCase()] ?? "·";
}

export function duration(ms: number): string {
  if (ms < 0) return "0s";
  if (ms < 1000) return `${Math.round(ms)}ms`;
  const seconds = ms / 1000;
  if (seconds < 60) return seconds >= 10 || ms % 1000 === 0 ? `${Math.round(seconds)}s` : `${seconds.toFixed(1)}s`;
  const units: [string, number][] = [
    ["d", 86400],
    ["h", 3600],
    ["m", 60],
    ["s", 1],
  ];
  for (let i = 0; i < 3; i++) {
    const [large, size] = units[i]!;
    if (seconds >= size) {
      const [small, next] = units[i + 1]!;
      const rest = Math.floor((seconds % size) / next);
      return `${Math.floor(seconds / size)}${large}${rest ? ` ${String(rest).padStart(2, "0")}${small}` : ""}`;
    }
  }
  return `${Math.round(seconds)}s`;
}

export function ms(time: string | null | undefined): number {
  return time ? Date.parse(time) : 0;
}

// The length of time since then, in whole seconds.
export function since(time: string): string {
  return duration(1000 * Math.round(Math.max(0, Date.now() - ms(time)) / 1000));
}

export function ago(time: string): string {
  return `${since(time)} ago`;
}

export function clock(time: string): string {
  return new Date(time).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" });
}

// A time of some day, without its year and seconds.
export function moment(time: string): string {
  return new Date(time).toLocaleString(undefined, { weekday: "short", day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
}

export function json(value: unknown, indent = 0): string {
  return JSON.stringify(value, null, indent) ?? "null";
}

export function short(text: string, most = 120): string {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

export function counted(number: number, noun: string, nouns = `${noun}s`): string {
  return `${number.toLocaleString("en")} ${number === 1 ? noun : nouns}`;
}

export function bytes(number: number | null): string {
  if (number === null) return "unknown";
  if (number < 1024) return `${number} B`;
  if (number < 1024 ** 2) return `${(number / 1024).toFixed(1)} KB`;
  if (number < 1024 ** 3) return `${(number / 1024 ** 2).toFixed(1)} MB`;
  return `${(number / 1024 ** 3).toFixed(1)} GB`;
}

// One side of a mismatch, such as `0/2  wait for event 'go'  at flows.py:19`.
export function sideOf(text: string): { op?: string; what: string; site?: string } {
  const [, op, what, site] = /^(\d\S*) {2}(.*?)(?: {2}at (\S+))?$/s.exec(text) ?? [];
  return { op, what: what ?? text, site };
}

// A word as a shell takes it.
export function quoted(text: string): string {
  return /^[\w@%+=:,./-]+$/.test(text) && !text.startsWith("-") ? text : `'${text.replaceAll("'", "'\\''")}'`;
}
