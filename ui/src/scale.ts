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

const FOLDED = 0.1; // share of the width that a folded gap takes
const SHARE = 0.35; // a gap of more than this share of the rest is folded
const LEAST_MS = 10_000;

// `times` are the moments at which something began, ended or is due.
export function scaleOf(times: number[], start: number, end: number): Scale {
  const marks = [...new Set([start, ...times.filter((t) => t > start && t < end), end])].sort((a, b) => a - b);
  const gaps = marks.slice(1).map((to, i) => ({ from: marks[i]!, to }));
  const folds: Fold[] = [];
  let rest = end - start;
  for (const gap of [...gaps].sort((a, b) => b.to - b.from - (a.to - a.from))) {
    const size = gap.to - gap.from;
    if (folds.length >= 4 || size < LEAST_MS || size < SHARE * rest || gaps.length < 2) break;
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
