// One run: what it does, why not further, what can be done; its picture, source, events, family.
import { useEffect, useState } from "preact/hooks";
import { ApiError, type Details, type Event, type Mismatch, type StateEntry, type Tree, type Unread, type Wait, read, save, saveReport } from "../api";
import { SendForm, act, described, fitting, may, rerun, title } from "../actions";
import { ago, clock, counted, duration, glyph, json, ms, quoted, sideOf, since } from "../format";
import { Journal } from "../journal";
import { go, inFile, place, runLink } from "../place";
import { Code, Copy, Json, Loading, Problem, Rows, RunLink, Sentence, Status, say, useRead, wordOf } from "../parts";

const TABS = ["journal", "source", "events", "state", "family", "compare"];
const TABS_OF_FILE = ["journal", "events", "state", "family"];

export function RunPage({ id: fixed }: { id?: string }) {
  const given = place.value.given;
  const id = fixed ?? given.get("id") ?? "";
  const execution = given.get("execution");
  const tab = given.get("tab") ?? "journal";
  const { value: run, error, again } = useRead(() => read<Details>("/run", { id, execution }), [id, execution], "run", id);
  const isOpen = run !== null && !run.completed_at;
  useEffect(() => {
    // The sentence says how long it has waited.
    if (!isOpen || inFile()) return;
    const timer = setInterval(() => !document.hidden && void again(), 30_000);
    return () => clearInterval(timer);
  }, [id, execution, isOpen]);
  if (!run || run.id !== id) return error ? <Problem error={error} /> : <Loading />;
  return (
    <>
      <header class="run">
        <h1>
          <span class="id">{run.id}</span> <Copy text={run.id} />
        </h1>
        <p class="dim">
          <span class="name">
            {run.name}
            {run.version ? `@${run.version}` : ""}
          </span>{" "}
          · started <time title={clock(run.created_at)}>{ago(run.created_at)}</time> · {counted(run.events, "event")}
          {run.parent && (
            <>
              {" "}
              · child of <RunLink id={run.parent} />
            </>
          )}
          {run.executions.length > 1 && <Executions run={run} />}
        </p>
      </header>
      {error && <Problem error={error} />}
      <Now run={run} again={again} />
      <nav class="tabs" aria-label="Parts of the run">
        {(inFile() ? TABS_OF_FILE : TABS).map((each) => (
          <a key={each} href={runLink(id, { execution, tab: each === "journal" ? null : each })} aria-current={tab === each ? "page" : undefined}>
            {each}
          </a>
        ))}
      </nav>
      {tab === "journal" && <Journal key={`${run.id} ${run.execution}`} run={run} />}
      {tab === "source" && <SourceTab run={run} />}
      {tab === "events" && <EventsTab run={run} />}
      {tab === "state" && <StateTab run={run} />}
      {tab === "family" && <FamilyTab run={run} />}
      {tab === "compare" && <CompareTab run={run} />}
    </>
  );
}

function name(call: string): string {
  return /"(.*)"/.exec(call)?.[1] ?? call;
}

function Executions({ run }: { run: Details }) {
  return (
    <span class="executions">
      {" "}
      · execution{" "}
      <select aria-label="Execution" value={run.execution} onChange={(event) => go(runLink(run.id, { execution: event.currentTarget.value }))}>
        {run.executions.map((each) => (
          <option key={each} value={each}>
            {each}
          </option>
        ))}
      </select>{" "}
      of {run.executions.length}
    </span>
  );
}

// --- what it is doing, why it does not go further, what can be done

const ADVICE: Record<string, string> = {
  retrying: "Nothing needs to be done: the next attempt begins by itself. If the cause stays, fix and deploy, or cancel.",
  sleeping: "Nothing needs to be done: it wakes up by itself.",
  blocked: "Nothing is lost. Deploy code that fits, and it goes on by itself; or retry now.",
  changed: "Nothing is lost. The code was changed while the run was in progress, or it is not deterministic. Deploy code that makes the calls of the history: a worker then continues the run. Retry helps only after such a deploy.",
  failed: "Fix the cause, then retry: it goes on from where it failed, and finished steps stay finished.",
  paused: "Resume lets it go on from where it stands.",
  pending: "A worker that has its code takes it up: perdure worker MODULE",
  cancelled: "Retry lets it go on from where it was stopped.",
  terminated: "Retry lets it go on from where it was stopped.",
};

function Now({ run, again }: { run: Details; again: () => void }) {
  const word = wordOf(run);
  const isChanged = word === "blocked" && run.block?.reason === "nondeterminism";
  const isHeld = word === "blocked" || word === "paused";
  const waits = isHeld ? [] : run.steps.filter((step) => step.state === "open" && (step.kind === "event" || step.kind === "message"));
  const actions = fitting(run.status).filter((action) => may(action === "terminate" || action === "delete" ? "admin" : "operate"));
  const advice = waits.length && word === "waiting" ? (may("operate") ? `Send the ${waits[0].kind} to let it go on.` : `It goes on when the ${waits[0].kind} is sent.`) : ADVICE[isChanged ? "changed" : word];
  return (
    <section class={`now-card ${word}`} aria-label="What it is doing">
      <p class="sentence">
        <Status run={run} />{" "}
        <Sentence text={sentence(run, word)} due={inFile() ? null : run.due_at} />
      </p>
      {advice && <p class="advice">{advice}</p>}
      <Why run={run} />
      {may("operate") && waits.map((wait) => <SendForm key={wait.event} id={run.id} name={name(wait.call)} kind={wait.kind} done={again} />)}
      <Arrived run={run} />
      <div class="buttons">
        {actions
          .filter((action) => action !== "terminate" && action !== "delete")
          .map((action) => (
            <button key={action} class={(action === "retry" && !isChanged) || action === "resume" ? "primary" : ""} {...described(action)} onClick={() => act(action, run, again)}>
              {title(action)}
            </button>
          ))}
        {may("operate") && (
          <button {...described("rerun")} onClick={() => rerun(run)}>
            Rerun…
          </button>
        )}
        {actions
          .filter((action) => action === "terminate" || action === "delete")
          .map((action) => (
            <button key={action} class="warn" {...described(action)} onClick={() => act(action, run, again)}>
              {title(action)}
            </button>
          ))}
        <span class="keep">
          <Copy text={run.commands.join("\n")} label="Copy commands" />
          <button class="quiet" onClick={() => save(`${run.id}.json`, new Blob([json(run, 2)], { type: "application/json" }))}>
            Save JSON
          </button>
          {!inFile() && (
            <button class="quiet" title="One file that needs no server, to keep or to send" onClick={() => void saveReport(run.id).catch((error: Error) => say(error.message, true))}>
              Save page
            </button>
          )}
        </span>
      </div>
    </section>
  );
}

// Arrivals that the code has not got: those that it waits for reach it with its next turn.
function Arrived({ run }: { run: Details }) {
  const open = new Set(run.steps.filter((step) => step.state === "open").map((step) => `${step.kind} ${name(step.call)}`));
  const isAwaited = (each: Unread) => open.has(`${each.kind} ${each.name}`);
  const line = (words: string, found: Unread[]) =>
    found.length > 0 && (
      <p class="dim">
        {words}: {found.map((each) => `${each.kind} ${each.name}${each.count > 1 ? ` ×${each.count}` : ""}`).join(", ")}
      </p>
    );
  return (
    <>
      {line("Has arrived, and the code gets it when the run goes on", run.unread.filter(isAwaited))}
      {line("Arrived and not asked for yet", run.unread.filter((each) => !isAwaited(each)))}
    </>
  );
}

// The status is a word of its own, so the sentence does not begin with it once more.
function sentence(run: Details, word: string): string {
  const full = run.sentence ?? "";
  const text = full.toLowerCase().startsWith(word) ? full.slice(word.length).replace(/^[,:]?\s+/, "") : full;
  if (word === "completed" && run.output !== null) return `${text} → ${json(run.output).slice(0, 200)}`;
  return text;
}

// Why it does not go further, or why it failed.
function Why({ run }: { run: Details }) {
  const detail = run.block?.detail;
  if (run.block) return typeof detail === "object" && detail ? <Columns mismatch={detail} /> : <pre tabIndex={0}>{detail || run.block.message}</pre>;
  if (run.status === "Failed" && run.traceback)
    return (
      <details>
        <summary>Traceback</summary>
        <pre tabIndex={0}>{run.traceback}</pre>
      </details>
    );
  if (run.problem) return <pre tabIndex={0}>{run.problem}</pre>;
  return null;
}

function Side({ title, text }: { title: string; text: string }) {
  const { what, site } = sideOf(text);
  return (
    <div>
      <h2 class="sub">{title}</h2>
      <pre tabIndex={0}>{what}</pre>
      {site && (
        <p class="dim">
          at <code>{site}</code>
        </p>
      )}
    </div>
  );
}

function Columns({ mismatch }: { mismatch: Mismatch }) {
  return (
    <div class="columns">
      <Side title="the history says" text={mismatch.recorded} />
      <Side title="the code did" text={mismatch.performed} />
      {mismatch.diff && (
        <details>
          <summary>Difference{mismatch.site ? ` at ${mismatch.site}` : ""}</summary>
          <pre tabIndex={0}>{mismatch.diff.join("\n")}</pre>
        </details>
      )}
    </div>
  );
}

// --- source

interface Source {
  why_not: string | null;
  file: string;
  first_line: number;
  lines: string[];
  executed: Record<string, number>;
  waits: Wait[];
}

function SourceTab({ run }: { run: Details }) {
  const { value, error } = useRead(() => read<Source>("/run/source", { id: run.id }), [run.id, run.events], "");
  if (!value) return error ? <Problem error={error} /> : <Loading />;
  const waiting = new Map<number, Wait>();
  for (const wait of value.waits) for (const frame of wait.frames) if (frame.file.endsWith(value.file)) waiting.set(frame.line, wait);
  return (
    <section>
      {value.why_not && <p class="calm">{value.why_not}</p>}
      {value.file && <p class="dim">{value.file}</p>}
      <ol class="source" start={value.first_line} tabIndex={0} aria-label="Source">
        {value.lines.map((text, i) => {
          const line = value.first_line + i;
          const wait = waiting.get(line);
          const times = value.executed[String(line)];
          return (
            <li key={line} class={wait ? "waits" : times ? "ran" : ""}>
              <span class="number">{line}</span>
              <span class="sign" title={wait ? `waits for ${wait.waits_for}` : times ? `${times} steps` : ""}>
                {wait ? "◷" : times ? "✓" : ""}
              </span>
              <code>{text || " "}</code>
              {wait && (
                <span class="locals">
                  waits for {wait.waits_for}, for {since(wait.since)}
                  {wait.frames.flatMap((frame) => (frame.line === line ? Object.entries(frame.locals) : [])).map(([key, text]) => ` · ${key} = ${text}`)}
                </span>
              )}
            </li>
          );
        })}
      </ol>
    </section>
  );
}

// --- events

interface EventsPage {
  events: Event[];
  next_after: number | null;
}

// The data of an event in its row, without what all events of the run have in common.
function brief(data: unknown): string {
  const common = ["event_id", "instance_id", "execution_id"];
  return JSON.stringify(data, (name, value: unknown) => (common.includes(name) ? undefined : value)).slice(0, 160);
}

function EventsTab({ run }: { run: Details }) {
  const [events, setEvents] = useState<Event[]>([]);
  const [next, setNext] = useState<number | null>(0);
  const [filter, setFilter] = useState("");
  const [opened, setOpened] = useState<number | null>(null);
  const more = async (after: number, before: Event[]) => {
    const page = await read<EventsPage>("/run/events", { id: run.id, execution: run.execution, after, limit: 2000, text: filter });
    setEvents([...before, ...page.events]);
    setNext(page.next_after);
  };
  useEffect(() => {
    const wait = setTimeout(() => void more(0, []), filter ? 200 : 0);
    return () => clearTimeout(wait);
  }, [run.id, run.execution, run.events, filter]);
  const start = ms(run.created_at);
  return (
    <section>
      <div class="filter">
        <input aria-label="Filter events" placeholder="a text in the type or data: Failed, charge, …" value={filter} onInput={(event) => setFilter(event.currentTarget.value)} />
        <span class="dim">
          {events.length.toLocaleString("en")} of {counted(run.events, "event")}
        </span>
      </div>
      <Rows
        items={events}
        height={32}
        render={(event) => (
          <div key={event.id} class="event">
            <button class="code" aria-expanded={opened === event.id} onClick={() => setOpened(opened === event.id ? null : event.id)}>
              <span class="number">{event.id}</span>
              <span class="at">+{duration(ms(event.at) - start)}</span>
              <b>{event.type}</b> <span class="dim">{brief(event.data)}</span>
            </button>
            {opened === event.id && <WholeEvent run={run} event={event} />}
          </div>
        )}
      />
      {next !== null && <button onClick={() => void more(next, events)}>More</button>}
    </section>
  );
}

// A long payload is cut in the list, and whole here.
function WholeEvent({ run, event }: { run: Details; event: Event }) {
  const [data, setData] = useState(event.data);
  useEffect(() => {
    if (typeof event.data === "string" && !inFile())
      void read<Event>("/run/event", { id: run.id, execution: run.execution, event: event.id }).then((found) => setData(found.data));
  }, [event.id]);
  return <Json value={data} />;
}

// --- state, family, compare

function StateTab({ run }: { run: Details }) {
  const { value } = useRead(() => read<StateEntry[]>("/run/state", { id: run.id }), [run.id, run.updated_at], "");
  return (
    <section class="state">
      <h2>Input</h2>
      <Json value={run.input} />
      <h2>Output</h2>
      {run.status === "Completed" ? <Json value={run.output} /> : <p class="dim">It has not completed.</p>}
      {run.custom_status !== null && (
        <>
          <h2>Custom status</h2>
          <Json value={run.custom_status} />
        </>
      )}
      <h2>State</h2>
      {value?.length ? (
        value.map((entry) => (
          <div key={entry.key}>
            <h3>
              <code>{entry.key}</code> <span class="dim">changed {ago(entry.updated_at)}</span>
            </h3>
            <Json value={entry.value} />
          </div>
        ))
      ) : (
        <p class="dim">It has no state.</p>
      )}
    </section>
  );
}

function FamilyTab({ run }: { run: Details }) {
  const { value, error } = useRead(() => read<Tree>("/run/family", { id: run.id }), [run.id, run.events], "");
  if (!value) return error ? <Problem error={error} /> : <Loading />;
  return <ul class="family">{<Member tree={value} here={run.id} />}</ul>;
}

function Member({ tree, here }: { tree: Tree; here: string }) {
  return (
    <li class={tree.id === here ? "here" : ""}>
      <span class={`sign ${tree.status.toLowerCase()}`} aria-hidden="true">
        {glyph(tree.status)}
      </span>{" "}
      {tree.name} <RunLink id={tree.id} /> <span class="dim">{tree.sentence}</span>
      {tree.children.length > 0 && (
        <ul>
          {tree.children.map((child) => (
            <Member key={child.id} tree={child} here={here} />
          ))}
        </ul>
      )}
    </li>
  );
}

interface Compared {
  left: string;
  right: string;
  lines: { op: string; left: string | null; right: string | null; same: boolean }[];
}

function CompareTab({ run }: { run: Details }) {
  const other = place.value.given.get("with") ?? "";
  const [text, setText] = useState(other);
  const [whole, setWhole] = useState(false);
  const { value, error } = useRead<Compared>(() => read("/run/compare", { left: run.id, right: other }), [run.id, other], "");
  const lines = value?.lines.filter((line) => whole || !line.same) ?? [];
  return (
    <section>
      <form
        class="filter"
        onSubmit={(event) => {
          event.preventDefault();
          go(runLink(run.id, { tab: "compare", with: text }));
        }}
      >
        <input aria-label="Compare with" placeholder="id of another run; empty: the last that completed" value={text} onInput={(event) => setText(event.currentTarget.value)} />
        <button>Compare</button>
      </form>
      {error instanceof ApiError && <Problem error={error} />}
      {value && (
        <>
          <table class="compare">
            <thead>
              <tr>
                <th>Step</th>
                <th>{value.left}</th>
                <th>{value.right}</th>
              </tr>
            </thead>
            <tbody>
              {lines.map((line) => (
                <tr key={line.op} class={line.same ? "" : "differs"}>
                  <td>{line.op}</td>
                  <td>{line.left ?? "–"}</td>
                  <td>{line.right ?? "–"}</td>
                </tr>
              ))}
            </tbody>
          </table>
          {lines.length === 0 && <p class="calm">Both runs took the same steps.</p>}
          <button class="quiet" onClick={() => setWhole(!whole)}>
            {whole ? "only what differs" : `all ${value.lines.length} steps`}
          </button>
        </>
      )}
      <Code text={`perdure diff ${quoted(run.id)} ${value ? quoted(value.right) : "OTHER"}`} />
    </section>
  );
}
