"""What the figures of a profile suggest: rules, each of which says something or nothing."""

from collections.abc import Callable

from rlalign.callbacks.phases import CHECKPOINT, DECODE, OPTIMIZER, REWARDS, SCORE, UPDATE, VALIDATION
from rlalign.callbacks.profile_facts import Facts


def sampling(facts: Facts) -> str | None:
    """Half of an iteration or more is sampling."""
    if facts.sampling < 0.5:
        return None
    text = f"Sampling takes {facts.sampling:.0%} of an iteration"
    steps = facts.calls.get(DECODE, 0.0)
    if steps:
        rows = facts.responses * facts.mean_tokens / steps
        text += f", most of it in {steps:,.0f} decode steps" if facts.share(DECODE) > facts.sampling / 2 else ""
        text += f"; a decode step draws for {rows:.0f} responses on average"
    if facts.max_rows is not None and facts.responses > facts.max_rows:
        return (
            f"{text}. {facts.responses} responses take turns, {facts.max_rows} at a time: a larger max_rows of "
            "data.sampler takes fewer steps, if memory allows."
        )
    if facts.longest > 2 * facts.mean_tokens:
        return (
            f"{text}. The longest response has {facts.longest} tokens, the mean is {facts.mean_tokens:.0f}: the last "
            "steps draw for a few responses only, and max_new_tokens of data.sampling bounds how many there are."
        )
    if facts.max_rows is not None and facts.responses < facts.max_rows:
        return (
            f"{text}. Up to {facts.max_rows} responses (max_rows of data.sampler) would take no more steps than the "
            f"{facts.responses} that there are."
        )
    return f"{text}."


def idle_decoding(facts: Facts) -> str | None:
    """Half of the decode steps' time is in no operator."""
    decode = facts.operators.get(DECODE)
    if decode is None or facts.share(DECODE) < 0.2 or not decode.seconds or decode.busy >= 0.5:
        return None
    what = "kernels" if facts.device == "cuda" else "operators"
    return (
        f"In decode steps, {what} take {decode.busy:.0%} of the time; in the rest, Python has not yet told the device "
        "what to do (tracing adds to that). There, more responses at once cost next to nothing."
    )


def rewards(facts: Facts) -> str | None:
    """A fifth or more is rewards."""
    if facts.share(REWARDS) < 0.2:
        return None
    each = {n: v for n, v in facts.figures.items() if n.startswith("perf/reward_seconds/") and v > 0}
    name = max(each, key=lambda n: each[n]).rpartition("/")[2] if each else None
    slowest = f"; the slowest is {name}, with {max(each.values()):.2f} s" if name else ""
    return f"Rewards take {facts.share(REWARDS):.0%} of an iteration, while the device waits{slowest}."


def scoring(facts: Facts) -> str | None:
    """A fifth or more is old and reference log-probabilities."""
    if facts.share(SCORE) < 0.2:
        return None
    text = f"Scoring before the update takes {facts.share(SCORE):.0%} of an iteration."
    if facts.needs_reference:
        text += " The reference is scored for the KL: kl_coef=0 does without."
    if facts.steps > 1:
        text += f" Old log-probabilities are for the {facts.steps} optimizer steps: a single one needs none."
    return text


def padding(facts: Facts) -> str | None:
    """A fifth of the positions or more is padding."""
    share = facts.figures.get("perf/padding_share", 0.0)
    if share < 0.2 or facts.leaves_out_padding:
        return None
    how = "data.packing=true puts several demonstrations into a row" if facts.can_pack else ""
    how = how or "smaller minibatches (a larger trainer.accumulate_grad_batches) have rows of similar lengths"
    return f"{share:.0%} of the positions that the update computes are padding: {how}."


def arithmetic(facts: Facts) -> str | None:
    """The update is far from what the device can do, and something is known that can be changed."""
    mfu = facts.figures.get("perf/mfu", 1.0)
    if mfu >= 0.3 or facts.share(*UPDATE) < 0.2:
        return None
    text = f"The update reaches {mfu:.0%} of what a product of two matrices does here"
    if facts.device == "cuda" and facts.precision == "32-true" and not facts.tf32:
        return f"{text}, in float32: --trainer.precision=bf16-mixed, or policy.tf32, would use the tensor cores."
    if facts.minibatches > facts.steps:
        return (
            f"{text}. Its steps are cut into {facts.minibatches // facts.steps} minibatches each: fewer, larger ones "
            "(a smaller trainer.accumulate_grad_batches) give the device more to do at once, if memory allows."
        )
    return None


def optimizer(facts: Facts) -> str | None:
    """The optimizer takes long, and is not fused."""
    if facts.share(OPTIMIZER) < 0.15 or facts.fused:
        return None
    return (
        f"The optimizer takes {facts.share(OPTIMIZER):.0%} of an iteration and is not fused: fused: true in its "
        "init_args updates all moments in one pass."
    )


def validation(facts: Facts) -> str | None:
    """A tenth of the run or more is validation."""
    if not facts.validates_every or not facts.seconds.get(VALIDATION) or not facts.iterations:
        return None
    validated = sum((number + 1) % facts.validates_every == 0 for number in facts.iterations)
    if not validated:
        return None
    once = facts.seconds[VALIDATION] * len(facts.iterations) / validated
    learning = (facts.whole - facts.seconds[VALIDATION]) * facts.validates_every
    share = once / (once + learning)
    if share < 0.1:
        return None
    return (
        f"Validation takes {once:.1f} s, every {facts.validates_every} iterations: {share:.0%} of the run. "
        "A larger trainer.check_val_every_n_epoch, or a data.val_limit, takes less."
    )


def saving(facts: Facts) -> str | None:
    """A tenth of an iteration or more is checkpoints."""
    if facts.share(CHECKPOINT) < 0.1:
        return None
    return (
        f"Checkpoints take {facts.share(CHECKPOINT):.0%} of an iteration: every of IterationCheckpoint is how many "
        "iterations lie from one to the next."
    )


RULES: tuple[Callable[[Facts], str | None], ...] = (
    sampling,
    idle_decoding,
    rewards,
    scoring,
    padding,
    arithmetic,
    optimizer,
    validation,
    saving,
)


def advice(facts: Facts) -> list[str]:
    """What the rules say."""
    return [text for rule in RULES if (text := rule(facts)) is not None]
