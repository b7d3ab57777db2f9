// Actions on runs: each asks first, and shows its command and Python forms.
import { useState } from "preact/hooks";
import { type Details, read, settings, write } from "./api";
import { counted, json, quoted } from "./format";
import { go, link } from "./place";
import { ask, say } from "./parts";

const WORDS: Record<string, { title: string; body: string; danger?: boolean }> = {
  cancel: { title: "Cancel", body: "Its code gets CancelledError once, and has 30 seconds to clean up." },
  terminate: { title: "Terminate", body: "It ends now. None of its code runs, also no clean-up.", danger: true },
  pause: { title: "Pause", body: "No further turn runs until it is resumed. Running activities go on." },
  resume: { title: "Resume", body: "It goes on from where it stands." },
  retry: { title: "Retry", body: "It goes on from where it stopped. Finished steps stay finished, and idempotency keys stay the same." },
  delete: { title: "Delete", body: "It is deleted with its children and everything about them.", danger: true },
};
const RANK: Record<string, number> = { read: 1, operate: 2, admin: 3 };

export function may(scope: string): boolean {
  const mine = settings.value;
  return mine !== null && !mine.read_only && (RANK[mine.scope] ?? 0) >= (RANK[scope] ?? 9);
}

export function fitting(status: string): string[] {
  switch (status) {
    case "Pending":
    case "Running":
      return ["cancel", "pause", "terminate"];
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

export function act(action: string, run: { id: string }, done: () => void): void {
  const words = WORDS[action]!;
  const command = action === "delete" ? "purge" : action;
  ask({
    title: `${words.title} ${run.id}`,
    body: <p>{words.body}</p>,
    button: words.title,
    danger: words.danger,
    command: `perdure ${command} ${quoted(run.id)}`,
    python: pythonOf(action, json(run.id)),
    act: async () => {
      const answer = await write<{ said: string }>(`/run/${action}`, { id: run.id });
      if (action === "delete") go(link("runs"));
      else done();
      return `${run.id}: ${answer.said}`;
    },
  });
}

// An action for many: first count, then ask, then do it.
export async function bulk(action: string, given: { q?: string; ids?: string[] }, done: () => void = () => {}): Promise<void> {
  const words = WORDS[action]!;
  try {
    const dry = await write<{ count: number; done: string[] }>("/bulk", { action, ...given, dry_run: true });
    if (dry.count === 0) return say(`There is nothing to ${action}.`);
    const command = action === "delete" ? "purge" : action;
    const target = given.q ? `--query ${quoted(given.q)}` : (given.ids ?? []).map(quoted).join(" ");
    ask({
      title: `${words.title} ${counted(dry.count, "instance")}`,
      body: (
        <>
          <p>{words.body}</p>
          <p class="dim">
            {dry.done.slice(0, 8).join(", ")}
            {dry.count > 8 ? ", …" : ""}
          </p>
        </>
      ),
      button: `${words.title} ${counted(dry.count, "instance")}`,
      danger: words.danger,
      typed: dry.count >= 100 ? String(dry.count) : undefined,
      command: `perdure ${command} ${target}`,
      python: `for each in ${json(dry.done.slice(0, 3))}:  # ${dry.count} ids\n    ${pythonOf(action, "each")}`,
      act: async () => {
        const answer = await write<{ done: string[]; errors: Record<string, string> }>("/bulk", { action, ...given, dry_run: false, confirm: dry.count });
        done();
        const failed = Object.entries(answer.errors);
        return `${action}: ${answer.done.length} done${failed.length ? `, ${failed.length} not: ${failed[0]![1]}` : ""}`;
      },
    });
  } catch (error) {
    say((error as Error).message, true);
  }
}

function parsed(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    throw new Error(`this is no JSON: ${text.slice(0, 40)}. Write a text in quotes, a number, true or false.`);
  }
}

// A form that sends an event or a message to a run.
export function SendForm({ id, name, kind, done }: { id: string; name: string; kind: string; done: () => void }) {
  const [text, setText] = useState("true");
  const isMailbox = kind === "message";
  const send = async () => {
    try {
      const value = parsed(text);
      const answer = await write<{ said: string }>("/run/send", { id, name, value, mailbox: isMailbox });
      say(`${id}: ${answer.said}`);
      done();
    } catch (error) {
      say((error as Error).message, true);
    }
  };
  const command = `perdure send ${quoted(id)} ${quoted(name)} --data ${quoted(text)}${isMailbox ? " --mailbox" : ""}`;
  return (
    <form
      class="send"
      onSubmit={(event) => {
        event.preventDefault();
        void send();
      }}
    >
      <label>
        <code>{name}</code> <span class="dim">({kind}, JSON)</span>
        <input value={text} onInput={(event) => setText(event.currentTarget.value)} spellcheck={false} />
      </label>
      <button class="primary" disabled={!may("operate")}>
        Send
      </button>
      <code class="dim">{command}</code>
    </form>
  );
}

export function RerunForm({ run, from }: { run: Details; from: number | null }) {
  const [text, setText] = useState(json(run.input, 2));
  const again = async (body: object) => {
    try {
      const answer = await write<{ id: string; said: string }>("/run/rerun", { id: run.id, ...body });
      say(`started ${answer.id}: ${answer.said}`);
      go(link("run", { id: answer.id }));
    } catch (error) {
      say((error as Error).message, true);
    }
  };
  return (
    <details class="rerun">
      <summary>Run once more under another id</summary>
      <p>All its activities run again, with new idempotency keys. Retry goes on instead.</p>
      <label>
        Arguments (a JSON list)
        <textarea rows={4} value={text} onInput={(event) => setText(event.currentTarget.value)} spellcheck={false} />
      </label>
      <div class="buttons">
        <button
          onClick={() => {
            try {
              void again({ input: parsed(text) });
            } catch (error) {
              say((error as Error).message, true);
            }
          }}
        >
          Rerun
        </button>
        {from !== null && <button onClick={() => void again({ from_event: from })}>Rerun from event {from}</button>}
      </div>
      <pre tabIndex={0}>
        perdure rerun {quoted(run.id)}
        {from !== null ? ` --from-event ${from}` : ""}
      </pre>
    </details>
  );
}

export async function startRun(name: string, version: string, text: string, id: string): Promise<void> {
  try {
    const started = await write<{ id: string; created: boolean }>("/start", { name, version, arguments: parsed(text), id: id || null });
    say(started.created ? `started ${started.id}` : `${started.id} existed already`);
    go(link("run", { id: started.id }));
  } catch (error) {
    say((error as Error).message, true);
  }
}

export async function readCount(q: string): Promise<number> {
  return (await read<{ count: number }>("/count", { q })).count;
}
