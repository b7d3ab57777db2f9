// Requests to the JSON API, the token of the tab, the stream of changes, and reports in a file.
import { signal } from "@preact/signals";
import { inFile } from "./place";

export interface Run {
  id: string;
  name: string;
  version: string | null;
  status: string;
  execution: number;
  parent: string | null;
  created_at: string;
  updated_at: string;
  completed_at: string | null;
  custom_status: unknown;
  output: unknown;
  failure: Failure | null;
  block: Block | null;
  doing?: string;
  sentence?: string;
  due_at?: string | null;
}
export interface Failure {
  type_name?: string;
  message?: string;
  traceback?: string;
  category?: string;
}
export interface Mismatch {
  recorded: string;
  performed: string;
  site?: string;
  diff?: string[];
  turn: number;
}
export interface Block {
  reason: string;
  message?: string;
  detail?: string | Mismatch;
}
export interface Step {
  event: number;
  op: string;
  kind: string;
  call: string;
  state: "open" | "done" | "failed" | "dropped";
  since: string;
  ended_at: string | null;
  due_at: string | null;
  result: string | null;
  error: string | null;
  attempts: number;
  child: string | null;
  site: string;
}
export interface Attempt {
  activity_id: number;
  name: string;
  number: number;
  of: number;
  next_ms: number;
  is_running: boolean;
  enqueued_ms: number;
  last_error: string | null;
  deliveries: number;
  heartbeat: string | null;
}
export interface Unread {
  kind: string;
  name: string;
  count: number;
}
export interface Details extends Run {
  input: unknown;
  events: number;
  events_left_out: number;
  steps: Step[];
  attempts: Attempt[];
  queued_messages: number;
  unread: Unread[];
  problem: string | null;
  executions: number[];
  commands: string[];
  traceback: string | null;
  now: string;
}
export interface Tree extends Run {
  children: Tree[];
}
export interface Wait {
  waits_for: string;
  op: string;
  called_at: string;
  since: string;
  frames: { file: string; line: number; function: string; locals: Record<string, string> }[];
}
export interface Attention {
  kind: string;
  severity: string;
  sentence: string;
  count: number;
  query: string;
  advice: string;
  action: string | null;
  page: string;
}
export interface Queue {
  ready: number;
  later: number;
  locked: number;
  oldest_ms: number | null;
}
export interface Home {
  attention: Attention[];
  counts: Record<string, number>;
  series: { at: string; started: number; completed: number; failed: number }[];
  messages: Queue;
  work: Queue;
  workers: number;
  slots: number;
  busy: number;
  store: { provider: string; location: string; size_bytes: number | null };
  now: string;
}
export interface Event {
  id: number;
  type: string;
  at: string;
  data: unknown;
}
export interface StateEntry {
  key: string;
  value: unknown;
  updated_at: string;
}
// Runs at one moment: of an export file on the page, or inside of a page that was saved.
export interface Report {
  made_at: string;
  origin: string;
  first: string;
  runs: Record<string, { run: Details; events: Event[]; state: StateEntry[]; family: Tree }>;
}
export interface Settings {
  read_only: boolean;
  identity: string;
  scope: string;
  has_code: boolean;
  version: string;
}

export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly kind: string,
    message: string,
    readonly near: string[] = [],
    readonly position: number | null = null,
  ) {
    super(message);
  }
}

const TOKEN = "perdure-token";
// Why a token is asked for; null: it is not.
export const needsToken = signal<string | null>(null);
export const settings = signal<Settings | null>(null);
export const offline = signal<string | null>(null);

function headers(): Record<string, string> {
  const token = sessionStorage.getItem(TOKEN);
  return token ? { Authorization: `Bearer ${token}` } : {};
}

export function setToken(token: string): void {
  sessionStorage.setItem(TOKEN, token);
  needsToken.value = null;
}

async function answer<T>(request: Promise<Response>): Promise<T> {
  const token = sessionStorage.getItem(TOKEN);
  let response: Response;
  try {
    response = await request;
  } catch {
    offline.value = "The server does not answer. It is tried again.";
    throw new ApiError(0, "Offline", "the server does not answer");
  }
  offline.value = null;
  if (response.ok) return (await response.json()) as T;
  const problem = await response.json().catch(() => ({ error: "Unknown", message: response.statusText }));
  // A late answer to an older token says nothing of the one that was entered since.
  if (response.status === 401 && sessionStorage.getItem(TOKEN) === token) needsToken.value = token ? "This token is not known here, or it has expired." : "";
  if (response.status === 503) offline.value = problem.message;
  throw new ApiError(response.status, problem.error, problem.message, problem.near, problem.position);
}

const embedded = document.getElementById("report")?.textContent;
export const report = signal<Report | null>(embedded ? (JSON.parse(embedded) as Report) : null);

type Given = Record<string, string | number | null | undefined>;

function queryOf(given: Given): string {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(given)) {
    if (value !== null && value !== undefined && value !== "") query.set(name, String(value));
  }
  return query.size ? `?${query}` : "";
}

// What the API would answer, from the report.
function reported(path: string, given: Given): unknown {
  const found = report.value?.runs[String(given.id)];
  if (!found) throw new ApiError(404, "NotFound", `this file does not hold ${given.id}`);
  switch (path) {
    case "/run":
      return found.run;
    case "/run/state":
      return found.state;
    case "/run/family":
      return found.family;
    case "/run/events": {
      const wanted = String(given.text ?? "").toLowerCase();
      return { events: found.events.filter((each) => JSON.stringify(each).toLowerCase().includes(wanted)), next_after: null };
    }
    default:
      throw new ApiError(404, "NotFound", "this is not part of the file");
  }
}

export async function read<T>(path: string, given: Given = {}): Promise<T> {
  if (inFile()) return reported(path, given) as T;
  return answer<T>(fetch(`api/v1${path}${queryOf(given)}`, { headers: headers() }));
}

const MARKED = { "X-Perdure-Write": "1" };

export function write<T>(path: string, body: object): Promise<T> {
  const all = { ...headers(), ...MARKED, "Content-Type": "application/json" };
  return answer<T>(fetch(`api/v1${path}`, { method: "POST", headers: all, body: JSON.stringify(body) }));
}

export async function openFile(file: File): Promise<void> {
  const all = { ...headers(), ...MARKED, "Content-Type": "text/plain" };
  report.value = await answer<Report>(fetch(`api/v1/file${queryOf({ name: file.name })}`, { method: "POST", headers: all, body: file }));
}

// Save the run as one HTML file that needs no server.
export async function saveReport(id: string): Promise<void> {
  const response = await fetch(`api/v1/run/report${queryOf({ id })}`, { headers: headers() });
  if (!response.ok) throw new Error((await response.json()).message);
  const name = /filename="([^"]+)"/.exec(response.headers.get("Content-Disposition") ?? "")?.[1] ?? "run.html";
  save(name, await response.blob());
}

export function save(name: string, content: Blob): void {
  const anchor = document.createElement("a");
  anchor.href = URL.createObjectURL(content);
  anchor.download = name;
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(anchor.href), 10_000);
}

export interface Change {
  topics: string[];
  counts: Record<string, number>;
  problem: string | null;
}

// --- the stream: one for the tab, whatever its page reads

interface Listener {
  id: string | null;
  on: (change: Change) => void;
}

const RETRY_MS = 2_000;
const POLL_MS = 10_000;
const listeners = new Set<Listener>();
let stream: { id: string | null; ending: AbortController } | null = null;
let last = "";
export const counts = signal<Record<string, number>>({});

// Follow the changes of the store, and of one run. Returns a function that ends it. While the
// stream cannot be had, the page reads every ten seconds.
export function follow(id: string | null, on: (change: Change) => void): () => void {
  if (inFile()) return () => {};
  const listener = { id, on };
  listeners.add(listener);
  setTimeout(restart);
  return () => {
    listeners.delete(listener);
    setTimeout(restart);
  };
}

function restart(): void {
  const id = [...listeners].find((each) => each.id !== null)?.id ?? null;
  if (stream && listeners.size > 0 && stream.id === id) return;
  stream?.ending.abort();
  stream = null;
  if (listeners.size === 0) return;
  stream = { id, ending: new AbortController() };
  void listen(id, stream.ending.signal);
}

function tell(change: Change): void {
  if (Object.keys(change.counts).length) counts.value = change.counts;
  for (const each of [...listeners]) each.on(change);
}

async function listen(id: string | null, ending: AbortSignal): Promise<void> {
  while (!ending.aborted) {
    let pause = RETRY_MS;
    try {
      const all = last ? { ...headers(), "Last-Event-ID": last } : headers();
      const response = await fetch(`api/v1/stream${queryOf({ id })}`, { headers: all, signal: ending });
      if (!response.ok || !response.body) throw new Error(response.statusText);
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        text += value;
        const parts = text.split("\n\n");
        text = parts.pop() ?? "";
        for (const part of parts) {
          const lines = new Map(part.split("\n").map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 2)]));
          last = lines.get("id") ?? last;
          const data = lines.get("data");
          if (data && !document.hidden) tell(JSON.parse(data) as Change);
        }
      }
    } catch {
      if (ending.aborted) return;
      pause = POLL_MS;
      if (!document.hidden) tell({ topics: ["counts", "run"], counts: {}, problem: null });
    }
    await new Promise((wake) => setTimeout(wake, pause));
  }
}

// What changed while the tab was hidden is read when it is looked at again.
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) tell({ topics: ["counts", "run"], counts: {}, problem: null });
});
