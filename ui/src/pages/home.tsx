// Home: what needs attention, numbers, workers, the store.
import { type Attention, type Home, read } from "../api";
import { counted, duration, glyph } from "../format";
import { link } from "../place";
import { Loading, Problem, useRead } from "../parts";
import { bulk } from "../actions";

const ORDER = ["Running", "Pending", "Paused", "Blocked", "Failed", "Completed", "Cancelled", "Terminated"];

export function HomePage() {
  const { value, error } = useRead(() => read<Home>("/home"), []);
  if (!value) return error ? <Problem error={error} /> : <Loading />;
  return (
    <>
      <section aria-labelledby="attention">
        <h2 id="attention">Needs attention</h2>
        {value.attention.length === 0 ? (
          <p class="calm">
            <span aria-hidden="true">✓</span> Nothing. {counted(value.counts.Running ?? 0, "instance")} running, {counted(value.workers, "worker")}.
          </p>
        ) : (
          <ul class="attention">{value.attention.map((each) => <Item key={each.kind + each.sentence} each={each} />)}</ul>
        )}
      </section>
      <section aria-labelledby="statuses">
        <h2 id="statuses">Instances</h2>
        <ul class="tiles">
          {ORDER.filter((status) => value.counts[status]).map((status) => (
            <li key={status}>
              <a href={link("runs", { q: `status:${status.toLowerCase()}` })} class={`tile ${status.toLowerCase()}`}>
                <b>{(value.counts[status] ?? 0).toLocaleString("en")}</b>
                <span>
                  <span aria-hidden="true">{glyph(status)}</span> {status.toLowerCase()}
                </span>
              </a>
            </li>
          ))}
          {Object.keys(value.counts).length === 0 && (
            <li class="dim">
              None yet. Start one: <code>perdure start NAME --input JSON</code>
            </li>
          )}
        </ul>
      </section>
      <Series home={value} />
      <section aria-labelledby="work">
        <h2 id="work">Work</h2>
        <dl class="facts">
          <dt>workers</dt>
          <dd>
            <a href={link("workers")}>{counted(value.workers, "worker")}</a>, {value.busy} of {value.slots} slots busy
          </dd>
          <dt>activities</dt>
          <dd>
            {value.work.ready} ready, {value.work.locked} running, {value.work.later} later
            {value.work.oldest_ms ? `; the oldest waits ${duration(value.work.oldest_ms)}` : ""}
          </dd>
          <dt>messages</dt>
          <dd>
            {value.messages.ready} ready, {value.messages.later} later
            {value.messages.oldest_ms ? `; the oldest waits ${duration(value.messages.oldest_ms)}` : ""}
          </dd>
        </dl>
      </section>
    </>
  );
}

function Item({ each }: { each: Attention }) {
  return (
    <li class={each.severity}>
      <div>
        <b>
          <span aria-hidden="true">{each.severity === "bad" ? "■" : "!"}</span> {each.sentence}
        </b>
        <p>{each.advice}</p>
      </div>
      <div class="buttons">
        {each.query && <a class="button" href={link("runs", { q: each.query })}>show</a>}
        {each.kind === "failed" && <a class="button" href={link("errors")}>errors</a>}
        {each.kind === "letters" && <a class="button" href={link("store")}>letters</a>}
        {each.kind === "overdue" && <a class="button" href={link("workers")}>workers</a>}
        {each.action && <button onClick={() => void bulk(each.action!, { q: each.query })}>{each.action} all</button>}
      </div>
    </li>
  );
}

function Series({ home }: { home: Home }) {
  const most = Math.max(1, ...home.series.map((each) => Math.max(each.started, each.completed + each.failed)));
  const wide = 600 / home.series.length;
  const tall = (number: number) => (number / most) * 60;
  const total = (key: "started" | "completed" | "failed") => home.series.reduce((sum, each) => sum + each[key], 0);
  return (
    <section aria-labelledby="hour">
      <h2 id="hour">The last hour</h2>
      <p>
        {total("started") >= 1000 ? "Of the newest 1,000 runs: " : ""}
        {total("started")} started, {total("completed")} completed, <span class={total("failed") ? "error" : ""}>{total("failed")} failed</span>
      </p>
      <svg class="series" viewBox="0 0 600 70" preserveAspectRatio="none" role="img" aria-label="Started, completed and failed instances in the last hour">
        {home.series.map((each, i) => (
          <g key={each.at}>
            <title>
              {new Date(each.at).toLocaleTimeString()}: {each.started} started, {each.completed} completed, {each.failed} failed
            </title>
            <rect class="started" x={i * wide + 1} y={64 - tall(each.started)} width={wide / 2 - 1.5} height={tall(each.started)} />
            <rect class="completed" x={i * wide + wide / 2} y={64 - tall(each.completed)} width={wide / 2 - 1.5} height={tall(each.completed)} />
            <rect class="failed" x={i * wide + wide / 2} y={64 - tall(each.completed) - tall(each.failed)} width={wide / 2 - 1.5} height={tall(each.failed)} />
          </g>
        ))}
        <line x1="0" x2="600" y1="64.5" y2="64.5" />
      </svg>
      <p class="legend" aria-hidden="true">
        <span class="key started" /> started <span class="key completed" /> completed <span class="key failed" /> failed
      </p>
    </section>
  );
}
