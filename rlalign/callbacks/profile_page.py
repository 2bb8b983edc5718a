"""A profile as a page."""

from collections.abc import Iterable, Sequence

from rlalign.callbacks.phases import DECODE, PHASES, VALIDATION
from rlalign.callbacks.profile_advice import advice
from rlalign.callbacks.profile_facts import Facts
from rlalign.callbacks.traced import Operators

_OPERATORS = 5  # of a phase
_LEAST = 0.05  # share of an iteration, of the phases whose operators are shown


def page(facts: Facts, run: str) -> str:
    """Everything in Markdown.

    Args:
        facts: What is known.
        run: Its name.
    """
    numbers = ", ".join(map(str, facts.iterations))
    traced = " Operators are those of the next one, which was traced: `trace.json.gz`." if facts.operators else ""
    parts = [
        f"# Profile of {run}",
        f"Rank 0, iteration {numbers} of metrics.csv.{traced}",
        _table(("", ""), facts.about.items()),
        "## What this suggests",
        "\n".join(f"- {text}" for text in advice(facts) or ["None of the rules that this page knows applies."]),
        "## Where the time goes",
        _phases(facts),
        "## Speed and memory",
        _table(("", ""), _speed(facts)),
        "## Operators, by the time that is their own",
        _operators(facts) if facts.operators else "The run ended before an iteration was traced.",
    ]
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def _phases(facts: Facts) -> str:
    rows = [
        (name, f"{facts.seconds[name]:.3f}", f"{facts.share(name):.1%}", f"{facts.calls.get(name, 0):g}", text)
        for name, text in PHASES.items()
        if facts.seconds.get(name)
    ]
    rows.append(("all", f"{facts.whole:.3f}", "100.0%", "", "from the start of an iteration to that of the next"))
    table = _table(("phase", "seconds", "share", "times", "what it is"), rows)
    groups = f"Sampling {facts.sampling:.1%}, update {facts.update:.1%}, the rest {_rest(facts):.1%}."
    every = facts.validates_every
    later = (
        f" No validation in it: that comes every {every} iterations."
        if every and not facts.seconds.get(VALIDATION)
        else ""
    )
    return f"{groups}{later}\n\n{table}"


def _rest(facts: Facts) -> float:
    return max(1 - facts.sampling - facts.update, 0.0)


def _speed(facts: Facts) -> list[tuple[str, str]]:
    figures = facts.figures
    shown = [("seconds an iteration", f"{facts.whole:.3f}")]
    drawing = facts.sampling * facts.whole
    if facts.responses and drawing:
        drawn = facts.responses * facts.mean_tokens
        shown.append(("tokens sampled", f"{drawn:,.0f}, {drawn / drawing:,.0f} a second of sampling"))
        shown.append(("tokens of a response", f"{facts.mean_tokens:.1f} on average, {facts.longest} at most"))
    if "perf/trained_tokens_per_second" in figures:
        shown += [
            ("tokens trained", f"{figures['perf/trained_tokens_per_second']:,.0f} a second of the update"),
            (
                "padding share",
                f"{figures['perf/padding_share']:.1%} of the minibatches' positions"
                + (", which the policy leaves out" if facts.leaves_out_padding else ""),
            ),
            ("MFU of the update", f"{figures['perf/mfu']:.1%}: {figures['perf/tflops']:.3g} TFLOP/s"),
        ]
    shown.append(("measured peak", f"{facts.peak / 1e12:.3g} TFLOP/s, a product of two matrices"))
    what = "tensors on the GPU" if facts.device == "cuda" else "the process"
    shown.append(("peak memory", f"{figures['perf/peak_memory_mib']:,.0f} MiB, {what}, so far"))
    return shown


def _operators(facts: Facts) -> str:
    shown = [(name, found) for name in PHASES if (found := facts.operators.get(name)) and facts.share(name) >= _LEAST]
    rows = [(name, f"{min(found.busy, 1.0):.0%}", _top(found)) for name, found in shown if found.self_seconds]
    what = "in kernels" if facts.device == "cuda" else "in operators"
    decode, steps = facts.operators.get(DECODE), facts.calls.get(DECODE, 0)
    is_cut = decode is not None and decode.ranges < steps
    cut = f"\n\nOf some {steps:.0f} decode steps, the first {decode.ranges} are traced." if decode and is_cut else ""
    return _table(("phase", what, "those that take the most, of these"), rows) + cut


def _top(operators: Operators) -> str:
    total = sum(operators.self_seconds.values()) or 1.0
    return ", ".join(f"`{name}` {operators.self_seconds[name] / total:.0%}" for name in operators.top(_OPERATORS))
