"""What the coordinator computes: requests to the sites, and from their totals the fitted model.

`coordinate` is a generator: it yields the next request and is sent the totals of all sites. Files, Flower and tests drive the
same generator, so they give the same bits; after a kill it is run again on the stored totals, and every site runs it to check
what it is asked (`adopt`). What does not depend on each other is done by tasks that share rounds.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from m2lgdg.cohort import natural_key
from m2lgdg.federated import sums
from m2lgdg.federated.plan import CUTS, MEASURES, NO_TABLES, Arrays, Ask, Floats, Plan, Request
from m2lgdg.federated.platt import curve, intercept
from m2lgdg.methods.amplitude import MARGIN, STANDARDISED, TAIL, AmplitudeRange
from m2lgdg.methods.blocks import SMALLEST_SPREAD
from m2lgdg.methods.linear import DO_NOT_HOLD, note_on_connectomes
from m2lgdg.methods.solvers import adaptive_scales
from m2lgdg.methods.tables import discriminant_weights
from m2lgdg.methods.within_sites import parts_of_weight
from m2lgdg.metrics import FLAT, FLAT_NOTE
from m2lgdg.model.model import Model
from m2lgdg.preprocess import CATEGORICAL
from m2lgdg.storage import InputError

Totals = Mapping[str, npt.NDArray[np.int64]]  # by key of the ask; of sums by fold, one more axis in front
Task = Generator[list[Ask], list[Floats], None]
TAILS = dict(zip(MEASURES, (TAIL, TAIL, 1 - TAIL), strict=True))  # quantile that limits each measure of amplitudes
CONVERGED, CONVERGED_FOLD = 3e-8, 1e-7  # residuals of conjugate gradients; folds only serve the calibration
MOST_STEPS = 60  # of conjugate gradients
TOLERANCE = 1e-6  # relative, between the same program on two kinds of processors
CONSTANT = 1e-12  # variance relative to the mean square, below which a phenotype is constant


@dataclass
class Work:
    """State that the tasks share: the plan, totals that were or will be sent (`known`), and results."""

    plan: Plan
    known: dict[str, Floats] = field(default_factory=dict)
    unsent: list[str] = field(default_factory=list)
    means: dict[str, Floats] = field(default_factory=dict)  # block -> (feature,) means over all subjects
    parts: Floats = field(default_factory=lambda: np.zeros(0))  # (input,) of the weight of each phenotype
    limits: dict[str, float] = field(default_factory=dict)  # measure of amplitudes -> its quantile
    weights: dict[str, float] = field(default_factory=dict)  # of blocks
    relative: dict[str, float] = field(default_factory=dict)  # sd of phenotypes' part of the decision, in units of the scan's
    spread: float = 0.0  # sd of held-out decisions
    calibration: tuple[float, float] = (1.0, 0.0)

    def publish(self, name: str, value: npt.ArrayLike) -> None:
        """Send a value to all sites with the next request."""
        self.known[name] = np.asarray(value, dtype=np.float64)
        self.unsent.append(name)

    @property
    def usable_scans(self) -> int:
        """Number of scans that were not standardised; none of connectomes, which have no amplitudes."""
        return round(float(self.known["usable.amplitude"][-1])) if "amplitude" in self.plan.blocks else 0

    @property
    def uses_amplitude(self) -> bool:
        """Whether most scans have amplitudes."""
        return 2 * self.usable_scans > self.plan.subjects


def coordinate(plan: Plan) -> Generator[Request, Totals, Model]:
    """Yield one request per round and receive its totals; the result is the fitted model."""
    work = Work(plan)
    tasks: list[Task] = [_fill(work, column) for column in plan.study.inputs]
    tasks += [_moments(work, column) for column in plan.study.inputs]
    tasks += [_block(work, block) for block in plan.blocks]
    tasks += [_amplitude_limit(work, measure) for measure in MEASURES if "amplitude" in plan.blocks]
    rounds = yield from _run(work, tasks, 0)
    rounds = yield from _run(work, [_calibrate(work)], rounds)
    return _fitted(work, rounds)


def adopt(own: Request, sent: Request, where: str) -> None:
    """Refuse a request that this program would not have made; take over its last digits, since all sites must use the same."""
    asks = [(ask.kind, ask.name) for ask in own.asks]
    if own.round != sent.round or asks != [(ask.kind, ask.name) for ask in sent.asks]:
        raise InputError(f"{where} asks for other sums than the totals of the sites lead to; it is not answered.")
    for mine, given in [
        (own.values, sent.values),
        *((a.arguments, b.arguments) for a, b in zip(own.asks, sent.asks, strict=True)),
    ]:
        if set(mine) != set(given):
            raise InputError(f"{where} holds arrays that are not part of the protocol; it is not answered.")
        for name, array in mine.items():
            if not _agree(array, given[name]):
                raise InputError(f"{where}: {name} is not what the totals of the sites lead to; it is not answered.")
            array[...] = given[name]


def _agree(mine: npt.NDArray[Any], given: npt.NDArray[Any]) -> bool:
    if mine.shape != given.shape or mine.dtype != given.dtype:
        return False
    if mine.dtype.kind != "f":
        return bool((mine == given).all())
    size = np.abs(mine).max(axis=-1, keepdims=True) if mine.ndim else np.abs(mine)
    return bool((np.abs(mine - given) <= TOLERANCE * size).all())  # False for NaN


def total(
    plan: Plan, request: Request, answers: Mapping[str, Mapping[str, npt.NDArray[Any]]]
) -> dict[str, npt.NDArray[np.int64]]:
    """Totals of the answers of all sites by key; sums by fold have one row per fold, the last for sites in none."""
    result = {}
    for ask in request.asks:
        form = plan.form(ask)
        if not form.by_fold:
            result[ask.key] = sums.add((answer[ask.key] for answer in answers.values()), form)
            continue
        folds = [*range(plan.fits - 1), -1]
        groups = [[answers[site][ask.key] for site in answers if plan.fold_of[site] == fold] for fold in folds]
        result[ask.key] = np.stack([sums.add(group, form) for group in groups])
    return result


def _run(work: Work, tasks: Iterable[Task], rounds: int) -> Generator[Request, Totals, int]:
    """Run tasks side by side, the asks of all of them in one request per round; the number of rounds so far."""
    waiting = {task: next(task, None) for task in tasks}
    while any(asks is not None for asks in waiting.values()):
        asks = tuple(ask for given in waiting.values() for ask in given or ())
        if asks:
            rounds += 1
            values, work.unsent = {name: work.known[name] for name in work.unsent}, []
            totals = yield Request(rounds, values, asks)
            numbers = {ask.key: sums.to_numbers(totals[ask.key], work.plan.form(ask)) for ask in asks}
        before = len(work.known)
        for task, given in waiting.items():
            if given is not None:
                waiting[task] = _sent(task, [numbers[ask.key] for ask in given])
        if not asks and len(work.known) == before and not any(waiting.values()):
            raise RuntimeError("the tasks of a federated fit wait for each other")
    return rounds


def _sent(task: Task, totals: list[Floats]) -> list[Ask] | None:
    try:
        return task.send(totals)
    except StopIteration:
        return None


def _await(work: Work, names: Iterable[str]) -> Task:
    """Wait for values that other tasks publish."""
    while not all(name in work.known for name in names):
        yield []


def _fill(work: Work, column: str) -> Task:
    """Value that replaces a missing phenotype: the mode of codes, or the median over all sites."""
    if column in CATEGORICAL:
        (counts,) = yield [Ask("codes", column)]
        work.publish(f"fill.{column}", float(counts.argmax()) if counts.any() else 0.0)
        return
    low, high, count = yield from _order_statistics(column, lambda n: ((n - 1) // 2, n // 2))
    work.publish(f"fill.{column}", (low + high) / 2 if count else 0.0)


def _order_statistics(
    name: str, ranks: Callable[[int], tuple[int, int]]
) -> Generator[list[Ask], list[Floats], tuple[float, float, int]]:
    """Two values of given ranks among those of all sites, exactly, from counts of values below cuts; and the number of values.

    Numbers are searched by their place in the order of all 64-bit numbers; each round narrows it down by a factor of 32.
    """
    ranges = [(0, 2**64), (0, 2**64)]
    while any(high - low > 1 for low, high in ranges):
        cuts = [[low + (high - low) * i // (CUTS + 1) for i in range(1, CUTS + 1)] for low, high in ranges]
        (counts,) = yield [Ask("search", name, {"cuts": np.array(cuts, dtype=np.uint64).view(np.int64)})]
        count = int(counts[-1])
        if not count:
            return math.nan, math.nan, 0
        for i, rank in enumerate(ranks(count)):
            below = counts[i * CUTS : (i + 1) * CUTS]
            edges = [ranges[i][0], *cuts[i], ranges[i][1]]
            place = int((below <= rank).sum())
            ranges[i] = edges[place], edges[place + 1]
    return sums.number(ranges[0][0]), sums.number(ranges[1][0]), count


def _moments(work: Work, column: str) -> Task:
    """Mean and sd of an imputed phenotype; an sd of 0 marks a constant one."""
    if column in CATEGORICAL or any(column in member.empty for member in work.plan.members):
        yield from _await(work, [f"fill.{column}"])
    (total,) = yield [Ask("moments", column)]
    mean, square = total / work.plan.subjects
    variance = square - mean**2
    work.publish(f"moments.{column}", [mean, math.sqrt(variance) if variance > CONSTANT * square else 0.0])


def _block(work: Work, block: str) -> Task:
    """Standardise and fit one block, in all folds and on all sites."""
    plan = work.plan
    if block == "amplitude":
        (total,) = yield [Ask("usable", "amplitude")]
        work.publish("usable.amplitude", total)
        if not work.uses_amplitude:  # the decisions of the block are 0
            zeros = np.zeros(plan.features(block))
            work.means[block] = zeros
            work.publish(f"standard.{block}", np.stack([zeros, zeros + 1]))
            work.publish(f"solution.{block}", np.zeros((plan.fits, len(zeros) + 1)))
            return
    if block == "phenotypes":
        imputed = [column for column in plan.study.inputs if any(column in member.incomplete for member in plan.members)]
        yield from _await(work, [*(f"moments.{one}" for one in plan.study.inputs), *(f"fill.{one}" for one in imputed)])
    ((total, by_weight, squares),) = yield [Ask("spread", block)]
    work.means[block] = total / plan.subjects
    weight = plan.summed_weights(plan.fits - 1)
    spread = np.sqrt(np.maximum(squares, 0.0) / weight)
    work.publish(f"standard.{block}", np.stack([by_weight / weight, np.where(spread > SMALLEST_SPREAD, spread, 1.0)]))
    (by_fold,) = yield [Ask("association", block)]
    parts = None
    if block == "phenotypes":
        parts = work.parts = yield from _held_parts(plan, by_fold)
    solution = yield from _ridge(plan, block, by_fold, parts)
    work.publish(f"solution.{block}", solution)


def _held_parts(plan: Plan, by_fold: Floats) -> Generator[list[Ask], list[Floats], Floats]:
    """(input,) part of the weight of each phenotype, as `held_parts` computes it."""
    products = np.array([np.delete(by_fold[:, 1], fit, axis=0).sum(axis=0) for fit in range(plan.fits - 1)])
    products = np.append(products, [by_fold[:, 1].sum(axis=0)], axis=0)  # (fit, input)
    slopes = products / np.array([[max(plan.summed_weights(fit), 1.0)] for fit in range(plan.fits)])
    (held,) = yield [Ask("held", "phenotypes", {"slopes": slopes})]
    mean, by_square, squares = held
    shares = sum(weight**2 for weight in plan.site_weights.values())
    return parts_of_weight(mean, squares - 2 * mean * by_square + mean**2 * shares, len(plan.site_weights))


def _ridge(plan: Plan, block: str, by_fold: Floats, parts: Floats | None = None) -> Generator[list[Ask], list[Floats], Floats]:
    """(fit, feature + 1) coefficients and intercepts of the ridge regressions, by conjugate gradients.

    `by_fold` are sums of squares and products with the label at the sites of each fold, the last row at sites in none.
    Features are scaled by the root of their parts, if given.
    """
    fits = range(plan.fits)
    trains = np.array([[fold != fit for fold in [*fits[:-1], -1]] for fit in fits], dtype=np.float64)  # (fit, fold)
    squares, products = np.einsum("pf,fkj->kpj", trains, by_fold)
    scale = np.ones_like(squares)
    if parts is not None:
        if not parts.any():
            return np.zeros((plan.fits, len(parts) + 1))
        scale *= np.sqrt(parts)
    penalty = plan.method.penalties_of(block)[0] * float((scale[-1] ** 2 * squares[-1]).sum()) / plan.subjects
    if block in plan.method.adaptive:
        counts = np.array([sum(member.subjects for member in plan.training(fit)) for fit in fits])
        scale = adaptive_scales(products, squares, np.array([plan.summed_weights(fit) for fit in fits]), counts)
    right = scale * products  # features are centred by site, so the mean of the labels drops out
    goal = np.full(plan.fits, CONVERGED_FOLD)
    goal[-1] = min(CONVERGED / max(plan.blocks[block], 1e-3), CONVERGED_FOLD)  # less exact where the block counts less
    solution = yield from _conjugate_gradients(block, scale, penalty, right, goal)
    return np.column_stack([scale * solution, [plan.mean_sign(fit) for fit in fits]])


def _conjugate_gradients(
    block: str, scale: Floats, penalty: float, right: Floats, goal: Floats
) -> Generator[list[Ask], list[Floats], Floats]:
    """(fit, feature) solution of (scale H scale + penalty) x = right, where the sites multiply by H."""
    solution, residual = np.zeros_like(right), right.copy()
    direction, size = residual.copy(), (residual**2).sum(axis=1)
    least = goal**2 * size
    for _ in range(MOST_STEPS):
        active = np.flatnonzero(size > least)
        if not len(active):
            break
        # Sites get unit vectors in float32; the step uses exactly what they got.
        moved = scale[active] * direction[active]
        length = np.maximum(np.sqrt((moved**2).sum(axis=1, keepdims=True)), 1e-300)
        sent = (moved / length).astype(np.float32)
        (product,) = yield [Ask("product", block, {"fits": active.astype(np.int64), "directions": sent})]
        steps = sent.astype(np.float64) * length
        step = np.divide(steps, scale[active], out=np.zeros_like(steps), where=scale[active] > 0)
        changed = scale[active] * product * length + penalty * step
        curvature = (step * changed).sum(axis=1)
        alpha = (step * residual[active]).sum(axis=1) / curvature
        solution[active] += alpha[:, None] * step
        residual[active] -= alpha[:, None] * changed
        before, size = size.copy(), (residual**2).sum(axis=1)
        direction[active] = residual[active] + (size[active] / before[active])[:, None] * step
    return solution


def _amplitude_limit(work: Work, measure: str) -> Task:
    """Quantile of a measure of amplitudes over all sites, between two values as numpy interpolates."""
    yield from _await(work, ["usable.amplitude"])
    if not work.uses_amplitude:
        return

    def around(count: int) -> tuple[int, int]:
        rank = math.floor(TAILS[measure] * (count - 1))
        return rank, min(rank + 1, count - 1)

    low, high, count = yield from _order_statistics(f"amplitude {measure}", around)
    if not count:
        raise InputError("only one site has scans whose ROIs were not standardised; its amplitudes cannot be compared.")
    weight = TAILS[measure] * (count - 1) % 1
    work.limits[measure] = high - (high - low) * (1 - weight) if weight >= 0.5 else low + (high - low) * weight


def _calibrate(work: Work) -> Task:
    """Weights of the blocks from the sd of held-out decisions, and Platt scaling of their sum, as `metrics.platt` does it."""
    plan, blocks = work.plan, len(work.plan.blocks)
    used = [member for member in plan.members if member.balanced or not plan.weighted]
    count = sum(member.subjects for member in used)
    (total,) = yield [Ask("decisions", "all")]
    sum_all, products_all, sum_used, products_used, within, *classes = np.split(
        total, np.cumsum([1, blocks, 1, blocks, blocks, 1])
    )
    mean, covariance = _moments_of(sum_all, products_all, plan.subjects)
    weights = _weigh(work, covariance, products_all, *classes)
    work.weights = dict(zip(plan.blocks, weights.tolist(), strict=True))
    work.spread = math.sqrt(max(float(weights @ covariance @ weights), 0.0))
    mean, covariance = _moments_of(sum_used, products_used, count)
    centre, spread = float(weights @ mean), math.sqrt(max(float(weights @ covariance @ weights), 0.0))
    if spread < 1e-12:
        prevalence = float(np.clip(sum(member.patients for member in used) / count, 0.01, 0.99))
        work.calibration = 1.0, math.log(prevalence / (1 - prevalence)) - centre
        return
    slope, offset = yield from curve("all", weights, centre, spread)
    spread = math.sqrt(max(float(weights @ within @ weights) / count, 0.0))
    if plan.weighted and spread >= 1e-12:
        least = (yield from curve("within", weights, 0.0, spread))[0] / 2
        if slope < least:
            slope, offset = least, (yield from intercept(weights, least, centre))
    work.calibration = slope, offset


def _weigh(work: Work, covariance: Floats, products: Floats, difference: Floats, scatter: Floats) -> Floats:
    """(block,) weights: by the sd of decisions, and for phenotypes beside a scan by the discriminant, as in `Linear.learn`."""
    plan, sd = work.plan, np.sqrt(np.maximum(np.diag(covariance), 0.0))
    weights = np.array(list(plan.blocks.values())) / np.where(sd > 0, sd, 1.0)
    added = np.array([name == "phenotypes" for name in plan.blocks])
    base = np.where(added, 0.0, weights)
    if added.any() and base @ products @ base > 0:
        pair = np.stack([base, 1.0 * added])  # (base and phenotypes, block)
        try:
            with np.errstate(invalid="ignore"):
                found = discriminant_weights(difference[0] @ pair.T, pair @ scatter @ pair.T / plan.subjects)
        except np.linalg.LinAlgError:
            raise InputError("the totals of decisions cannot be those of any subjects: a site sent wrong sums.") from None
        weights[added] = found if plan.weighted else 0.0
        of_scan = math.sqrt(max(float(base @ covariance @ base), 0.0))
        work.relative = {"relative": float(weights @ (added * sd)) / (of_scan or 1.0)}
    return weights


def _moments_of(total: Floats, products: Floats, count: int) -> tuple[Floats, Floats]:
    """Mean and covariance of decisions by block, from their sums."""
    mean = total[0] / count
    return mean, products / count - np.outer(mean, mean)


def _fitted(work: Work, rounds: int) -> Model:
    """The fitted model, with the same arrays as after a pooled fit."""
    plan, known, inputs = work.plan, work.known, work.plan.study.inputs
    state: Arrays = {}
    if inputs:
        moments = np.array([known[f"moments.{column}"] for column in inputs])
        state["phenotypes.scaler.fill"] = np.array([float(known[f"fill.{column}"]) for column in inputs])
        state["phenotypes.scaler.mean"] = moments[:, 0].copy()
        state["phenotypes.scaler.scale"] = np.where(moments[:, 1] > 0, moments[:, 1], np.inf)
    for block, weight in work.weights.items():
        centre, scale = known[f"standard.{block}"]
        solution = known[f"solution.{block}"][-1]  # on all sites
        unscaled = solution[:-1] / scale
        state[f"{block}.mean"] = work.means[block]
        state[f"{block}.weights"] = weight * unscaled
        state[f"{block}.intercept"] = np.array(weight * float(solution[-1] - centre @ unscaled))
    if work.uses_amplitude:
        _range(work).save(state)
    state["calibration"] = np.array(work.calibration)
    fitted = type(plan.method)(**plan.method.fields())
    fitted.state_, fitted.facts_ = state, _facts(work, rounds)
    return Model(fitted)


def _range(work: Work) -> AmplitudeRange:
    """Range of amplitudes in source, as `AmplitudeRange.fit` computes it."""
    total, limits = work.known["usable.amplitude"], work.limits
    least = limits["slope"] / MARGIN if limits["slope"] > 0 else -np.inf
    return AmplitudeRange(
        total[:-1] / total[-1],
        np.array([least, max(limits["spread"] / MARGIN, STANDARDISED), -np.inf]),
        np.array([np.inf, np.inf, limits["distance"] * MARGIN]),
    )


def _facts(work: Work, rounds: int) -> dict[str, Any]:
    plan, first = work.plan, work.plan.members[0]
    members = sorted(plan.members, key=lambda member: natural_key(member.site))
    trained = [block for block in plan.blocks if block != "amplitude" or work.uses_amplitude]
    facts: dict[str, Any] = {
        "rois": list(first.rois),
        "atlas": first.atlas,
        "scans": first.scans,
        "inputs": list(plan.study.inputs),
        "seed": 0,
        "source": {
            "cohort": "federated",
            "hash": hashlib.sha256("\n".join(sorted(member.hash for member in members)).encode()).hexdigest(),
            "sites": {member.site: {"patients": member.patients, "controls": member.controls} for member in members},
        },
        "penalties": {block: plan.method.penalties_of(block)[0] for block in trained},
        "federated": {
            "study": plan.study.id,
            "attempt": plan.attempt,
            "rounds": rounds,
            "masks": True,
            "least_subjects": plan.study.least_subjects,
            "alone": [],
        },
    }
    if plan.study.leave_out:
        facts["federated"]["left_out"] = plan.study.leave_out
    notes = [note_on_connectomes(plan.method.blocks, first.scans)]
    if "phenotypes" in plan.blocks:
        parts = dict(zip(plan.study.inputs, work.parts.tolist(), strict=True))
        facts["phenotypes"] = {"parts": parts} | work.relative
        notes += [] if work.parts.any() else [DO_NOT_HOLD]
    notes += [NO_TABLES, *[FLAT_NOTE] * (work.calibration[0] * work.spread < FLAT)]
    facts["notes"] = list(filter(None, notes))
    if "amplitude" in plan.blocks and work.usable_scans < plan.subjects:
        facts["standardised_scans"] = plan.subjects - work.usable_scans
    return facts
