// The time axis of a run: idle gaps are folded, so that what happened stays visible.

export interface Fold {
  from: number;
  to: number;
}

export interface Scale {
  start: number;
  end: number;
  folds: Fold[];
  at(time: number): number; // 0 to 1
}

const FOLDED = 0.14; // share of the width that a folded gap takes
const SHARE = 0.35; // a gap of more than this share of the rest is folded
const LEAST_MS = 60_000;

// `times` are the moments at which something began, ended or is due.
export function scaleOf(times: number[], start: number, end: number): Scale {
  const marks = [...new Set([start, ...times.filter((t) => t > start && t < end), end])].sort((a, b) => a - b);
  const gaps = marks.slice(1).map((to, i) => ({ from: marks[i]!, to }));
  const folds: Fold[] = [];
  let rest = end - start;
  for (const gap of [...gaps].sort((a, b) => b.to - b.from - (a.to - a.from))) {
    const size = gap.to - gap.from;
    if (folds.length >= 3 || size < LEAST_MS || size < SHARE * rest || gaps.length < 2) break;
    folds.push(gap);
    rest -= size;
  }
  folds.sort((a, b) => a.from - b.from);
  const plain = Math.max(1, end - start - folds.reduce((sum, fold) => sum + fold.to - fold.from, 0));
  const wide = 1 - FOLDED * folds.length;
  const at = (time: number): number => {
    const moment = Math.min(end, Math.max(start, time));
    let hidden = 0;
    let passed = 0;
    for (const fold of folds) {
      if (moment >= fold.to) {
        hidden += fold.to - fold.from;
        passed += 1;
      } else if (moment > fold.from) {
        const part = (moment - fold.from) / (fold.to - fold.from);
        return ((fold.from - start - hidden) / plain) * wide + (passed + part) * FOLDED;
      }
    }
    return ((moment - start - hidden) / plain) * wide + passed * FOLDED;
  };
  return { start, end, folds, at };
}

const STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 10e3, 15e3, 30e3, 60e3, 120e3, 300e3, 600e3, 900e3, 1800e3, 3600e3, 7200e3, 10800e3, 21600e3, 43200e3, 86400e3, 172800e3, 604800e3];
const TICKS = 5;

// Round times on the axis, as distances from the start; none lies in a folded gap, or close to it.
export function ticksOf(scale: Scale): number[] {
  const shown = scale.end - scale.start - scale.folds.reduce((sum, fold) => sum + fold.to - fold.from, 0);
  const step = STEPS.find((each) => shown / each <= TICKS) ?? shown;
  const found: number[] = [];
  let before = -1;
  for (let part = 0; part <= scale.folds.length; part++) {
    const from = part === 0 ? scale.start : scale.folds[part - 1]!.to;
    const to = part === scale.folds.length ? scale.end : scale.folds[part]!.from;
    const first = Math.ceil((from - scale.start) / step) * step;
    for (let time = first; scale.start + time <= to && found.length < 40; time += step) {
      const at = scale.at(scale.start + time);
      const isFree = scale.folds.every((fold) => at < scale.at(fold.from) - 0.05 || at > scale.at(fold.to) + 0.05 || (time === 0 && at < 0.01));
      if (isFree && at - before > 0.08) {
        found.push(time);
        before = at;
      }
    }
  }
  return found;
}
