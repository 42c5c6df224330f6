"""The page of all results, in Markdown: made from the files, never by hand."""

from __future__ import annotations

from hpctk.cli.core.table import bytes_text, seconds_text

LIMITATIONS = """## Limitations

- All hosts share the cores of one machine. What is saved on the network is partly lost to computing that real hosts
  would do at the same time, and nothing hides behind backward: the cores that compute also move the bytes.
- Links are emulated by token buckets on one machine: the rate is that of a slow network, the latency is not.
- Models are small: they were chosen so that the network's share of a step is large.
- The target is reached at the first look at held-out data that says so, every few steps; the clock does not run during
  a look. Seeds are few: the range over seeds stands beside each median.
- Learning rates were searched on a small grid, with the same number of steps for each method. A method that wants a
  rate outside the grid, or a longer search, is shown worse than it is.
- All other settings are those in `benchmarks/_training/contenders.py`, for every task.
- torch's PowerSGD hook and torchft are no contenders here yet; Horovod can be (`--methods horovod`), and is in none of
  these files."""
INTRODUCTION = """Real training to a target on held-out data, on emulated hosts with limited links.
`./launch/bench train` measures; `./launch/bench report` writes this page from the files in `results/`."""

PUBLISHED = """## The papers' own experiments

Each is a command, `./launch/bench paper/NAME`, whose description says what is as published and what was scaled down for
two cores. They compare what is reached after so many steps, so that the machine's speed plays no part."""


def page(documents, papers):
    """Return the page; set-ups and experiments of the papers by the name of their file, without its ending."""
    parts = ["# Measured: does it pay?", INTRODUCTION]
    if not documents:
        parts.append("Nothing was measured yet.")
    parts += [foretold(list(documents.values())), *(section(name, one) for name, one in documents.items())]
    if papers:
        parts += [PUBLISHED, *(experiment(name, one) for name, one in papers.items())]
    return "\n\n".join(filter(None, [*parts, LIMITATIONS])) + "\n"


def foretold(documents):
    """Return how good the predictions were over all set-ups, "" where there are none."""
    ratios = [p["ratio"] for one in documents for p in one["predictions"]]
    advised = [ratio for ratio in map(advice_ratio, documents) if ratio is not None]
    if not ratios:
        return ""
    near = sum(0.8 <= ratio <= 1.2 for ratio in ratios)
    best = sum(ratio <= 1.1 for ratio in advised)
    return (
        f"`hpctk advise`, asked with a calibration of these links and the step alone: {near} of {len(ratios)} steps "
        f"within 20 % of what was measured; what it recommends was within 1.1 of the best time to target in {best} of "
        f"{len(advised)} set-ups."
    )


def section(name, document):
    """Return one set-up."""
    settings, machine = document["settings"], document["machine"]
    links = sorted(run["link_bits_per_second"] for run in document["runs"] if run["link_bits_per_second"])
    measured = f", measured {links[0] / 1e6:.0f} to {links[-1] / 1e6:.0f} Mbit/s before the runs" if links else ""
    lines = [
        f"## {settings['task']}, {settings['hosts']} ranks, links: {settings['rate']}",
        f"{document['params']:,} parameters, {document['data']}, {settings['batch_of_a_rank']} samples a rank and "
        f"step. Target: {settings['metric']} {settings['target']:g}. Links of {settings['rate']}{measured}. "
        f"{machine['cores']} cores, load {machine['load_at_start']:.1f} at the start, torch {machine['torch']}, "
        f"hpctk {machine['hpctk']}, commit {(machine['commit'] or 'unknown')[:10]}. "
        "Medians over seeds, and the least and the most.",
        results_table(document),
        lost(document),
    ]
    if document["curves"]:
        lines.append(f"![Held-out {settings['metric']} against seconds](results/{name}.png)")
    lines.append(search_table(document))
    if document["predictions"]:
        lines.append(predictions_table(document))
    return "\n\n".join(line for line in lines if line)


def experiment(name, document):
    """Return what came of a paper's experiment: the table that its command prints."""
    machine = document["machine"]
    lines = document["table"].splitlines()
    return "\n".join([
        f"### paper/{name}", "", f"hpctk {machine['hpctk']}, commit {(machine['commit'] or 'unknown')[:10]}.", "",
        "```", *lines, "```",
    ])  # fmt: skip


def markdown(head, rows):
    return "\n".join(["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]])


def results_table(document):
    summary = {row["name"]: row for row in document["summary"]}
    bases = {name: summary.get(name, {}).get("to_target_s") for name in ("ddp-fp16", "ddp")}
    rows = []
    for row in sorted(document["summary"], key=lambda row: (row["to_target_s"] is None, row["to_target_s"] or 0)):
        own, spread = row["to_target_s"], row["to_target_range_s"]
        ratios = [f"{base / own:.2f}" if base and own else "" for base in bases.values()]
        range_text = f" ({spread[0]:.1f} to {spread[1]:.1f})" if spread else ""
        rows.append(
            [
                row["name"],
                f"{own:.1f} s{range_text}" if own else f"reached by {row['reached']} of {row['seeds']}",
                *ratios,
                seconds_text(row["seconds"]),
                f"{row['samples']:.0f}",
                bytes_text(row["wire_bytes"]) if row["wire_bytes"] else "not measured",
                bytes_text(row["account_bytes"]) if row["account_bytes"] else "no account",
            ]
        )
    head = ["method", "to target", "times ddp-fp16", "times ddp", "a step", "samples", "on the wire", "own account"]
    return markdown(head, rows)


def lost(document):
    """Return who was not ahead of DDP in 16 bits, in one line."""
    summary = {row["name"]: row for row in document["summary"]}
    base = summary.get("ddp-fp16", {}).get("to_target_s")
    behind = [
        name
        for name, row in summary.items()
        if name not in ("ddp", "ddp-fp16", "alone")
        and not name.startswith("one-worker")
        and (row["to_target_s"] is None or (base is not None and row["to_target_s"] >= base))
    ]
    if base is None:
        return "DDP in 16 bits did not reach the target, or was not asked: there is nothing to be ahead of."
    return (
        f"Not ahead of DDP in 16 bits: {', '.join(behind)}." if behind else "All others were ahead of DDP in 16 bits."
    )


def search_table(document):
    rates = document["settings"]["rates"]
    methods = list(dict.fromkeys(run["method"] for run in document["search"]))
    found = {(run["method"], run["rate"]): run for run in document["search"]}
    taken = {row["name"]: row["rate"] for row in document["summary"]}

    def cell(method, rate):
        run = found.get((method, rate))
        if run is None:
            return ""
        metric = document["settings"]["metric"]
        text = (
            "failed"
            if run["loss"] is None
            else f"{run['accuracy']:.1%}"
            if metric == "accuracy"
            else f"{run['loss']:.3f}"
        )
        return f"**{text}**" if taken.get(method) == rate else text

    rows = [[method, *(cell(method, rate) for rate in rates)] for method in methods]
    steps = document["settings"]["search_steps"]
    title = (
        f"The search for rates: held-out {document['settings']['metric']} after {steps} steps; the one taken is bold."
    )
    if "searched_at" in document:
        title += f" It was made once for this task, on links of {document['searched_at']}: they change no loss."
    return f"{title}\n\n{markdown(['method', *(f'{rate:g}' for rate in rates)], rows)}"


def predictions_table(document):
    rows = [
        [p["name"], seconds_text(p["measured_s"]), seconds_text(p["predicted_s"]), f"{p['ratio']:.2f}"]
        for p in document["predictions"]
    ]
    near = sum(0.8 <= p["ratio"] <= 1.2 for p in document["predictions"])
    title = f"A step as `hpctk advise` predicts it: {near} of {len(rows)} within 20 % of what was measured."
    text = f"{title}\n\n{markdown(['method', 'measured', 'predicted', 'predicted / measured'], rows)}"
    return f"{text}\n\n{advice_line(document)}" if document.get("advice") else text


def advice_line(document):
    """Return what `hpctk advise` would have said, and how far that was from the best."""
    advice, times = document["advice"], {row["name"]: row["to_target_s"] for row in document["summary"]}
    said = f"`hpctk advise` says: {advice['verdict']}."
    ratio = advice_ratio(document)
    if ratio is None:
        return f"{said} That was not measured to the target."
    return f"{said} It took {times[advice['name']]:.1f} s, {ratio:.2f} times the best."


def advice_ratio(document):
    """Return the recommended contender's time to target divided by the best one's; None where there is no such."""
    times = {row["name"]: row["to_target_s"] for row in document["summary"] if row["name"] != "alone"}
    own = times.get((document.get("advice") or {}).get("name"))
    return own / min(filter(None, times.values())) if own else None
