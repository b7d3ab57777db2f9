// Requests to the JSON API, the token of the tab, and the stream of changes.
import { signal } from "@preact/signals";

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
export interface Details extends Run {
  input: unknown;
  events: number;
  events_left_out: number;
  steps: Step[];
  attempts: Attempt[];
  queued_messages: number;
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
  now: string;
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
export const needsToken = signal(false);
export const settings = signal<Settings | null>(null);
export const offline = signal<string | null>(null);

function headers(): Record<string, string> {
  const token = sessionStorage.getItem(TOKEN);
  return token ? { Authorization: `Bearer ${token}` } : {};
}

export function setToken(token: string): void {
  sessionStorage.setItem(TOKEN, token);
  needsToken.value = false;
}

async function answer<T>(request: Promise<Response>): Promise<T> {
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
  if (response.status === 401) needsToken.value = true;
  if (response.status === 503) offline.value = problem.message;
  throw new ApiError(response.status, problem.error, problem.message, problem.near, problem.position);
}

export function read<T>(path: string, given: Record<string, string | number | null | undefined> = {}): Promise<T> {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(given)) {
    if (value !== null && value !== undefined && value !== "") query.set(name, String(value));
  }
  const tail = query.size ? `?${query}` : "";
  return answer<T>(fetch(`api/v1${path}${tail}`, { headers: headers() }));
}

export function write<T>(path: string, body: object): Promise<T> {
  const all = { ...headers(), "Content-Type": "application/json", "X-Perdure-Write": "1" };
  return answer<T>(fetch(`api/v1${path}`, { method: "POST", headers: all, body: JSON.stringify(body) }));
}

export interface Change {
  topics: string[];
  counts: Record<string, number>;
  problem: string | null;
}

// Follow the changes of the store, and of one run. Returns a function that ends it. While the
// stream cannot be had, the page reads every ten seconds.
export function follow(id: string | null, onChange: (change: Change) => void): () => void {
  const ending = new AbortController();
  let last = "";
  const loop = async () => {
    while (!ending.signal.aborted) {
      try {
        const tail = id === null ? "" : `?id=${encodeURIComponent(id)}`;
        const all = last ? { ...headers(), "Last-Event-ID": last } : headers();
        const response = await fetch(`api/v1/stream${tail}`, { headers: all, signal: ending.signal });
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
            if (data && !document.hidden) onChange(JSON.parse(data) as Change);
          }
        }
      } catch {
        if (ending.signal.aborted) return;
        onChange({ topics: ["counts", "run"], counts: {}, problem: null });
      }
      await new Promise((wake) => setTimeout(wake, 10_000));
    }
  };
  void loop();
  return () => ending.abort();
}
