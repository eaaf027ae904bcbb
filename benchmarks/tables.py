"""Write the tables of docs/benchmarks.md, and its plots, from benchmarks/results.json.

python benchmarks/tables.py    # needs matplotlib
"""

import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import cluster_model
import run

PAGE = os.path.join(run.ROOT, "docs", "benchmarks.md")
RESULTS = os.path.join(run.HERE, "results.json")
PLOTS = os.path.join(run.ROOT, "docs", "plots")
BEGIN = "<!-- {}: written by benchmarks/tables.py -->\n"
END = "<!-- end of {} -->\n"


def markdown(rows):
    """Return a table in Markdown; the first row is its headings."""
    rows = [list(map(str, row)) for row in rows]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0])] + lines[1:]) + "\n"


def kind_of(row):
    """Which of a row's ratios its goal is about."""
    return "cpu" if "CPU seconds" in row.title else "wall"


def median(ratios):
    return ratios[len(ratios) // 2]


def is_met(row, measured):
    """Whether the median of the ratios is at most the goal, as far as two digits tell."""
    return round(median(measured[kind_of(row)]), 2) <= row.goal


def is_bound(row, measured):
    """Whether not even a library without any overhead could meet the goal on this machine."""
    return "bound" in measured and round(median(measured["bound"]), 2) >= row.goal


def is_slower(measured):
    return round(median(measured["wall"]), 2) > 1


def with_reasons(rows, reasons):
    """Return a table, and below it a list of (what is slower, a sentence that says why)."""
    works = {}
    for what, why in reasons:
        works.setdefault(why, []).append(what)
    listed = "".join("- {}: {}\n".format("; ".join(what), why) for why, what in works.items())
    return markdown(rows) + ("\nWhere compat is slower:\n\n" + listed if listed else "")


def peers(results, rows):
    """Return the table of these rows, and the reasons."""
    slower = [row for row in rows if is_slower(results["rows"][row.name])]
    return with_reasons(against_peers(results, rows), [(row.title, row.reason) for row in slower])


def against_peers(results, rows):
    yield ["work", "peer", "time, compat / peer", "CPU seconds"]
    for row in rows:
        measured = results["rows"][row.name]
        wall, cpu = measured["wall"], measured["cpu"]
        shown = ["{:.2f}".format(median(wall)), "{:.2f}".format(median(cpu))]
        yield [row.title, row.peer] + shown


def others(results):
    """Return the rows of a table: what is measured, and how, in a line each."""
    figures = results["figures"]
    yield ["what", "devices", "seconds, or times"]
    found = figures["scaling"]
    times = ["{:.2f}".format(found["1"] / found[n]) for n in sorted(found, key=int)]
    what = (
        "one batch of 1,024 rows of the dense model, TensorFlow 2.15: times as fast as one device"
    )
    yield [what, ", ".join(sorted(found, key=int)), ", ".join(times)]
    found = dict(figures["building"])
    what = "TensorFlow 1: a model with an LSTM is made, compiled and does its first step: seconds"
    peer = found.pop("multi_gpu_model")
    taken = ["{:.2f}".format(found[n]) for n in sorted(found)] + ["{:.2f}".format(peer)]
    yield [what, ", ".join(sorted(found)) + ", multi_gpu_model (3)", ", ".join(taken)]
    found = figures["many"]
    what = "the same for the {}th model in a process: times as long as for the first".format(
        len(found["Keras"])
    )
    names = "Keras (1), compat (3), multi_gpu_model (3)"
    taken = [found[name] for name in ("Keras", "compat", "multi_gpu_model")]
    yield [what, names, ", ".join("{:.2f}".format(each[-1] / each[0]) for each in taken)]
    for name, what in (
        ("import", "a process that does nothing, and imports compat"),
        ("configure", "a process that imports TensorFlow's Keras, after `configure_gpu()`"),
    ):
        plain, ours = figures["import"][name]["seconds"]
        yield [
            what + ": seconds without compat, and with it",
            "",
            "{:.3f}, {:.3f}".format(plain, ours),
        ]
    shares = [[trial / step for step, trial in figures[name].values()] for name in run.TRIALS]
    what = (
        "the [trial](how-it-works.md#operations-that-need-the-whole-batch) in a model's first step"
    )
    names = ", ".join(name.partition("-")[2] for name in run.TRIALS)
    yield [what + ": its largest share", "2 of " + names] + [
        ", ".join("{:.0%}".format(max(each)) for each in shares)
    ]


def bytes_across_devices(results):
    """Return the rows of a table: of each backend and kind of step, by the number of devices."""
    found = cluster_model.bytes_of_replicas(results["figures"])
    devices = sorted({number for by_devices in found.values() for number in by_devices})
    yield ["the larger of sent and received, in W", "step"] + ["N = {}".format(n) for n in devices]
    labels = {}
    for kind in ("train", "predict, first", "predict, later"):
        for label, by_devices in found.items():
            most = (max(shares(by_devices[number], kind)) for number in devices)
            cells = tuple("{:.1f}".format(share) for share in most)
            labels.setdefault((kind, *cells), []).append(label)
    yield from (["; ".join(names), *cells] for cells, names in labels.items())
    yield ["a ring", "train"] + ["{:.1f}".format(2 - 2 / n) for n in devices]
    yield ["a star", "train"] + ["{:.1f}".format(n - 1) for n in devices]


def shares(counts, kind):
    """Return what the busiest device sends and receives in a step, in times the weights."""
    return [counts[kind][link] / counts["weights"] for link in ("sent", "received")]


def batch_norm(results):
    """Return the rows of a table: steps in times those with the option off, and what it takes."""
    yield [
        "backend",
        "on / off",
        "CPU seconds",
        "peer / off",
        "one device / off",
        "reductions of a layer",
        "numbers sent / received, in times the channels",
    ]
    for name in run.NORMS:
        found = results["figures"][name]
        steps = found["steps"]
        wall, cpu = (
            {each: taken[kind] / steps["off"][kind] for each, taken in steps.items()}
            for kind in ("wall", "cpu")
        )
        counted, size = found["counted"], 4 * found["channels"]
        yield [
            name.partition("-")[2],
            "{:.2f}".format(wall["on"]),
            "{:.2f}".format(cpu["on"]),
            "{:.2f}".format(wall["peer"]) if "peer" in wall else "",
            "{:.2f}".format(wall["one device"]),
            "{:g} forward, {:g} backward".format(counted["forward"], counted["backward"]),
            "{:.1f} / {:.1f}".format(counted["sent"] / size, counted["received"] / size),
        ]


def first_fits(results):
    yield ["backend, model", "peer, seconds", "compat / peer", "verified / peer"]
    for name, work, found in of_first_fits(results):
        ratios = ["{:.2f}".format(found[kind] / found["peer"]) for kind in run.FIRST_GOALS]
        title = "{}, {}".format(name.partition("-")[2], work)
        yield [title, "{:.2f}".format(found["peer"])] + ratios


def first_reasons(results):
    """Of the backends on which a first fit() takes longer than it should."""
    slower = {name for name, _, found in of_first_fits(results) if missed(found)}
    for name in run.FIRST_FITS:
        if name in slower:
            yield name.partition("-")[2], run.FIRST_REASONS[name]


def of_first_fits(results):
    """Name of the figure, work, and CPU seconds by candidate; where there is no peer, plain is."""
    for name in run.FIRST_FITS:
        for work, found in results["figures"].get(name, {}).items():
            yield name, work, dict({"peer": found["plain"]}, **found)


def missed(found):
    """Whether a first fit() takes more of the peer's CPU seconds than it should."""
    ratios = {kind: round(found[kind] / found["peer"], 2) for kind in run.FIRST_GOALS}
    return any(ratios[kind] > goal for kind, goal in run.FIRST_GOALS.items())


#: The section before its table, which is there when something of it is measured.
FITS = """\
## Short fits on ranks

A `fit()` on ranks compares checksums of the weights when it begins and when it ends, with one
exchange each, which counts if it has few steps. Each number is the time of a step with compat,
divided by the peer's, on two ranks, measured once as above; a round is 20 fits of one step, 5 of
four, or one of 20 or 60. `dense-128` is `dense` with 128 rows for each rank.

"""


def fits(results):
    """Those that are measured: ``--only`` may leave them out."""
    found, kinds, reasons = {}, [], []
    for row in run.FITS:
        measured = results["rows"].get(row.name)
        if measured is not None:
            work, _, kind = row.title.rpartition(", ")
            cell = "{:.2f}".format(median(measured["wall"]))
            found.setdefault((work, row.peer), {})[kind] = cell
            reason = row.reason.split(": ", 1)
            kinds += [kind] * (kind not in kinds)
            reasons += [reason] * (is_slower(measured) and reason not in reasons)
    rows = [[*key, *[cells.get(kind, "") for kind in kinds]] for key, cells in found.items()]
    return FITS + with_reasons([["work", "peer", *kinds], *rows], reasons) if rows else ""


def sections(results):
    """Return the text of each marked part of the page."""
    return {
        "peers": peers(results, run.ROWS),
        "fits": fits(results),
        "norm": markdown(batch_norm(results)),
        "bytes": markdown(bytes_across_devices(results)),
        "others": markdown(others(results)),
        "first": with_reasons(first_fits(results), first_reasons(results)),
    }


def page_with(page, found):
    """Return the page with these texts in its marked parts."""
    for name, text in found.items():
        before, begin, rest = page.partition(BEGIN.format(name))
        _, end, after = rest.partition(END.format(name))
        assert begin and end, name
        page = before + begin + "\n" + text + "\n" + end + after
    return page


def plots(results):
    """Name of the picture -> the figure of matplotlib."""
    from matplotlib import pyplot

    rows = [row for row in run.ROWS if row.name in results["rows"]][::-1]
    ratios = [results["rows"][row.name][kind_of(row)] for row in rows]
    places = range(len(rows))
    figure, axes = pyplot.subplots(figsize=(8, 0.3 * len(rows) + 1))
    middles = [median(found) for found in ratios]
    spread = [
        [middle - found[0] for middle, found in zip(middles, ratios)],
        [found[-1] - middle for middle, found in zip(middles, ratios)],
    ]
    axes.barh(places, middles, xerr=spread, color="#93c5fd", ecolor="#1e3a8a")
    axes.axvline(1.0, color="#374151", linewidth=0.8)
    axes.set_yticks(list(places))
    axes.set_yticklabels(["{}\nagainst {}".format(r.title, r.peer) for r in rows], fontsize=5)
    axes.set_xlabel("time of a step, compat / peer; below 1 compat is faster")
    yield "peers", figure

    rows = list(of_first_fits(results))[::-1]
    figure, axes = pyplot.subplots(figsize=(6, 0.35 * len(rows) + 1))
    for place, kind in enumerate(run.FIRST_GOALS):
        label = "verified" if kind == "verified" else "not verified"
        places = [number + 0.2 - 0.4 * place for number in range(len(rows))]
        ratios = [found[kind] / found["peer"] for _, _, found in rows]
        color = ("#93c5fd", "#1e3a8a")[place]
        axes.barh(places, ratios, 0.38, color=color, label=label)
    axes.axvline(1.0, color="#374151", linewidth=0.8)
    axes.set_yticks(range(len(rows)))
    axes.set_yticklabels([name.partition("-")[2] + ", " + work for name, work, _ in rows])
    axes.set_xlabel("CPU seconds of a first fit(), compat / peer")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=2)
    yield "first", figure

    figure, axes = pyplot.subplots(figsize=(5, 3))
    figures = results["figures"]
    devices = sorted(
        {n for each in cluster_model.bytes_of_replicas(figures).values() for n in each}
    )
    for kind in ("train", "predict, first", "predict, later"):
        values = [cluster_model.busiest(figures, number, kind) for number in devices]
        axes.plot(devices, values, marker="o", label="compat, counted: " + kind)
    axes.plot(devices, [2 - 2 / n for n in devices], color="#374151", label="ring: train")
    axes.plot(devices, [n - 1 for n in devices], "--", color="#374151", label="star: train")
    axes.set_ylim(-0.2, 8)
    axes.set_xlabel("devices")
    axes.set_ylabel("busiest link, each way:\nbytes of a step / of the weights")
    axes.legend(fontsize=7)
    yield "bytes", figure


def main():
    with open(RESULTS) as file:
        results = json.load(file)
    with open(PAGE, encoding="utf-8") as file:
        page = file.read()
    page = page_with(page, sections(results))
    with open(PAGE, "w", encoding="utf-8") as file:
        file.write(page)

    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "compat"  # the same file each time
    for name, figure in plots(results):
        path = os.path.join(PLOTS, name + ".svg")
        figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
