"""A federated fit in one process, for tests and for measuring: the sites answer in turn, without files or a network."""

from __future__ import annotations

from collections.abc import Mapping

from m2lgdg.cohort import Cohort
from m2lgdg.federated import sums
from m2lgdg.federated.coordinator import coordinate, total
from m2lgdg.federated.plan import Plan, Settings
from m2lgdg.federated.site import Site, prepared
from m2lgdg.model.model import Model


def simulate(study: Settings, cohorts: Mapping[str, Cohort]) -> Model:
    """Fit a study on the cohorts of its sites."""
    joined = {name: prepared(study, cohort, name) for name, cohort in cohorts.items()}
    plan = Plan(study, tuple(member for member, _ in joined.values()))
    sites = {name: Site(plan, name, arrays) for name, (_, arrays) in joined.items()}
    work = coordinate(plan)
    request = next(work)
    while True:
        answers = {}
        for name, site in sites.items():
            words = site.answer(request)
            answers[name] = {ask.key: sums.to_bytes(words[ask.key], plan.form(ask)) for ask in request.asks}
        try:
            request = work.send(total(plan, request, answers))
        except StopIteration as ended:
            fitted: Model = ended.value
            return fitted
