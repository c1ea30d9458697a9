"""Recompute recorded runs from their raw rows by other code, and compare to the last digit.

A made-up run is recomputed beside them, which has what the next record will have: both passes in
one call, drawn shapes, a column `set`. NumPy, pandas and SciPy alone; nothing of the harness
computes what is expected. Recomputed are digests, medians, ratios, the mean of the headline,
intervals, offsets, p, Holm, verdicts, claims. The rules are written down here a second time, as
docs/measuring.md words them.
"""

import hashlib
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import optimize, stats

from tests.support import paper_scripts as paper
from tests.support import replayed, whole_run

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
MACHINES = sorted((ROOT / "results/recorded").glob("*/raw"))
MADE_UP = "made up"
CELL = ["op", "case", "dtype", "pass"]
TIMED = ("ok", "throttled", "impossible")
MARGIN, NEAREST, FEWEST = 0.01, 40, 5
TOLERANCE = 5e-6


@pytest.fixture(
    scope="module",
    params=[*MACHINES, MADE_UP],
    ids=[*(raw.parent.name for raw in MACHINES), MADE_UP],
)
def folder(request, tmp_path_factory):
    if request.param == MADE_UP:
        return whole_run.write(tmp_path_factory.mktemp("whole")) / "raw"
    return request.param


@pytest.fixture(scope="module")
def raw(folder):
    """Return all raw rows, with the columns of times as numbers, and the sidecars by op."""
    names = sorted(folder.glob("*.csv"))
    frames = [pd.read_csv(path, keep_default_na=False, dtype=str) for path in names]
    rows = pd.concat(frames, ignore_index=True)
    # The rows of an older op lack these columns.
    for column, usual in (("process", "0"), ("set", "grid"), ("board", "")):
        known = rows[column] if column in rows else pd.Series(usual, rows.index)
        rows[column] = known.fillna(usual).replace("", usual)
    for column in ("device_us", "process", "block", "bytes_read", "bytes_written", "flops"):
        rows[column] = pd.to_numeric(rows[column])
    return rows, {path.stem: json.loads(path.with_suffix(".json").read_text()) for path in names}


@pytest.fixture(scope="module")
def found(folder, raw, tmp_path_factory):
    """Return the tables that harness.summarize writes from the same rows, by file name."""
    run = tmp_path_factory.mktemp("recomputed")
    mode = "replayed" if folder in MACHINES else "measured"
    if folder in MACHINES:
        once = replayed.replayed_once(tmp_path_factory, folder.parent)
        shutil.copytree(once, run, dirs_exist_ok=True)
    else:
        replayed.write(run, folder.parent, mode)
    names = ("summary", "verdicts", "claims")
    read = {name: pd.read_csv(run / f"{name}.csv", keep_default_na=False) for name in names}
    return read | {"run": run, "mode": mode}


def close(one, other):
    """Return whether values agree to the six digits of a CSV file; both missing is equal."""
    one, other = (pd.to_numeric(pd.Series(list(values))).to_numpy() for values in (one, other))
    np.testing.assert_allclose(one, other, rtol=TOLERANCE, atol=1e-300, equal_nan=True)


def test_digests_and_rows_are_those_of_the_sidecars(folder, raw):
    for op, sidecar in raw[1].items():
        content = (folder / f"{op}.csv").read_bytes()
        assert hashlib.sha256(content).hexdigest() == sidecar["csv_sha256"], op
        assert (raw[0]["op"] == op).sum() == sidecar["rows"], op
        for part in (sidecar, *sidecar.get("earlier", ())):
            text = json.dumps(part["environment"], sort_keys=True)
            assert hashlib.sha256(text.encode()).hexdigest() == part["environment_sha256"], op


# The rules, once more.


def limits(sidecar, cell):
    """Return the ceilings of the part that names the cell, or those of the last part."""
    values = {}
    named = [part for part in sidecar.get("earlier", ()) if " ".join(cell) in part["cells"]]
    for row in (named or [sidecar])[0]["ceilings"]:
        if row["source"] == "measured" or row["quantity"] not in values:
            values[row["quantity"]] = row["value"]
    return values


def floor_us(row, limit, spared=0):
    """Return the floor, and whether arithmetic sets it."""
    written = max(0.0, row["bytes_written"] - spared)
    # A backward pass may find in the cache the data that the forward pass of the same call has
    # read.
    read = max(0.0, row["bytes_read"] - spared * (row["pass"] == "both"))
    memory = read / limit["read"] / 1e3 + written / limit["write"] / 1e3
    rate = limit.get(row["dtype"], math.inf)
    if row["dtype"] == "float32":
        # Three products of TF32 are as accurate, and TF32 has half the rate of bfloat16.
        rate = max(rate, limit.get("bfloat16", 0.0) / 6)
    compute = row["flops"] / rate / 1e6
    return max(memory, compute), compute > memory


def times_of(rows):
    """Return the times by block of one implementation in one cell, and whether they count.

    The time of a block is the geometric mean over processes. A block that a process lacks is left
    out.
    """
    if not rows["status"].isin(TIMED).all():
        return {}, False
    real = rows[rows["status"] != "impossible"]
    used = real if len(real) else rows
    logs = np.log(used["device_us"]).groupby(used["block"], sort=False)
    whole = logs.size() == used["process"].nunique()
    times = np.exp(logs.mean(skipna=False)[whole]).to_dict()
    return times, (rows["status"] == "ok").any() or rows["status"].iloc[0] == "throttled"


def median_of_logs(values):
    """Return the median of logarithms, the variance of its bootstrap, and degrees of freedom."""
    logs = np.sort(np.log(values))
    n = len(logs)
    share = np.arange(n + 1) / n
    weights = np.mean(
        [np.diff(stats.binom.sf(k - 1, n, share)) for k in ((n + 1) // 2, n // 2 + 1)], 0
    )
    variance = weights @ (logs - weights @ logs) ** 2
    return np.median(logs), variance, max(1.0, min(n - 1, 2 * math.sqrt(n)))


def pooled(parts):
    """Return Satterthwaite's degrees of freedom; parts are variances with theirs."""
    total, below = sum(v for v, _ in parts), sum(v * v / f for v, f in parts)
    return total, total**2 / below if below > 0 else sum(f for _, f in parts)


def paule_mandel(gaps):
    squares, own = (np.array(each) for each in zip(*((g * g, v) for g, v, _ in gaps), strict=True))

    def excess(variance):
        return np.mean(squares / (variance + own)) - 1

    most = squares.max()
    if most == 0 or excess(0.0) <= 0:
        return 0.0
    return optimize.brentq(excess, 0.0, most, xtol=1e-18, rtol=1e-12)


def fitted_tails(scores):
    def likelihood(freedom):
        def minus(log_scale):
            return -stats.t.logpdf(scores, freedom, scale=math.exp(log_scale)).sum()

        return -optimize.minimize_scalar(minus, bounds=(-3, 2), method="bounded").fun

    grid = (3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0, 7.0, 8.0, 10.0, 14.0, 20.0, 30.0)
    if len(scores) < 100:
        return 4.0
    fits = {freedom: likelihood(freedom) for freedom in grid}
    return min(freedom for freedom, fit in fits.items() if max(fits.values()) - fit <= 0.5)


def windowed_tails(scores, places):
    """Return the tails of 200 gaps at a time, and the middle of the lengths of their calls.

    Gaps are in the order of those lengths. A window begins at every twentieth, and one ends with
    the last.
    """
    order = np.argsort(places, kind="stable")
    firsts = sorted({*range(0, max(1, len(order) - 200), 20), max(0, len(order) - 200)})
    windows = [order[first : first + 200] for first in firsts]
    return [(np.median(places[one]), fitted_tails(scores[one])) for one in windows]


def of_means(tails, ours, theirs):
    """Return the tails of a gap between means of processes: by the sixth root of their number. If
    that is below one, they are the heavier of those by kurtosis and by the cube root."""
    one, both = (1 / n**3 for n in (ours, theirs)), (1 / ours + 1 / theirs) ** 2
    count = both / sum(one) / 2
    if count < 1:
        return min(4 + (tails - 4) * count, tails * count ** (1 / 3))
    return tails * count ** (1 / 6)


def mixed(parts):
    """Return the degrees of freedom between those of the parts, which are variances with theirs."""
    total, below = sum(v for v, _ in parts), sum(v / f for v, f in parts)
    return total / below if total > 0 else sum(f for _, f in parts)


def between_processes(part, times):
    """Return the variance of processes' mean logs, the share of blocks in it, and its freedom."""
    logs = [
        np.log(one.loc[one["block"].isin(list(times)), "device_us"].dropna())
        for _, one in part.groupby("process")
    ]
    if len(logs) < 2 or len(times) < 2:
        return None
    within = np.mean([log.var(ddof=1) / len(log) for log in logs])
    return np.var([log.mean() for log in logs], ddof=1), within, len(logs) - 1


def own_gap_variance(spreads, alone, known):
    """Return the variance of a gap in an unsteady cell and its freedom, None in a steady one."""
    if None in spreads:
        return None
    freedom = sum(f for *_, f in spreads)
    between = sum(b * f for b, _, f in spreads) / freedom
    within = sum(w * f for _, w, f in spreads) / freedom
    odd = stats.f.sf(between / (alone + within), freedom, known)
    return (2 * (between - within), freedom) if odd < 1e-4 else None


def holm(p):
    p = np.asarray(p)
    order, adjusted, last = np.argsort(p, kind="stable"), np.full(len(p), np.nan), 0.0
    left = np.isfinite(p).sum()
    for rank, place in enumerate(order[:left]):
        last = max(last, min(1.0, p[place] * (left - rank)))
        adjusted[place] = last
    return adjusted


def decide(value, band, variance, freedom):
    """Return the verdict and its p."""
    error = math.sqrt(variance)
    if math.isnan(band):
        return "undecided", math.nan
    if abs(value) > band:
        p = stats.t.sf((abs(value) - band) / error, freedom)
        p += stats.t.sf((abs(value) + band) / error, freedom)
        return ("better" if value > 0 else "worse"), min(1.0, p)
    if abs(value) < MARGIN:
        return "no difference", stats.t.sf((MARGIN - abs(value)) / error, freedom)
    return "no difference", 1.0


@pytest.fixture(scope="module")
def again(raw):
    """Return the cells, and comparisons of ours with each baseline, from the raw rows."""
    rows, sidecars = raw
    limit = {
        tuple(place): limits(sidecars[place[0]], place[1:])
        for place, _ in rows.groupby(CELL, sort=False)
    }
    cells, singles, counted, spreads = {}, {}, {}, {}
    for (*place, impl), part in rows.groupby([*CELL, "impl"], sort=False):
        key = tuple(place)
        times, counts = times_of(part)
        if times:
            median = float(np.median(list(times.values())))
            least, _ = floor_us(part.iloc[0], limit[key], spared=128 << 20)
            if (part["status"] == "ok").any() and median < 0.8 * least:
                counts = False
            singles[key, impl] = median
        if times and counts:
            events = part["reason"].str.startswith("events:").any()
            cells.setdefault(key, {})[impl] = (times, events, part.iloc[0])
            counted[key, impl] = part["process"].nunique()
            spreads[key, impl] = between_processes(part, times)
    gaps, lengths, single = {}, {}, {}
    # No claim is made of a whole network, and its gaps say nothing of other cells.
    claimed = {
        key: impls
        for key, impls in cells.items()
        if not any(first["family"] == "model" for *_, first in impls.values())
    }
    for key, impls in claimed.items():
        if {"ours", "ours_twin"} <= set(impls):
            ours, twin = impls["ours"][0], impls["ours_twin"][0]
            shared = [block for block in ours if block in twin]
            gaps[key] = median_of_logs([twin[block] / ours[block] for block in shared])
            lengths[key] = math.log(np.median(list(ours.values())))
            # Use the noise as it would be between two processes.
            wider = 2 / (1 / counted[key, "ours"] + 1 / counted[key, "ours_twin"])
            value, variance, freedom = gaps[key]
            single[key] = math.sqrt(wider) * value, wider * variance, freedom
    keys = list(gaps)

    def near(length, without=None):
        places = np.array([lengths[key] for key in keys])
        order = np.argsort(np.abs(places - length), kind="stable")
        return [single[keys[i]] for i in order if i != without][:NEAREST]

    own = {}
    for key in keys:
        neighbours = near(lengths[key])
        both = [spreads[key, impl] for impl in ("ours", "ours_twin")]
        own[key] = own_gap_variance(both, paule_mandel(neighbours) / 2, len(neighbours))
    # They tell nothing of other cells.
    keys = [key for key in keys if own[key] is None]

    twofold = {key[0] for key in cells if key[3] == "backward"}
    twofold |= set(rows.loc[rows["pass"] == "backward", "op"])
    scores = []
    for i, key in enumerate(keys):
        variance = paule_mandel(near(lengths[key], without=i)) + single[key][1]
        scores.append(single[key][0] / math.sqrt(variance))
    tails = windowed_tails(np.array(scores), np.array([lengths[key] for key in keys]))
    compared = []
    for key, impls in claimed.items():
        if "ours" not in impls:
            continue
        ours, own_events, first = impls["ours"]
        length = math.log(np.median(list(ours.values())))
        neighbours = near(length)
        between, sure = paule_mandel(neighbours), len(neighbours)
        _, single_tails = min(tails, key=lambda one: abs(one[0] - length))
        if own.get(key):
            between, sure = own[key]
        for impl, (times, events, _) in impls.items():
            shared = [block for block in ours if block in times]
            if impl in ("ours", "ours_twin") or not shared:
                continue
            both = counted[key, "ours"], counted[key, impl]
            offset = between * (1 / both[0] + 1 / both[1]) / 2
            heavy = sure if own.get(key) else of_means(single_tails, *both)
            ratios = [times[block] / ours[block] for block in shared]
            log = median_of_logs(ratios)
            noise = math.nan
            if key in gaps and len(shared) >= FEWEST:
                value, variance, freedom = gaps[key]
                noise = abs(value) + stats.t.ppf(0.975, freedom) * math.sqrt(variance)
            whole, freedom = pooled([(log[1], log[2]), (offset, sure)])
            deep = mixed([(log[1], log[2]), (offset, heavy)])
            half = stats.t.ppf(0.975, freedom) * math.sqrt(whole)
            said, p = decide(log[0], max(MARGIN, noise), whole, deep)
            _, arithmetic = floor_us(first, limit[key])
            compared.append(
                dict(zip(CELL, key, strict=True))
                | {"baseline": impl, "timed_by": "events" if events or own_events else "graph"}
                | {"set": first["set"], "bound": "compute" if arithmetic else "memory"}
                | {"part": "training" if key[3] == "both" and key[0] in twofold else "headline"}
                | {"ratio": np.median(ratios), "lo": math.exp(-half), "hi": math.exp(half)}
                | {"noise": noise, "offset": math.sqrt(offset), "p": p, "said": said}
                | {"log": log, "gap": gaps.get(key) if noise == noise else None}
                | {"family_size": sure, "tails": heavy}
            )
    return singles, pd.DataFrame(compared)


def test_every_median_is_that_of_its_blocks(again, found):
    rows = found["summary"]
    rows = rows[rows["device_us"] != ""]
    expected = [
        again[0][tuple(row[name] for name in CELL), row["impl"]] for _, row in rows.iterrows()
    ]
    assert len(rows) == len(again[0]) > 0
    close(rows["device_us"], expected)


def joined(again, found):
    keys = [*CELL, "baseline"]
    both = again[1].merge(found["verdicts"], on=keys, suffixes=("", "_found"))
    assert len(both) == len(again[1]) == len(found["verdicts"]) > 0
    return both


def test_every_ratio_has_its_interval_offset_and_noise(again, found):
    both = joined(again, found)
    for name in ("timed_by", "set", "bound", "part"):
        assert (both[name] == both[f"{name}_found"]).all(), name
    close(both["ratio_found"], both["ratio"])
    close(both["ci_lo"], both["ratio"] * both["lo"])
    close(both["ci_hi"], both["ratio"] * both["hi"])
    close(both["noise_found"], both["noise"])
    close(both["offset_found"], both["offset"])


def test_every_verdict_follows_from_p_and_holm(again, found):
    both = joined(again, found)
    close(both["p_found"], both["p"])
    for _, family in both.groupby(["op", "set", "part"], sort=False):
        adjusted = holm(family["p"])
        close(family["p_holm"], adjusted)
        said = np.where(adjusted <= 0.05, family["said"], "undecided")
        assert (said == family["verdict"]).all()


def headline(rows, part="headline"):
    """Compare with the fastest by graphs on the grid: cells, geometric mean and median."""
    rows = rows[(rows["timed_by"] == "graph") & (rows["set"] == "grid") & (rows["part"] == part)]
    least = rows.assign(ratio=pd.to_numeric(rows["ratio"])).groupby(CELL)["ratio"].min()
    return len(least), float(np.exp(np.log(least).mean())), float(least.median())


def test_the_headline_is_the_mean_of_the_fastest_by_graphs_on_the_grid(again, found):
    expected, value = headline(again[1]), headline(found["verdicts"])
    assert value == pytest.approx(expected, rel=TOLERANCE)
    assert value[0] > 0


def test_the_readme_and_the_paper_have_the_headline_of_the_raw_rows(again, found):
    """Each op counts once for each pass; training calls, which repeat launches, stand apart."""
    count, mean, median = headline(again[1])
    shown = f"| all cells | {count} | {mean:.3f} | {median:.3f} |"
    trained = headline(again[1], "training")
    apart = f"in none of the above | {trained[0]} | {trained[1]:.3f} | {trained[2]:.3f} |"
    written, numbers = found["run"] / "README.md", found["run"] / "numbers.tex"
    written.write_text("<!-- results: begin -->\n<!-- results: end -->\n")
    assert paper.call("readme.py", found["run"], written).returncode == 0
    assert paper.call("claims.py", found["run"], numbers).returncode == 0
    said = paper.numbers(found["run"])
    assert said["closest_cells"] == str(count)
    assert (said["closest"], said["closest_median"]) == (f"{mean:.3f}", f"{median:.3f}")
    assert shown in written.read_text()
    assert (apart in written.read_text()) == (trained[0] > 0)
    keys = ("training_cells", "training_closest", "training_median")
    told = (str(trained[0]), f"{trained[1]:.3f}", f"{trained[2]:.3f}") if trained[0] else ("0",)
    assert tuple(said[key] for key in keys if key in said) == told
    if found["mode"] == "replayed":
        assert shown in (ROOT / "README.md").read_text()


def test_the_made_up_run_tells_the_parts_and_sets_apart(again, folder):
    rows = again[1]
    if folder in MACHINES:
        assert set(rows["part"]) >= {"headline"}
        return
    kinds = set(rows[["op", "pass", "set", "part"]].itertuples(index=False, name=None))
    assert ("swiglu", "both", "grid", "training") in kinds
    assert ("cross_entropy", "both", "grid", "headline") in kinds
    assert ("cross_entropy", "both", "drawn", "headline") in kinds
    assert ("swiglu", "backward", "drawn", "headline") in kinds
    assert headline(rows, "training")[0] > 0
    whole = rows.assign(part="headline")
    assert headline(whole)[1] != pytest.approx(headline(rows)[1], rel=1e-3)
    # The cell that only a floor of `both` lets count.
    assert (rows[CELL] == list(whole_run.NEAR_LIGHT)).all(axis=1).any()


def over_cells(rows):
    """Return the mean of a claim: value, variance, degrees of freedom twice, and noise floor."""
    count = len(rows)
    value = np.mean([log[0] for log in rows["log"]])
    blocks = pooled([(log[1] / count**2, log[2]) for log in rows["log"]])
    offsets = [((o / count) ** 2, t) for o, t in zip(rows["offset"], rows["tails"], strict=True)]
    total = sum(variance for variance, _ in offsets)
    number = total**2 / sum(variance**2 for variance, _ in offsets) if total else 1
    thinned = [(variance, tails * number ** (1 / 3)) for variance, tails in offsets]
    whole, wide = pooled([blocks, (total, rows["family_size"].mean())])
    deep = mixed([blocks, *thinned])
    if any(gap is None for gap in rows["gap"]):
        return value, whole, wide, deep, math.nan
    gap = np.mean([gap[0] for gap in rows["gap"]])
    variance, freedom = pooled([(gap[1] / count**2, gap[2]) for gap in rows["gap"]])
    return value, whole, wide, deep, abs(gap) + stats.t.ppf(0.975, freedom) * math.sqrt(variance)


def claims(again):
    rows = again[1][again[1]["set"] == "grid"]
    return {
        key: over_cells(part)
        for key, part in rows.groupby(["part", "op", "pass", "baseline", "timed_by"], sort=False)
    }


def families(p, keys):
    """Holm's correction within each part of the study."""
    adjusted, parts = np.full(len(p), np.nan), np.array([key[0] for key in keys])
    for part in set(parts):
        adjusted[parts == part] = holm(np.array(p)[parts == part])
    return adjusted


def verdicts_follow(rows, keys, said):
    """Assert the p, corrected p and verdict of rows; `said` has the (verdict, p) of each key."""
    adjusted = families([p for _, p in said], keys)
    close(rows["p"], [p for _, p in said])
    close(rows["p_holm"], adjusted)
    verdicts = [
        word if p <= 0.05 else "undecided" for (word, _), p in zip(said, adjusted, strict=True)
    ]
    assert verdicts == rows["verdict"].tolist()


def test_every_claim_against_a_baseline_follows(again, found):
    expected = claims(again)
    rows = found["claims"][found["claims"]["against"] == "each"]
    names = ["part", "op", "pass", "baseline", "timed_by"]
    keys = [tuple(row) for row in rows[names].to_numpy()]
    assert sorted(keys) == sorted(expected)
    values = [expected[key] for key in keys]
    close(rows["ratio"], [math.exp(value) for value, *_ in values])
    halves = [stats.t.ppf(0.975, wide) * math.sqrt(whole) for _, whole, wide, _, _ in values]
    close(rows["ci_lo"], [math.exp(v[0] - half) for v, half in zip(values, halves, strict=True)])
    close(rows["ci_hi"], [math.exp(v[0] + half) for v, half in zip(values, halves, strict=True)])
    said = [decide(v[0], max(MARGIN, v[4]), v[1], v[3]) for v in values]
    verdicts_follow(rows, keys, said)


def test_every_claim_against_the_best_rival_follows(again, found):
    rivals = {}
    for (part, op, pass_, baseline, clock), value in claims(again).items():
        if clock == "graph":
            rivals.setdefault((part, op, pass_), {})[baseline] = value
    rows = found["claims"][found["claims"]["against"] == "best"].reset_index(drop=True)
    keys = [tuple(row) for row in rows[["part", "op", "pass"]].to_numpy()]
    assert sorted(keys) == sorted(rivals)
    said = []
    for row in rows.rename(columns={"pass": "pass_"}).itertuples():
        one = rivals[row.part, row.op, row.pass_]
        count = len(one)
        closest = min(one, key=lambda name: one[name][0])
        assert (row.baseline, row.rivals) == (closest, count)

        def tails(bound, sign, one=one):
            """Return p of each rival's estimate on one side of `bound`, if that were its value."""
            return [
                stats.t.sf(sign * (v[0] - bound(v)) / math.sqrt(v[1]), v[3]) for v in one.values()
            ]

        band = max(MARGIN, one[closest][4])
        better = max(tails(lambda v: max(MARGIN, v[4]), 1))
        worse = count * min(tails(lambda v: -max(MARGIN, v[4]), -1))
        level = max(
            max(tails(lambda v: -MARGIN, 1)), min(1.0, count * min(tails(lambda v: MARGIN, -1)))
        )
        options = {"better": 2 * better, "worse": 2 * worse, "no difference": level}
        word = min(options, key=options.get)
        said.append((word, min(1.0, options[word]) if band == band else math.nan))
        assert row.ratio == pytest.approx(math.exp(one[closest][0]), rel=TOLERANCE)
        lo = min(v[0] - stats.t.ppf(0.975, v[2]) * math.sqrt(v[1]) for v in one.values())
        sure = 1 - 0.025 / count
        hi = min(v[0] + stats.t.ppf(sure, v[2]) * math.sqrt(v[1]) for v in one.values())
        assert (row.ci_lo, row.ci_hi) == pytest.approx((math.exp(lo), math.exp(hi)), rel=TOLERANCE)
    verdicts_follow(rows, keys, said)


def test_intervals_of_equal_processes_hold_one_in_95_of_100_cells(found):
    """The published interval of ours against its twin, over all cells of the record."""
    rows = found["summary"]
    rows = rows[(rows["impl"] == "ours") & (rows["speedup_vs_ours_twin"] != "")]
    lo, hi = (pd.to_numeric(rows[f"speedup_vs_ours_twin_{end}"]) for end in ("lo", "hi"))
    held, count = ((lo <= 1) & (hi >= 1)).sum(), len(rows)
    assert count > 100
    least, most = stats.binom.ppf([0.005, 0.995], count, 0.95)
    assert least <= held <= most


def test_intervals_without_the_gap_of_their_own_cell_hold_it(again, raw):
    """Each A/A gap against an interval from the gaps of other cells alone, by length of call."""
    table = again[1].drop_duplicates(CELL)
    own = table[table["gap"].notna()]
    lengths = np.log(
        [again[0][tuple(row[name] for name in CELL), "ours"] for _, row in own.iterrows()]
    )
    gaps, held = list(own["gap"]), []
    for i, (value, variance, freedom) in enumerate(gaps):
        order = [j for j in np.argsort(np.abs(lengths - lengths[i]), kind="stable") if j != i]
        offset = paule_mandel([gaps[j] for j in order[:NEAREST]])
        whole, wide = pooled([(variance, freedom), (offset, NEAREST)])
        held.append(abs(value) <= stats.t.ppf(0.975, wide) * math.sqrt(whole))
    for part in (np.ones(len(held), bool), lengths < math.log(20), lengths >= math.log(20)):
        count = part.sum()
        least, most = stats.binom.ppf([0.005, 0.995], count, 0.95)
        assert least <= np.array(held)[part].sum() <= most
