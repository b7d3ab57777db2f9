// Actions on runs: each asks first, and shows its command and Python forms.
import { useEffect, useState } from "preact/hooks";
import { type Details, read, settings, write } from "./api";
import { type Entered, Field, type Schema, blank, valueOf } from "./form";
import { counted, json, quoted } from "./format";
import { go, inFile, link } from "./place";
import { Code, type Progress, type Question, ask, say } from "./parts";

const WORDS: Record<string, { title: string; body: string; danger?: boolean }> = {
  cancel: { title: "Cancel", body: "Its code gets CancelledError once, and has 30 seconds to clean up." },
  terminate: { title: "Terminate", body: "It ends now. None of its code runs, also no clean-up.", danger: true },
  pause: { title: "Pause", body: "No further turn runs until it is resumed. Running activities go on." },
  resume: { title: "Resume", body: "It goes on from where it stands." },
  retry: { title: "Retry", body: "It goes on from where it stopped. Finished steps stay finished, and idempotency keys stay the same." },
  delete: { title: "Delete", body: "It is deleted with its children and everything about them.", danger: true },
  rerun: { title: "Rerun", body: "A new run starts from the beginning. All its activities run again, with new idempotency keys. Retry goes on instead." },
};
const RANK: Record<string, number> = { read: 1, operate: 2, admin: 3 };
const TYPED_ABOVE = 100;
const CHUNK = 50;

export function may(scope: string): boolean {
  const mine = settings.value;
  return !inFile() && mine !== null && !mine.read_only && (RANK[mine.scope] ?? 0) >= (RANK[scope] ?? 9);
}

export function title(action: string): string {
  return WORDS[action]?.title ?? action;
}

// The attributes of a button that say what its action does, before it is pressed.
export function described(action: string): { title: string; "aria-description": string } {
  const body = WORDS[action]!.body;
  return { title: body, "aria-description": body };
}

export function fitting(status: string): string[] {
  switch (status) {
    case "Pending":
    case "Running":
      return ["pause", "cancel", "terminate"];
    case "Paused":
      return ["resume", "cancel", "terminate"];
    case "Blocked":
      return ["retry", "cancel", "terminate"];
    case "Failed":
    case "Cancelled":
    case "Terminated":
      return ["retry", "delete"];
    default:
      return ["delete"];
  }
}

// The call of a client that does the same.
function pythonOf(action: string, id: string): string {
  return action === "retry" || action === "delete" ? `await client.admin.${action}(${id})` : `await client.get(${id}).${action}()`;
}

// Ask, then write, and say what the answer says.
export function askTo(path: string, body: () => object, done: () => void, question: Omit<Question, "act">): void {
  const act = async () => {
    const answer = await write<{ id: string; said: string }>(path, body());
    done();
    return `${answer.id}: ${answer.said}`;
  };
  ask({ ...question, act });
}

export function act(action: string, run: { id: string }, done: () => void): void {
  const words = WORDS[action]!;
  const command = action === "delete" ? "purge" : action;
  const after = action === "delete" ? () => go(link("runs")) : done;
  askTo(`/run/${action}`, () => ({ id: run.id }), after, {
    title: `${words.title} ${run.id}`,
    body: <p>{words.body}</p>,
    button: words.title,
    danger: words.danger,
    command: `perdure ${command} ${quoted(run.id)}`,
    python: pythonOf(action, json(run.id)),
  });
}

interface BulkAnswer {
  count: number;
  done: string[];
  errors: Record<string, string>;
}

// An action for many: first count, then ask, then take it in parts, which can be stopped.
export async function bulk(action: string, given: { q?: string; ids?: string[] }, done: () => void = () => {}): Promise<void> {
  const words = WORDS[action]!;
  try {
    const dry = await write<BulkAnswer>("/bulk", { action, ...given, dry_run: true });
    if (dry.count === 0) return say(`There is nothing to ${action}.`);
    const command = action === "delete" ? "purge" : action;
    const target = given.q ? `--query ${quoted(given.q)}` : (given.ids ?? []).map(quoted).join(" ");
    const many = counted(dry.count, "run");
    ask({
      title: `${words.title} ${many}`,
      body: (
        <>
          <p>{words.body}</p>
          <p class="dim">
            {dry.done.slice(0, 8).join(", ")}
            {dry.count > 8 ? ", …" : ""}
          </p>
        </>
      ),
      button: `${words.title} ${many}`,
      danger: words.danger,
      typed: dry.count > TYPED_ABOVE ? String(dry.count) : undefined,
      command: `perdure ${command} ${target}`,
      python: `for each in ${json(dry.done.slice(0, 3))}:  # ${many}\n    ${pythonOf(action, "each")}`,
      act: (progress) => inParts(action, dry.done, progress, done),
    });
  } catch (error) {
    say((error as Error).message, true);
  }
}

async function inParts(action: string, ids: string[], progress: Progress, done: () => void) {
  const errors: [string, string][] = [];
  let reached = 0;
  while (reached < ids.length && progress(reached, ids.length)) {
    const part = ids.slice(reached, reached + CHUNK);
    const answer = await write<BulkAnswer>("/bulk", { action, ids: part, dry_run: false });
    errors.push(...Object.entries(answer.errors));
    reached += part.length;
  }
  progress(reached, ids.length);
  done();
  const left = ids.length - reached;
  const said = `${action}: ${counted(reached - errors.length, "run")} done${left ? `, stopped before ${left.toLocaleString("en")} others` : ""}`;
  return { said, errors };
}

// A form that sends an event or a message to a run, made from the type that its code waits for.
export function SendForm({ id, name, kind, done }: { id: string; name: string; kind: string; done: () => void }) {
  const [schema, setSchema] = useState<Schema | null | undefined>(settings.value?.has_code ? undefined : null);
  const [changed, setChanged] = useState<Entered | null>(null);
  const entered = changed ?? { value: schema ? blank(schema) : true };
  const isMailbox = kind === "message";
  useEffect(() => {
    if (schema !== undefined) return;
    read<{ kind: string; name: string; schema: Schema | null }[]>("/run/forms", { id })
      .then((answer) => setSchema(answer.find((each) => each.name === name && each.kind === kind)?.schema ?? null))
      .catch(() => setSchema(null));
  }, [id, name]);
  const send = async () => {
    try {
      const answer = await write<{ said: string }>("/run/send", { id, name, value: valueOf(entered), mailbox: isMailbox });
      say(`${id}: ${answer.said}`);
      done();
    } catch (error) {
      say((error as Error).message, true);
    }
  };
  if (schema === undefined) return null;
  const text = "value" in entered ? json(entered.value) : "…";
  return (
    <form
      class="send"
      onSubmit={(event) => {
        event.preventDefault();
        void send();
      }}
    >
      <Field label={name} hint={schema ? kind : `${kind}, JSON`} schema={schema} initial={schema ? undefined : true} change={setChanged} />
      <button class="primary" disabled={!may("operate")}>
        Send
      </button>
      <Code text={`perdure send ${quoted(id)} ${quoted(name)} --data ${quoted(text)}${isMailbox ? " --mailbox" : ""}`} />
    </form>
  );
}

// Run once more under another id: the same input, an edited one, or from a step on.
export function rerun(run: Details, from: number | null = null): void {
  let text = json(run.input, 2);
  const isSame = (): boolean => text === json(run.input, 2);
  ask({
    title: from === null ? `Rerun ${run.id}` : `Rerun ${run.id} from event ${from}`,
    body:
      from === null ? (
        <>
          <p>{WORDS.rerun!.body}</p>
          <label>
            Arguments, a JSON list; change them if you like
            <textarea rows={6} spellcheck={false} onInput={(event) => (text = event.currentTarget.value)}>
              {text}
            </textarea>
          </label>
        </>
      ) : (
        <p>A new run keeps what happened before event {from}, and goes on from there with the code of today.</p>
      ),
    button: "Rerun",
    command: `perdure rerun ${quoted(run.id)}${from === null ? "" : ` --from-event ${from}`}`,
    python: from === null ? `await client.admin.rerun(${json(run.id)})` : `await rerun_from_event(client.provider, ${json(run.id)}, "NEW-ID", ${from}, clock=client.clock)`,
    act: async () => {
      const body = from !== null ? { from_event: from } : isSame() ? {} : { input: parsed(text) };
      const answer = await write<{ id: string; said: string }>("/run/rerun", { id: run.id, ...body });
      go(link("run", { id: answer.id }));
      return `started ${answer.id}: ${answer.said}`;
    },
  });
}

function parsed(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    throw new Error(`this is no JSON: ${text.slice(0, 40)}. Write a list in brackets, texts in quotes.`);
  }
}

export async function startRun(name: string, version: string, values: unknown[], id: string): Promise<void> {
  try {
    const started = await write<{ id: string; created: boolean }>("/start", { name, version, arguments: values, id: id || null });
    say(started.created ? `started ${started.id}` : `${started.id} existed already`);
    go(link("run", { id: started.id }));
  } catch (error) {
    say((error as Error).message, true);
  }
}

// One button of a schedule, a promise or a letter.
export async function perform(path: string, body: object, done: () => void): Promise<void> {
  try {
    const answer = await write<{ said: string }>(path, body);
    say(answer.said);
    done();
  } catch (error) {
    say((error as Error).message, true);
  }
}
