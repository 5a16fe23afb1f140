"""The paper's claims, each with what it says, what was measured here, and a verdict.

holds             beyond the noise, or without one to compare with
within noise      the difference is smaller than what seeds or items leave open
does not hold     the other way round
not measured      cells are missing
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from allocmoe.artifacts import Method
from allocmoe.experiment.grid import K_BASE, PlanName
from allocmoe.experiment.results import Difference, Measure, Results, Value, minus
from allocmoe.experiment.tables import (
    ABLATION,
    MAIN,
    calibration_plans,
    digits_of,
    gains,
    k_base_plans,
    swept,
)

Verdict = Literal["holds", "within noise", "does not hold", "not measured"]

# the paper's own numbers
SETTINGS_AHEAD = 10 / 12
LEAST_RANK_CORRELATION = 0.93
MOST_ENTROPY_FALL = 0.035
MOST_DIVERGENCE = 0.014
LEAST_ENTROPY_CORRELATION = 0.7
# "comparable": within so much of LExI's speed
COMPARABLE = 0.03


@dataclass(frozen=True)
class Claim:
    """by: tasks, perplexity, or what else it was judged by."""

    name: str
    by: str
    paper: str
    here: str
    verdict: Verdict


def make_claims(results: Results) -> list[Claim]:
    makers: tuple[Callable[[Results], Iterator[Claim]], ...] = (
        _ahead,
        _ablation,
        _gains,
        _k_base,
        _calibration,
        _early_layers,
        _load,
        _entropy,
        _speed,
    )
    return [claim for maker in makers for claim in maker(results)]


def _ahead(results: Results) -> Iterator[Claim]:
    baselines = [m for m in MAIN if m != "alloc-moe" and m in results.settings.methods]
    for by, measures in (("tasks", results.groups), ("perplexity", results.texts)):
        if not measures:
            continue
        found = [
            _against_best(measure, budget, baselines)
            for measure in measures
            for budget in results.grid.budgets
        ]
        known = [difference for difference in found if difference is not None]
        won = sum(difference.better_by > 0 for difference in known)
        sure = sum(difference.verdict == "ahead" for difference in known)
        open_ = sum(difference.verdict == "within noise" for difference in known)
        verdict: Verdict = "does not hold"
        if not known:
            verdict = "not measured"
        elif won / len(known) >= SETTINGS_AHEAD:
            verdict = (
                "holds" if 2 * (sure + _without_noise(known)) >= len(known) else "within noise"
            )
        elif (sure + open_) / len(known) >= SETTINGS_AHEAD:
            verdict = "within noise"
        yield Claim(
            "Alloc-MoE is ahead of all baselines",
            by,
            "in 10 of 12 settings",
            f"in {won} of {len(known)} settings, in {sure} of them beyond the noise; "
            f"{open_} are within it",
            verdict,
        )


def _without_noise(known: Sequence[Difference]) -> int:
    """Settings that are won where no noise is known."""
    return sum(difference.noise is None and difference.better_by > 0 for difference in known)


def _against_best(measure: Measure, budget: int, baselines: Sequence[Method]) -> Difference | None:
    ours = measure.of(PlanName("alloc-moe", budget))
    best = measure.best(measure.of(PlanName(method, budget)) for method in baselines)
    return None if ours is None or best is None else measure.compare(ours, best)


def _ablation(results: Results) -> Iterator[Claim]:
    for by, measure in results.overall:
        means = {
            label: measure.over([PlanName(method, budget) for budget in results.grid.budgets])
            for label, method in ABLATION.items()
        }
        for label, other, paper in (
            ("+L", "Uniform", "+L is ahead of Uniform at every budget, by 0.4 points on average"),
            ("+T", "+L", "+T gains more than +L at most budgets"),
            ("+L +T", "+T", "both together have the best average"),
        ):
            yield _comparison(
                f"{label} is ahead of {other}", by, paper, measure, means[label], means[other]
            )


def _comparison(
    name: str, by: str, paper: str, measure: Measure, one: Value | None, other: Value | None
) -> Claim:
    if one is None or other is None:
        return Claim(name, by, paper, "", "not measured")
    digits = digits_of(measure)
    difference = measure.compare(one, other)
    here = f"{one.mean:.{digits}f} against {other.mean:.{digits}f}"
    if difference.noise is not None:
        here += f", noise {difference.noise:.{digits}f}"
    verdict: Verdict = "within noise"
    if difference.verdict != "within noise":
        verdict = "holds" if difference.better_by > 0 else "does not hold"
    return Claim(name, by, paper, here, verdict)


def _gains(results: Results) -> Iterator[Claim]:
    found = gains(results)
    if len(found) < 2:
        return
    known = [value for value in found.values() if value is not None]
    verdict: Verdict = "not measured"
    if len(known) == len(found):
        measure = results.groups[0]
        steps = [measure.compare(after, before) for before, after in pairwise(known)]
        verdict = _all_ahead(steps)
    yield Claim(
        "the gain over Uniform grows from NLU to Reasoning to Math",
        "tasks",
        "0.05, 0.70 and 2.15 points",
        ", ".join(f"{name} {value.mean:+.2f}" for name, value in found.items() if value),
        verdict,
    )


def _all_ahead(steps: Sequence[Difference]) -> Verdict:
    if any(step.verdict == "behind" for step in steps):
        return "does not hold"
    return "within noise" if any(step.verdict == "within noise" for step in steps) else "holds"


def _k_base(results: Results) -> Iterator[Claim]:
    plans = k_base_plans(results)
    for by, measure in swept(results):
        means = {name: measure.over(row) for name, row in plans.items()}
        others = [value for name, value in means.items() if name != str(K_BASE)]
        yield _comparison(
            "K_base = 1 is best",
            by,
            "best or near best on average on all three models",
            measure,
            means.get(str(K_BASE)),
            None if None in others else measure.best(others),
        )


def _calibration(results: Results) -> Iterator[Claim]:
    """Little is less than what Alloc-L gains with the main text."""
    plans = calibration_plans(results)
    for by, measure in swept(results):
        means = [measure.over(row) for row in plans.values()]
        uniform = measure.over([PlanName("uniform", b) for b in results.grid.budgets])
        known = sorted((v for v in means if v is not None), key=lambda value: value.mean)
        verdict: Verdict = "not measured"
        here = ""
        if uniform is not None and len(known) == len(means) > 1:
            # for both, the better one comes first
            ends = known[::-1] if measure.higher_is_better else known
            apart, gain = minus(ends[0], ends[-1]), minus(means[0] or uniform, uniform)
            difference = measure.compare(gain, apart)
            digits, sign = digits_of(measure), 1 if measure.higher_is_better else -1
            here = (
                f"the texts lie {sign * apart.mean:z.{digits}f} apart, Alloc-L gains "
                f"{sign * gain.mean:z.{digits}f} over Uniform"
            )
            if difference.noise is not None:
                here += f", noise {difference.noise:.{digits}f}"
            verdict = _all_ahead([difference])
        yield Claim(
            "the calibration text hardly matters",
            by,
            "three texts lie 0.09 points apart, Alloc-L gains 0.4 over Uniform",
            here,
            verdict,
        )


def _early_layers(results: Results) -> Iterator[Claim]:
    gaps = []
    for analysis in results.analyses:
        budgets = analysis.layer_budgets
        middle = max(1, len(budgets) // 2)
        gaps.append(statistics.fmean(budgets[:middle]) - statistics.fmean(budgets[-middle:]))
    here = ", ".join(f"{gap:+.2f}" for gap in gaps)
    yield Claim(
        "early layers keep more experts than deep ones",
        "layer budgets",
        "at half the budget, DeepSeek",
        f"first half of the layers over the second, experts a layer: {here}" if gaps else "",
        _all(gaps, lambda gap: gap > 0),
    )


def _all(values: Sequence[float], test: Callable[[float], bool]) -> Verdict:
    if not values:
        return "not measured"
    return "holds" if all(map(test, values)) else "does not hold"


def _load(results: Results) -> Iterator[Claim]:
    layers = [layer for analysis in results.analyses for layer in analysis.layers]
    for name, paper, values, test in (
        (
            "the order of the experts by load is kept",
            "rank correlation 0.93 to 0.99 in every layer",
            [layer.spearman for layer in layers],
            lambda value: value >= LEAST_RANK_CORRELATION,
        ),
        (
            "the load stays as even",
            "its normalised entropy falls by 0.003 to 0.035",
            [layer.entropy_before - layer.entropy_after for layer in layers],
            lambda value: value <= MOST_ENTROPY_FALL,
        ),
        (
            "the load shifts little",
            "Jensen-Shannon divergence below 0.014 in every layer",
            [layer.js_divergence for layer in layers],
            lambda value: value < MOST_DIVERGENCE,
        ),
    ):
        here = f"{min(values):.3f} to {max(values):.3f}" if values else ""
        yield Claim(name, "load balance", paper, here, _all(values, test))


def _entropy(results: Results) -> Iterator[Claim]:
    values = [
        layer.entropy_correlation
        for analysis in results.analyses
        for layer in analysis.layers
        if layer.entropy_correlation is not None
    ]
    here = ""
    if values:
        here = f"{min(values):.2f} to {max(values):.2f}, median {statistics.median(values):.2f}"
    yield Claim(
        "tokens with an undecided routing keep more experts",
        "routing entropy",
        "correlation above 0.7",
        here,
        _all(values, lambda value: value > LEAST_ENTROPY_CORRELATION),
    )


def _speed(results: Results) -> Iterator[Claim]:
    if not results.settings.timed:
        return
    budgets = sorted(results.grid.budgets, reverse=True)
    ours = [results.speed(PlanName("alloc-moe", budget)) for budget in budgets]
    lexi = [results.speed(PlanName("lexi", budget)) for budget in budgets]
    # the unmodified model comes first
    decode = [1.0, *(speed.decode.speedup for speed in ours if speed is not None)]
    # what timing the same twice differs by
    noise = abs(results.benchmark.decode_drift) if results.benchmark else None
    steps = [Difference(after / before - 1, noise) for before, after in pairwise(decode)]
    yield Claim(
        "fewer activations are faster, budget after budget",
        "decode",
        "latency falls with the budget; 1.34 times as fast at half of it",
        ", ".join(f"{value:.2f}" for value in decode) + f", noise {noise:.1%}" if steps else "",
        _all_ahead(steps) if steps else "not measured",
    )
    ratios = [
        a.decode.step.median_ms / b.decode.step.median_ms - 1
        for a, b in zip(ours, lexi, strict=True)
        if a is not None and b is not None
    ]
    yield Claim(
        "Alloc-MoE costs no time over LExI",
        "decode",
        "comparable speedups at all budgets",
        ", ".join(f"{ratio:+.1%}" for ratio in ratios),
        _all(ratios, lambda ratio: ratio <= COMPARABLE),
    )
